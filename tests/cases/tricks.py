"""Ways of calling a model and of driving optimizers: functional calls, torch.compile, GANs, closures, schedulers."""

import inspect
import os
import warnings

import torch
from harness.compare import Run3, check, expect_error, poseidon_warnings, schemes_of, sgd, trajectories
from harness.registry import BOTH, case
from torch.func import functional_call
from torch.nn import Linear, Module, Sequential, Tanh

import poseidon_hvd as hvd
from cases.linear import loss_of, mlp, train


@case
def functional_call_with_own_parameters(rank):
    def run(m, t):
        loss_of(functional_call(m, dict(m.named_parameters()), (t.x(6, 12),))).backward()

    check(rank, mlp, run, expect={"*": "sfb"})


@case(real="counts the threads of the process")
def rebuilding_takes_as_many_threads_as_torch(rank):
    """torch.set_num_threads() counts on the engine's thread too, whenever it was called."""

    def threads_after(model, optimizer):
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.ones(64, 512)).sum().backward()
            optimizer.step()
        return len(os.listdir("/proc/self/task"))

    plain, model = Linear(512, 512), Linear(512, 512)
    optimizer = hvd.DistributedOptimizer(sgd(model.parameters()), model.named_parameters(), policy="sfb")
    threads_after(model, optimizer)
    try:
        torch.set_num_threads(2)
        before = threads_after(plain, sgd(plain.parameters()))  # with the training thread's helper
        assert threads_after(model, optimizer) == before + 1  # the engine's
    finally:
        torch.set_num_threads(1)
    assert schemes_of(optimizer)["weight"] == "sfb"


@case
def functional_call_with_scaled_parameters(rank):
    """The weights of the calls are computed from ours."""

    def run(m, t):
        scaled = {name: 2 * p for name, p in m.named_parameters()}
        loss_of(functional_call(m, scaled, (t.x(6, 12),))).backward()

    check(rank, mlp, run, expect={"*": "allreduce"})


@case
def functional_gradients(rank):
    """torch.func.grad under vmap: no hook fires; the user sets .grad."""

    def run(m, t):
        params = {name: p.detach() for name, p in m.named_parameters()}

        def loss(params, x):
            return loss_of(functional_call(m, params, (x,)))

        if t.index == 1:
            loss_of(m(t.x(6, 12))).backward()
            return
        per_sample = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(params, t.x(6, 12))
        for name, p in m.named_parameters():
            p.grad = per_sample[name].sum(0)

    check(rank, mlp, run, expect={"*": "allreduce"})


@case(real="levels of forward differentiation belong to the process")
def functional_gradients_beside_capture(rank):
    def run(m, t):
        x = t.x(6, 12)
        loss_of(m(x)).backward()
        params = {name: p.detach() for name, p in m.named_parameters()}
        seen = torch.func.grad(lambda p: loss_of(functional_call(m, p, (x,))))(params)
        assert all(g.abs().sum() > 0 for g in seen.values())
        _, tangent = torch.func.jvp(lambda z: m(z), (x,), (torch.ones_like(x),))
        assert tangent.shape == (6, 10)

    check(rank, mlp, run, expect={"*": "sfb"})


@case(real="levels of forward differentiation belong to the process")
def jacobians_beside_capture(rank):
    """Of the model that is being trained, with respect to its input."""

    def run(m, t):
        x = t.x(6, 12)
        loss_of(m(x)).backward()
        assert torch.func.jacrev(lambda z: m(z))(x[0]).shape == (10, 12)
        assert torch.func.hessian(lambda z: m(z).sum())(x[0]).shape == (12, 12)
        _, pull = torch.func.vjp(lambda z: m(z), x)
        assert pull(torch.ones(6, 10, dtype=x.dtype))[0].shape == x.shape

    check(rank, mlp, run, expect={"*": "sfb"})


@case
def slopes_in_the_loss(rank):
    """As in physics-informed networks: derivatives by torch.func, in a loss whose backward reaches the weights
    through them.
    """

    def run(m, t):
        x = t.x(6, 12)
        slope = torch.func.grad(lambda params, z: functional_call(m, params, (z,)).sum(), argnums=1)
        slopes = torch.func.vmap(slope, in_dims=(None, 0))(dict(m.named_parameters()), x)
        (loss_of(m(x)) + slopes.pow(2).mean()).backward()

    with poseidon_warnings():
        runs = Run3(rank, mlp, run)
        for step in range(4):
            runs.step(step)
    runs.finish({"*.weight": "allreduce"})


@case
def vmap_over_the_model(rank):
    def run(m, t):
        loss_of(torch.func.vmap(m)(t.x(6, 12))).backward()

    check(rank, mlp, run, expect={})  # whatever the scheme: exact


def _compiled():
    """One compiled form per model, made at its first use."""
    forms = {}

    def of(model):
        if id(model) not in forms:
            torch._dynamo.reset()
            forms[id(model)] = torch.compile(model, backend="aot_eager")
        return forms[id(model)]

    return of


@case(real="torch.compile's caches belong to the process", seconds=150)
def compiled_after_wrapping(rank):
    of = _compiled()
    check(rank, mlp, lambda m, t: loss_of(of(m)(t.x(6, 12))).backward(), expect={"*": "allreduce"})


@case(real="torch.compile's caches belong to the process", seconds=150)
def compiled_before_wrapping(rank):
    of = _compiled()

    def build_and_run():
        m = mlp()
        of(m)(torch.zeros(6, 12))
        return m

    check(rank, build_and_run, lambda m, t: loss_of(of(m)(t.x(6, 12))).backward(), expect={"*": "allreduce"})


@case(real="torch.compile's caches belong to the process", seconds=150)
def compiled_later(rank):
    """Eager, and captured, for two steps; then compiled: no capture but a gradient, so dense on all ranks."""
    of = _compiled()
    check(
        rank,
        mlp,
        lambda m, t: loss_of((of(m) if t.index >= 2 else m)(t.x(6, 12))).backward(),
        expect={"*": "allreduce"},
        warns=["its gradient came from elsewhere"] * 3,
    )


@case(real="torch.compile's caches belong to the process", seconds=150)
def compiled_in_part(rank):
    of = _compiled()

    parts = {}

    def run(m, t):
        part = parts.setdefault(id(m), m[:4])
        loss_of(m[4](of(part)(t.x(6, 12)))).backward()

    check(rank, mlp, run, expect={"0.*": "allreduce", "2.*": "allreduce", "4.*": "sfb"})


class Generator(Module):
    def __init__(self):
        super().__init__()
        self.net = Sequential(Linear(4, 16), Tanh(), Linear(16, 12))

    def forward(self, z):
        return self.net(z)


def _gan(rank, between):
    """The usual loop. ``between(critic, opt_d, phase)`` is what makes it work with distributed optimizers."""

    def script(wrap, t):
        generator, critic = Generator().to(t.dtype), Sequential(Linear(12, 16), Tanh(), Linear(16, 1)).to(t.dtype)
        opt_g = wrap(sgd(generator.parameters()), named_parameters=list(generator.named_parameters("G")))
        opt_d = wrap(sgd(critic.parameters()), named_parameters=list(critic.named_parameters("D")))
        for step in range(5):
            real = rank.random(step, 6, 12).float().to(t.dtype)
            noise = rank.random(step, 5 + rank.rank, 4, salt=1).float().to(t.dtype)
            between(critic, opt_d, "critic")
            opt_d.zero_grad()
            (loss_of(critic(real)) - loss_of(critic(generator(noise).detach()))).backward()
            opt_d.step()
            between(critic, opt_d, "generator")
            opt_g.zero_grad()
            loss_of(critic(generator(noise))).backward()
            opt_g.step()
        return list(generator.named_parameters("G")) + list(critic.named_parameters("D"))

    return script


@case(**BOTH)
def gan_with_the_critic_frozen(rank):
    def between(critic, opt_d, phase):
        critic.requires_grad_(phase == "critic")

    trajectories(rank, _gan(rank, between))


@case
def gan_with_synchronize(rank):
    """The critic's hooks fire in the generator's backward; what they captured is reduced once and thrown away. It comes
    on top of the last step's gradient, which is still there: no longer factors alone, and from then on dense.
    """

    def between(critic, opt_d, phase):
        if phase == "critic":
            opt_d.synchronize()

    trajectories(
        rank, _gan(rank, between), warns=["D.0.weight: part of its gradient", "D.2.weight: part of its gradient"]
    )


@case
def gan_guard(rank):
    """Without the workaround. With reduce_in="step" it is Horovod's error, not a second message; gradients that
    backward() has reduced may be cleared.
    """
    for reduce_in in ("backward", "step"):
        generator, critic = Generator(), Sequential(Linear(12, 1))
        opt_g = hvd.DistributedOptimizer(
            sgd(generator.parameters()), generator.named_parameters("G"), policy="sfb", reduce_in=reduce_in
        )
        opt_d = hvd.DistributedOptimizer(
            sgd(critic.parameters()), critic.named_parameters("D"), policy="sfb", reduce_in=reduce_in
        )
        for step in range(3):
            loss_of(critic(generator(rank.random(step, 6, 4).float()))).backward()
            opt_g.step()
            if reduce_in == "step":
                expect_error(rank, AssertionError, ["zero_grad"], opt_d.zero_grad)
                opt_d.synchronize()
            opt_d.zero_grad()
            opt_g.zero_grad()
        assert set(schemes_of(opt_g).values()) == {"sfb"}
        # No step of the critic's has come to its end where its gradients were discarded, so it has no plan.
        assert set(schemes_of(opt_d).values()) == ({"sfb"} if reduce_in == "step" else set())


@case(**BOTH)
def several_optimizers_over_one_model(rank):
    def script(wrap, t):
        m = mlp().to(t.dtype)
        optimizers = [
            wrap(sgd(m[i].parameters()), named_parameters=list(m[i].named_parameters(str(i)))) for i in (0, 2, 4)
        ]
        for step in range(5):
            for o in optimizers:
                o.zero_grad()
            loss_of(m(rank.random(step, 6, 12).float().to(t.dtype))).backward()
            for o in reversed(optimizers):
                o.step()
        return list(m.named_parameters())

    trajectories(rank, script)


@case
def weight_and_bias_in_different_optimizers(rank):
    """The bias of a captured layer belongs to somebody else: the weight is factored without it."""

    def script(wrap, t):
        m = mlp().to(t.dtype)
        weights = [(n, p) for n, p in m.named_parameters() if "weight" in n]
        biases = [(n, p) for n, p in m.named_parameters() if "bias" in n]
        optimizers = [wrap(sgd([p for _, p in part]), named_parameters=part) for part in (weights, biases)]
        for step in range(5):
            for o in optimizers:
                o.zero_grad()
            loss_of(m(rank.random(step, 6, 12).float().to(t.dtype))).backward()
            for o in optimizers:
                o.step()
        return list(m.named_parameters())

    trajectories(rank, script)


@case
def one_weight_in_two_optimizers(rank):
    """Both reduce it, one after the other."""
    model = mlp()
    first = hvd.DistributedOptimizer(sgd(model.parameters()), model.named_parameters("first"), policy="allreduce")
    for step in range(3):
        first.zero_grad()
        loss_of(model(rank.random(step, 6, 12).float())).backward()
        first.step()
        rank.assert_same_everywhere(model.parameters(), "parameters")
    second = hvd.DistributedOptimizer(
        sgd(model[4].parameters()), model[4].named_parameters("second"), policy="allreduce"
    )
    for step in range(3):
        first.zero_grad()
        second.zero_grad()
        loss_of(model(rank.random(step, 6, 12).float())).backward()
        first.step()
        second.step()
        rank.assert_same_everywhere(model.parameters(), "parameters")


@case
def two_models_of_one_shape_in_one_backward(rank):
    """Plain Horovod refuses the second tensor of the same name."""

    def script(wrap, t):
        models = [mlp().to(t.dtype), mlp().to(t.dtype)]
        optimizers = [wrap(sgd(m.parameters()), named_parameters=list(m.named_parameters())) for m in models]
        for step in range(5):
            x = rank.random(step, 6, 12).float().to(t.dtype)
            for o in optimizers:
                o.zero_grad()
            (loss_of(models[0](x)) + 2 * loss_of(models[1](x))).backward()
            for o in optimizers:
                o.step()
        return [(f"{i}.{name}", p) for i, m in enumerate(models) for name, p in m.named_parameters()]

    trajectories(rank, script, horovod=False)


@case
def closure(rank):
    """Plain Horovod synchronizes before the closure runs; ours synchronizes what the closure computed."""

    def script(wrap, t):
        m = mlp().to(t.dtype)
        o = wrap(sgd(m.parameters()), named_parameters=list(m.named_parameters()))
        losses = []
        for step in range(5):
            x = rank.random(step, 6, 12).float().to(t.dtype)

            def compute():
                o.zero_grad()
                loss = loss_of(m(x))
                loss.backward()
                return loss

            losses.append(o.step(compute))
        assert all(isinstance(loss, torch.Tensor) for loss in losses)
        return list(m.named_parameters())

    trajectories(rank, script, horovod=False)


@case
def schedulers(rank):
    """Made on the base optimizer before wrapping, and on the wrapped one: learning rates follow, and nothing warns."""
    for early in (True, False):
        model = mlp()
        base = torch.optim.SGD(model.parameters(), lr=1.0)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            scheduler = torch.optim.lr_scheduler.StepLR(base, 2, 0.1) if early else None
            optimizer = hvd.DistributedOptimizer(base, model.named_parameters(), policy="sfb")
            scheduler = scheduler or torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=8)
            rates = []
            for step in range(4):
                optimizer.zero_grad()
                loss_of(model(rank.random(step, 6, 12).float())).backward()
                optimizer.step()
                scheduler.step()
                rates.append(optimizer.param_groups[0]["lr"])
        texts = [str(w.message) for w in caught if "lr_scheduler" in str(w.message)]
        assert not texts, (early, texts)
        if early:
            torch.testing.assert_close(torch.tensor(rates), torch.tensor([1.0, 0.1, 0.1, 0.01]))
        assert len(set(rates)) > 1, rates
        rank.assert_same_everywhere(model.parameters(), "parameters")


@case
def step_hooks(rank):
    """Each runs once per step, on the wrapped optimizer."""
    calls = []
    model = mlp()
    base = sgd(model.parameters())
    base.register_step_post_hook(lambda optimizer, args, kwargs: calls.append("base"))
    optimizer = hvd.DistributedOptimizer(base, model.named_parameters(), policy="sfb")
    optimizer.register_step_pre_hook(lambda optimizer, args, kwargs: calls.append("pre"))
    for step in range(2):
        optimizer.zero_grad()
        loss_of(model(rank.random(step, 6, 12).float())).backward()
        optimizer.step()
    assert calls == ["pre", "base"] * 2, calls


def _ending(step):
    """The name of the exception that it ends with."""
    try:
        step()
    except Exception as error:
        return type(error).__name__
    return None


@case(seconds=150)
def every_optimizer_of_torch(rank):
    """All classes that take a list of matrices, in each implementation that they have. Given the same gradients the
    wrapped one does what the plain one does, bit for bit; capturable ones want a GPU, and say so.
    """
    tried = set()
    for name in sorted(dir(torch.optim)):
        kind = getattr(torch.optim, name)
        if not isinstance(kind, type) or not issubclass(kind, torch.optim.Optimizer):
            continue
        if name in ("Optimizer", "LBFGS", "SparseAdam"):
            continue
        for option in (
            None,
            *(name for name in ("foreach", "fused", "capturable") if name in inspect.signature(kind).parameters),
        ):
            made = []
            for _ in range(2):
                torch.manual_seed(7)
                model = mlp(bias=name != "Muon")
                made.append((model, kind(model.parameters(), lr=0.01, **({option: True} if option else {}))))
            (model, base), (twin, plain) = made
            optimizer = hvd.DistributedOptimizer(base, model.named_parameters(), policy="sfb")
            assert isinstance(optimizer, kind)
            for step in range(3):
                optimizer.zero_grad()
                loss_of(model(rank.random(step, 6, 12).float())).backward()
                optimizer.synchronize()
                for p, q in zip(model.parameters(), twin.parameters()):
                    q.grad = p.grad.clone()
                with optimizer.skip_synchronize():
                    ended = _ending(optimizer.step)
                assert ended == _ending(plain.step) == ("AssertionError" if option == "capturable" else None), (
                    name,
                    option,
                    ended,
                )
                assert all(torch.equal(p, q) for p, q in zip(model.parameters(), twin.parameters())), (name, option)
                rank.assert_same_everywhere(model.parameters(), f"{name}, {option}")
            assert set(schemes_of(optimizer).values()) == {"sfb"}, (name, option)
            tried.add((name, option))
    assert {
        ("SGD", "fused"),
        ("Adam", "fused"),
        ("AdamW", "foreach"),
        ("Adagrad", None),
        ("RMSprop", "capturable"),
    } <= tried, tried


@case
def fused_and_foreach(rank):
    for options in ({"fused": True}, {"foreach": True}, {"capturable": False, "amsgrad": True}):
        model = mlp()
        optimizer = hvd.DistributedOptimizer(
            torch.optim.AdamW(
                model.parameters(), lr=torch.tensor(0.01) if options.get("foreach") is None else 0.01, **options
            ),
            model.named_parameters(),
            policy="sfb",
        )
        for step in range(3):
            optimizer.zero_grad()
            loss_of(model(rank.random(step, 6, 12).float())).backward()
            optimizer.step()
        rank.assert_same_everywhere(model.parameters(), str(options))


@case(real="Horovod's own collectives")
def user_collectives_in_between(rank):
    """The script's own Horovod calls while gradients and factors are in flight."""

    def run(m, t):
        loss = loss_of(m(t.x(6, 12)))
        loss.backward()
        if t.kind != "reference":
            assert hvd.allgather(torch.tensor([rank.rank]), name="user.gather").tolist() == list(range(rank.size))
            handle = hvd.allreduce_async(torch.ones(3), name="user.reduce")
            assert hvd.broadcast(torch.tensor([rank.rank]), 0, name="user.broadcast").item() == 0
            assert hvd.synchronize(handle).tolist() == [1.0] * 3

    check(rank, mlp, run, expect={"*": "sfb"})


@case(real="Horovod's own collectives")
def differentiable_allgather_in_the_loss(rank):
    """As in contrastive training: the loss itself communicates, forward and backward."""

    def run(m, t):
        y = m(t.x(4, 12))
        everyone = rank.horovod.allgather(y, name=f"loss.{t.kind}")
        (y @ everyone.t()).tanh().sum().backward()

    check(rank, mlp, run, expect={"*": "sfb"})


@case
def train_and_evaluate(rank):
    """eval() forwards with gradients on and off between the steps, also through fused fast paths."""

    def build():
        return torch.nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)

    def run(m, t):
        m.eval()
        with torch.no_grad():
            m(t.x(3, 5, 16, salt=1))
        with torch.inference_mode():
            m(t.x(3, 5, 16, salt=1))
        m.train()
        train(3, 5, 16)(m, t)

    check(rank, build, run, expect={"linear1.*": "sfb", "linear2.*": "sfb"})

"""What users do to the autograd graph: checkpointing, in-place operations, second derivatives, partial backwards,
hooks.
"""

import torch
from harness.compare import check, expect_error, schemes_of, sgd
from harness.registry import BOTH, case
from torch.nn import Linear, ReLU, Sequential, Tanh
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

import poseidon_hvd as hvd
from cases.linear import loss_of, mlp, train


@case
def in_place_activation(rank):
    def build():
        return Sequential(
            Linear(12, 32), ReLU(inplace=True), Linear(32, 32), torch.nn.LeakyReLU(inplace=True), Linear(32, 10)
        )

    check(rank, build, train(6, 12), expect={"*": "sfb"})


@case
def residual_in_place(rank):
    def run(m, t):
        x = t.x(6, 12)
        y = m[0](x)
        y += x
        z = m[1](y)
        z += y
        z.mul_(2.0)
        loss_of(z).backward()

    check(rank, lambda: Sequential(Linear(12, 12), Linear(12, 12)), run, expect={"*": "sfb"})


@case
def input_modified_after_the_call(rank):
    """Autograd refuses the backward, with and without capture."""
    model = Sequential(Linear(12, 12))
    optimizer = hvd.DistributedOptimizer(sgd(model.parameters()), model.named_parameters(), policy="sfb")
    for step in range(3):
        optimizer.zero_grad()
        x = rank.random(step, 6, 12).float()
        y = model(x)
        if step < 2:
            loss_of(y).backward()
            optimizer.step()
    x.add_(1)
    expect_error(rank, RuntimeError, ["modified by an inplace operation"], lambda: loss_of(y).backward())


def _checkpointed(reentrant, rows=6):
    def run(m, t):
        x = t.x(rows, 12).requires_grad_()
        h = checkpoint(lambda z: torch.tanh(m[0](z)), x, use_reentrant=reentrant)
        h = checkpoint(lambda z: torch.tanh(m[2](z)), h, use_reentrant=reentrant)
        loss_of(m[4](h)).backward()

    return run


@case
def checkpoint_reentrant(rank):
    check(rank, mlp, _checkpointed(True), expect={"*": "sfb"})


@case(**BOTH)
def checkpoint_non_reentrant(rank):
    check(rank, mlp, _checkpointed(False), expect={"*": "sfb"})


@case
def checkpoint_two_passes(rank):
    def run(m, t):
        for reentrant in (True, False):
            _checkpointed(reentrant, rows=4 + reentrant)(m, t)

    check(rank, mlp, run, expect={"*": "sfb"}, backward_passes_per_step=2)


@case
def checkpoint_non_reentrant_called_twice(rank):
    def run(m, t):
        x = t.x(6, 12).requires_grad_()
        h = checkpoint(lambda z: torch.tanh(m[0](z)), x, use_reentrant=False)
        h = h + checkpoint(lambda z: torch.tanh(m[0](z)), 2 * x, use_reentrant=False)
        loss_of(m[1](h)).backward()

    check(rank, lambda: Sequential(Linear(12, 32), Linear(32, 4)), run, expect={"*": "sfb"})


@case
def checkpoint_holds_no_activations(rank):
    import gc
    import weakref

    model = mlp()
    optimizer = hvd.DistributedOptimizer(sgd(model.parameters()), model.named_parameters(), policy="sfb")
    held = []
    for step in range(4):
        optimizer.zero_grad()
        for reentrant in (True, False):
            x = rank.random(step, 6, 12).float().requires_grad_()
            h = checkpoint(lambda z: torch.tanh(model[0](z)), x, use_reentrant=reentrant)
            held.extend([weakref.ref(x), weakref.ref(h)])
            if reentrant:
                continue
            loss_of(model[4](torch.tanh(model[2](h)))).backward()
        optimizer.step()
        del x, h
    gc.collect()
    assert not [ref for ref in held if ref() is not None]


@case
def autograd_grad_and_manual_grad(rank):
    """No hook fires; synchronize() sends what it finds in .grad. A captured layer has no rows, all of it is extra."""

    def run(m, t):
        loss = loss_of(m(t.x(6, 12)))
        if t.index != 2:
            loss.backward()
            return
        grads = torch.autograd.grad(loss, list(m.parameters()))
        for p, g in zip(m.parameters(), grads):
            p.grad = g

    check(rank, mlp, run, expect={"*": "sfb"})


@case
def autograd_grad_from_the_first_step(rank):
    def run(m, t):
        grads = torch.autograd.grad(loss_of(m(t.x(6, 12))), list(m.parameters()))
        for p, g in zip(m.parameters(), grads):
            p.grad = g

    check(rank, mlp, run, expect={"*": "allreduce"})


@case
def autograd_grad_beside_a_backward(rank):
    """A look at a weight's gradient sends nothing and changes nothing."""

    def run(m, t):
        loss = loss_of(m(t.x(6, 12)))
        seen = torch.autograd.grad(loss, [m[0].weight, m[2].bias], retain_graph=True)
        assert all(g.abs().sum() > 0 for g in seen)
        if t.kind == "poseidon":
            assert not t.optimizer._handles
        loss.backward()

    check(rank, mlp, run, expect={"*": "sfb"})


@case
def autograd_grad_with_respect_to_the_input(rank):
    def run(m, t):
        x = t.x(6, 12).requires_grad_()
        loss = loss_of(m(x))
        (seen,) = torch.autograd.grad(loss, x, retain_graph=True)
        assert seen.shape == x.shape
        if t.kind == "poseidon":
            assert not t.optimizer._handles
        loss.backward()

    check(rank, mlp, run, expect={"*": "sfb"})


@case
def backward_with_inputs(rank):
    """backward(inputs=...) that leaves parameters out, then in two parts."""

    def run(m, t):
        x = t.x(6, 12).requires_grad_()
        loss = loss_of(m(x))
        loss.backward(inputs=[x], retain_graph=True)
        if t.kind == "poseidon":
            assert not t.optimizer._handles
        loss.backward(inputs=[m[0].weight, m[0].bias, m[4].weight], retain_graph=True)
        loss.backward(inputs=[m[2].weight, m[2].bias, m[4].bias])

    # The last layer's weight and bias come in different walks, so its factors give the weight alone.
    check(rank, mlp, run, expect={"0.*": "sfb", "2.*": "sfb", "4.weight": "sfb", "4.bias": "allreduce"})


@case
def backward_with_inputs_later(rank):
    """A captured layer of which one pass wants the weight only."""

    def run(m, t):
        loss = loss_of(m(t.x(6, 12)))
        if t.index != 2:
            loss.backward()
        else:
            loss.backward(inputs=[m[0].weight, m[2].bias, *m[4].parameters()])

    check(rank, mlp, run, expect={"*": "sfb"}, warns=["its gradient came from elsewhere"] * 2)


def _penalty(m, t, x):
    x = x.requires_grad_()
    (inner,) = torch.autograd.grad(m(x).sum(), x, create_graph=True)
    return (inner.norm(dim=1) - 1).pow(2).mean()


@case
def gradient_penalty(rank):
    """WGAN-GP from the first step: the double-backward path adds to the weights outside any factor."""

    def run(m, t):
        (loss_of(m(t.x(6, 12))) + _penalty(m, t, t.x(5, 12, salt=1))).backward()

    def build():
        return Sequential(Linear(12, 16), Tanh(), Linear(16, 1))

    check(rank, build, run, expect={"*.weight": "allreduce"}, warns=["sfb was asked for but cannot be"] * 2)


@case
def gradient_penalty_later(rank):
    def run(m, t):
        loss = loss_of(m(t.x(6, 12)))
        if t.index == 2:
            loss = loss + _penalty(m, t, t.x(5, 12, salt=1))
        loss.backward()

    def build():
        return Sequential(Linear(12, 16), Tanh(), Linear(16, 1))

    check(rank, build, run, expect={"*": "sfb"}, warns=["its gradient came from elsewhere"] * 2)


@case
def gradient_penalty_on_parameters(rank):
    """A loss on the gradient of a weight itself."""

    def run(m, t):
        loss = loss_of(m(t.x(6, 12)))
        inner = torch.autograd.grad(loss, [m[0].weight], create_graph=True)[0]
        (loss + 0.1 * inner.pow(2).sum()).backward()

    # The first weight acts through its own output only, also in the second term, so its factors still tell all. The
    # second one is used by the inner backward too. SiLU: a second derivative that is nowhere constant.
    check(
        rank,
        lambda: Sequential(Linear(12, 16), torch.nn.SiLU(), Linear(16, 4)),
        run,
        expect={"0.weight": "sfb", "2.weight": "allreduce"},
        warns=["sfb was asked for but cannot be"],
    )


@case
def create_graph_backward_is_refused(rank):
    model = mlp()
    optimizer = hvd.DistributedOptimizer(sgd(model.parameters()), model.named_parameters(), policy="sfb")
    loss_of(model(rank.random(0, 6, 12).float())).backward()
    optimizer.step()
    optimizer.zero_grad()
    loss = loss_of(model(rank.random(1, 6, 12).float()))
    expect_error(rank, AssertionError, ["create_graph"], lambda: loss.backward(create_graph=True))


@case(**BOTH)
def tensor_hook_on_a_weight(rank):
    """A hook that changes the local gradient: capture must step aside for that weight."""

    def prepare(m):
        m[2].weight.register_hook(lambda g: g.clamp(-0.1, 0.1) * 3)

    check(rank, mlp, train(6, 12), expect={"2.weight": "allreduce", "0.*": "sfb"}, prepare=prepare)


@case
def tensor_hook_on_a_bias(rank):
    def prepare(m):
        m[2].bias.register_hook(lambda g: 3 * g)

    check(rank, mlp, train(6, 12), expect={"2.bias": "allreduce", "2.weight": "sfb", "0.*": "sfb"}, prepare=prepare)


@case
def tensor_hook_that_only_looks(rank):
    seen = []

    def prepare(m):
        m[2].weight.register_hook(lambda g: seen.append(tuple(g.shape)))

    check(rank, mlp, train(6, 12), expect={"2.weight": "allreduce", "0.*": "sfb"}, prepare=prepare)
    assert seen == [(24, 32)] * 12


@case
def tensor_hook_added_later(rank):
    """Registered after the plan: that step's gradient is ordinary, all of it extra, and the layer dense from then
    on.
    """

    def before(m, step):
        if step == 2:
            m[2].weight.register_hook(lambda g: 3 * g)

    check(
        rank,
        mlp,
        train(6, 12),
        expect={"2.*": "allreduce", "0.*": "sfb"},
        before=before,
        warns=["its gradient came from elsewhere"],
    )


@case
def tensor_hook_added_between_forward_and_backward(rank):
    def run(m, t):
        loss = loss_of(m(t.x(6, 12)))
        handle = m[2].weight.register_hook(lambda g: 3 * g) if t.index == 2 else None
        loss.backward()
        if handle:
            handle.remove()

    check(rank, mlp, run, expect={"2.*": "allreduce", "0.*": "sfb"}, warns=["its gradient came from elsewhere"])


@case
def tensor_hook_on_one_rank(rank):
    def prepare(m):
        if rank.rank == 0:
            m[2].weight.register_hook(lambda g: 3 * g)

    check(
        rank,
        mlp,
        train(6, 12),
        expect={"2.*": "allreduce", "0.*": "sfb"},
        prepare=prepare,
        warns=["sfb was asked for but cannot be"],
    )


@case
def post_accumulate_grad_hook(rank):
    """Sees the local gradient before it is sent, and may change it.

    A hook of the user's runs before ours in both systems.
    """

    def prepare(m):
        def triple(p):
            p.grad.mul_(3)

        m[2].weight.register_post_accumulate_grad_hook(triple)

    check(rank, mlp, train(6, 12), expect={"2.weight": "allreduce", "0.*": "sfb"}, prepare=prepare)


@case
def module_hooks(rank):
    """Forward and full backward hooks on a captured module see what they always saw."""
    seen = []

    def prepare(m):
        m[2].register_forward_hook(lambda module, args, y: y * 2)
        m[2].register_full_backward_hook(lambda module, gx, gy: seen.append((gx[0].shape, gy[0].shape)))

    check(rank, mlp, train(6, 12), expect={"*": "sfb"}, prepare=prepare)
    assert len(seen) == 12


@case
def hook_on_the_output(rank):
    def run(m, t):
        h = m[0](t.x(6, 12))
        h.register_hook(lambda g: 2 * g)
        loss_of(m[2](torch.relu(h))).backward()

    check(rank, lambda: mlp()[:3], run, expect={"*": "sfb"})


@case
def weight_norm_and_spectral_norm(rank):
    """The layer's weight is computed: what the optimizer owns is no linear weight."""

    def build():
        return Sequential(
            parametrizations.weight_norm(Linear(12, 16)),
            Tanh(),
            parametrizations.orthogonal(Linear(16, 16)),
            Linear(16, 4),
        )

    check(rank, build, train(6, 12), expect={"0.param*": "allreduce", "2.param*": "allreduce", "3.*": "sfb"})


@case
def old_weight_norm_and_pruning(rank):
    import warnings

    from torch.nn.utils import prune

    def build():
        m = Sequential(Linear(12, 16), Tanh(), Linear(16, 16), Linear(16, 4))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.nn.utils.weight_norm(m[0])
        prune.l1_unstructured(m[2], "weight", amount=0.5)
        return m

    check(rank, build, train(6, 12), expect={"0.weight_*": "allreduce", "2.weight_orig": "allreduce", "3.*": "sfb"})


@case
def pruned_later(rank):
    """The weight gets a mask after the plan: it is a parameter of the same identity, but no call uses it as it is."""

    def run(m, t):
        if t.index < 2:
            loss_of(m(t.x(6, 12))).backward()
        else:
            mask = (torch.arange(m[0].weight.numel()).view_as(m[0].weight) % 2).to(m[0].weight.dtype)
            loss_of(m[1](torch.nn.functional.linear(t.x(6, 12), m[0].weight * mask, m[0].bias))).backward()

    check(
        rank,
        lambda: Sequential(Linear(12, 16), Linear(16, 4)),
        run,
        expect={"0.*": "allreduce", "1.*": "sfb"},
        warns=["its gradient came from elsewhere"],
    )


@case(real="anomaly mode belongs to the process")
def anomaly_mode_and_retained_gradients(rank):
    def run(m, t):
        with torch.autograd.set_detect_anomaly(True, check_nan=True):
            h = m[0](t.x(6, 12))
            h.retain_grad()
            loss_of(m[4](torch.tanh(m[2](torch.relu(h))))).backward()
        assert h.grad.shape == h.shape

    check(rank, mlp, run, expect={"*": "sfb"})


@case
def backward_in_another_thread(rank):
    import threading

    def run(m, t):
        loss = loss_of(m(t.x(6, 12)))
        thread = threading.Thread(target=loss.backward)
        thread.start()
        thread.join()

    check(rank, mlp, run, expect={"*": "sfb"})


@case
def backward_twice_without_retain_graph(rank):
    model = mlp()
    optimizer = hvd.DistributedOptimizer(
        sgd(model.parameters()), model.named_parameters(), policy="sfb", backward_passes_per_step=2
    )
    for step in range(2):
        optimizer.zero_grad()
        loss = loss_of(model(rank.random(step, 6, 12).float()))
        loss.backward()
        expect_error(rank, RuntimeError, ["second time"], loss.backward)
        optimizer.step()
    rank.assert_same_everywhere(model.parameters(), "parameters")
    assert set(schemes_of(optimizer).values()) == {"sfb"}

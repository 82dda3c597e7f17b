"""What backward() returns is reduced, and what a script then does to .grad acts on that as in one process.

The reference is the same script in float64 whose gradients are averaged over ranks where backward() returns.
"""

import warnings
from functools import partial

import torch
from harness.compare import dense, expect_error, poseidon_warnings, relative_error, schemes_of, sgd
from harness.registry import case
from torch.nn import Embedding, Linear, Module, ReLU, Sequential

import poseidon_hvd as hvd
from cases.embedding import Table, plain_sgd
from cases.linear import loss_of, mlp

NETWORK = {kind: {"alpha_seconds": 1e-4, "beta_seconds_per_byte": 1e-9} for kind in ("allreduce", "allgather")}
# Each way in which a gradient can travel.
WAYS = (
    {"policy": "sfb"},
    {"policy": "bytes"},
    {"policy": "time", "network": NETWORK},
    *({"policy": "allreduce", "dense": method} for method in ("lazy:400", "wfbp", "bsp", "priority:100", "horovod")),
)
LIMIT = 1e-5  # of float32 after a few steps


class Words(Module):
    def __init__(self, sparse=False):
        super().__init__()
        self.embed, self.head = Embedding(30, 8, sparse=sparse), Linear(8, 4)

    def forward(self, ids):
        return self.head(self.embed(ids).mean(1))


def as_in_one_process(rank, script, build=mlp, steps=5, optimizer=sgd, limit=LIMIT, **wrap):
    """``script(model, optimizer, backward, x, index)`` is one step, x(*shape) its data. Returns our optimizer."""
    torch.manual_seed(7)
    ours = build()
    torch.manual_seed(7)
    theirs = build().double()
    distributed = hvd.DistributedOptimizer(optimizer(ours.parameters()), ours.named_parameters(), **wrap)
    plain = optimizer(theirs.parameters())

    def backward_of_all_ranks(loss):
        loss.backward()
        for p in theirs.parameters():
            mine = torch.zeros_like(p) if p.grad is None else dense(p.grad)
            mean = rank.reduce(mine.detach().clone())
            if p.grad is not None and not p.grad.is_sparse:
                p.grad.copy_(mean)
            elif p.requires_grad:
                p.grad = mean

    for index in range(steps):
        for model, o, backward in (
            (ours, distributed, lambda loss: loss.backward()),
            (theirs, plain, backward_of_all_ranks),
        ):
            dtype = next(model.parameters()).dtype

            def x(*shape, salt=0, dtype=dtype):
                return rank.random(index, *shape, salt=salt).float().to(dtype)

            script(model, o, backward, x, index)
        wrong = {
            name: error
            for (name, p), q in zip(ours.named_parameters(), theirs.parameters())
            if not (error := relative_error(p.detach(), q.detach())) <= limit
        }
        assert not wrong, f"step {index}, {wrap}, {schemes_of(distributed)}: {wrong}"
        rank.assert_same_everywhere(ours.parameters(), f"parameters after step {index}, {wrap}")
    return distributed


def replaced_by(change, ranks=lambda rank, index: True, set_to_none=True):
    def script(rank):
        def step(model, o, backward, x, index):
            o.zero_grad(set_to_none=set_to_none)
            backward(loss_of(model(x(6, 12))))
            for p in model.parameters():
                if ranks(rank, index):
                    change(p)
            o.step()

        return step

    return script


def scaled(p):
    p.grad = p.grad * 0.5


def scaled_in_place(p):
    p.grad.mul_(0.5)


def through_data(p):
    p.grad.data = p.grad.data * 0.5


def finite(p):
    p.grad = torch.nan_to_num(p.grad)


def cloned(p):
    p.grad = p.grad.clone()


def _gradient_replaced(rank, change, **options):
    for way in WAYS:
        for set_to_none in (True, False):
            as_in_one_process(rank, replaced_by(change, set_to_none=set_to_none, **options)(rank), **way)


@case
def gradient_scaled_between_backward_and_step(rank):
    _gradient_replaced(rank, scaled)


@case
def gradient_scaled_in_place(rank):
    _gradient_replaced(rank, scaled_in_place)


@case
def gradient_data_assigned(rank):
    _gradient_replaced(rank, through_data)


@case
def gradient_replaced_on_one_rank(rank):
    for change in (cloned, finite):
        _gradient_replaced(rank, change, ranks=lambda rank, index: rank.rank == index % rank.size)


@case
def gradient_replaced_where_step_reduces(rank):
    """Horovod's semantics: the reduced gradient is put into whatever .grad is then, whatever it was made of."""
    for way in WAYS:
        for change in (scaled, cloned, finite, lambda p: setattr(p.grad, "data", p.grad.data.clone())):

            def script(model, o, backward, x, index, change=change):
                o.zero_grad()
                backward(loss_of(model(x(6, 12))))
                if isinstance(o, torch.optim.SGD) and hasattr(o, "scheme_report"):
                    for p in model.parameters():
                        if p.grad is not None and p.grad.numel():
                            change(p)
                o.step()

            as_in_one_process(rank, script, reduce_in="step", **way)


@case
def gradient_removed_on_one_rank(rank):
    """That rank alone would leave its update out. It says so, and which parameter; nothing has been stepped."""
    for way in WAYS:
        torch.manual_seed(7)
        model = mlp()
        optimizer = hvd.DistributedOptimizer(sgd(model.parameters()), model.named_parameters(), **way)
        for step in range(3):
            optimizer.zero_grad()
            loss_of(model(rank.random(step, 6, 12).float())).backward()
            if step < 2:
                optimizer.step()
        before = [p.detach().clone() for p in model.parameters()]
        model[2].weight.grad = None
        expect_error(rank, RuntimeError, ["2.weight", ".grad = None", "skip_synchronize"], optimizer.step)
        assert all(torch.equal(a, b) for a, b in zip(before, model.parameters()))


@case
def gradient_removed_after_synchronize(rank):
    """The way to leave an update out, on all ranks."""

    def script(model, o, backward, x, index):
        o.zero_grad()
        backward(loss_of(model(x(6, 12))))
        if hasattr(o, "scheme_report"):
            o.synchronize()
        model[2].weight.grad = None
        with o.skip_synchronize() if hasattr(o, "scheme_report") else warnings.catch_warnings():
            o.step()

    for way in WAYS:
        as_in_one_process(rank, script, **way)


@case
def clipping_without_synchronize(rank):
    def script(model, o, backward, x, index):
        o.zero_grad()
        backward(loss_of(model(10 * x(6, 12))))
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        assert norm > 0.1  # something is clipped
        o.step()

    for way in WAYS:
        as_in_one_process(rank, script, **way)
    as_in_one_process(rank, script, compression=hvd.Compression.fp16, limit=2e-3)


@case
def clipping_of_tables(rank):
    """Dense and sparse gradients of an embedding, on each of its ways."""

    def script(model, o, backward, x, index):
        o.zero_grad()
        ids = rank.integers(index, 30, 5, 3)
        backward(loss_of(model(ids)))
        if model.head.weight.dtype == torch.float32:  # ours; the reference has means, which are dense
            assert model.embed.weight.grad.is_sparse == model.embed.sparse
        for p in model.parameters():
            p.grad = p.grad * 0.5
        o.step()

    for sparse, policy, scheme in (
        (False, "sfb", "row-sparse"),
        (False, "allreduce", "allreduce"),
        (True, "sfb", "row-sparse"),
        (True, "allreduce", "sparse_allgather"),
    ):
        optimizer = as_in_one_process(
            rank, script, partial(Words, sparse), optimizer=plain_sgd if sparse else sgd, policy=policy
        )
        assert schemes_of(optimizer)["embed.weight"] == scheme


@case
def table_that_one_rank_skips_when_a_plan_is_due(rank):
    """At steps 3 and 8.

    Rank 0 waits in backward() for rows that the others send in step(): they send before they agree.
    """

    def script(model, o, backward, x, index):
        o.zero_grad()
        used = rank.rank == 0 or index not in (3, 8)
        backward(loss_of(model(rank.integers(index, 30, 5))) if used else x(1).requires_grad_().sum())
        o.step()

    for policy, scheme in (("sfb", "row-sparse"), ("allreduce", "sparse_allgather")):
        optimizer = as_in_one_process(
            rank, script, lambda: Table(sparse=True), steps=10, optimizer=plain_sgd, policy=policy
        )
        assert schemes_of(optimizer) == {"embed.weight": scheme}


@case
def sharpness_aware(rank):
    """Two backwards and one step; parameters without a gradient would be skipped on the way back."""

    def script(model, o, backward, x, index):
        o.zero_grad()
        backward(loss_of(model(x(6, 12))))
        old = [p.detach().clone() for p in model.parameters()]
        with torch.no_grad():
            norm = torch.stack([p.grad.norm() for p in model.parameters()]).norm()
            for p in model.parameters():
                p.add_(p.grad * (0.05 / norm))
        o.zero_grad()
        backward(loss_of(model(x(6, 12))))
        with torch.no_grad():
            for p, value in zip(model.parameters(), old):
                assert p.grad is not None
                p.copy_(value)
        o.step()

    for way in WAYS:
        as_in_one_process(rank, script, **way)


@case
def grad_scaler_as_in_one_process(rank):
    """An overflow on one rank: every rank finds it and skips the step."""
    for way in WAYS:
        torch.manual_seed(7)
        model = mlp()
        optimizer = hvd.DistributedOptimizer(sgd(model.parameters()), model.named_parameters(), **way)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        for step in range(5):
            optimizer.zero_grad()
            loss = loss_of(model(rank.random(step, 6, 12).float()))
            overflow = step in (0, 2)
            scaler.scale(loss * float("inf") if overflow and rank.rank == 0 else loss).backward()
            before = [p.detach().clone() for p in model.parameters()]
            scaler.step(optimizer)
            scaler.update()
            assert all(torch.equal(a, b) for a, b in zip(before, model.parameters())) == overflow, step
            rank.assert_same_everywhere(model.parameters(), f"parameters after step {step}")
        assert scaler.get_scale() == 256.0


@case
def step_discarded(rank):
    """zero_grad() after backward(): the next backward begins a new step."""

    def script(model, o, backward, x, index):
        o.zero_grad()
        if index % 2:
            backward(loss_of(model(x(6, 12, salt=1))))
            o.zero_grad() if index == 1 else model.zero_grad()
        backward(loss_of(model(x(6, 12))))
        o.step()

    for way in WAYS:
        as_in_one_process(rank, script, **way)


@case
def step_discarded_under_a_hook_that_replaces(rank):
    """The pass reaches the head first, and its hook hides that the head's gradient had been cleared."""

    def script(model, o, backward, x, index):
        for p in model.parameters():
            p.grad = None
        if index % 2:
            backward(loss_of(model(x(6, 12, salt=1))))
            hook = list(model.parameters())[-2].register_post_accumulate_grad_hook(_replace_by_half)
            for p in model.parameters():
                p.grad = None
        backward(loss_of(model(x(6, 12))))
        if index % 2:
            hook.remove()
        o.step()

    for way in WAYS:
        with poseidon_warnings():
            as_in_one_process(rank, script, **way)


@case
def step_discarded_where_some_gradients_are_cleared(rank):
    """Whichever they are: the others accumulate, as in one process."""

    def script(model, o, backward, x, index):
        o.zero_grad()
        if index > 0:
            backward(loss_of(model(x(6, 12, salt=1))))
            list(model.parameters())[index - 1].grad = None
        backward(loss_of(model(x(6, 12))))
        o.step()

    for way in WAYS:
        with poseidon_warnings():
            as_in_one_process(rank, script, **way)


def _replace_by_half(p):
    p.grad = p.grad * 0.5


@case
def filled_before_backward(rank):
    """By any route, also those that leave no trace in the tensor's version."""
    fills = (
        lambda p: p.grad.data.add_(1.0),
        lambda p: p.grad.add_(1.0),
        lambda p: p.grad.detach().numpy().__iadd__(1.0),
        lambda p: setattr(p, "grad", torch.ones_like(p)),
    )
    for way in WAYS[:4]:
        for fill in fills:

            def script(model, o, backward, x, index, fill=fill):
                o.zero_grad(set_to_none=False)
                if index >= 2 and index != 4:
                    for p in model.parameters():
                        fill(p)
                backward(loss_of(model(x(6, 12))))
                o.step()

            with poseidon_warnings():
                as_in_one_process(rank, script, **way)


class Keeps(torch.optim.SGD):
    def zero_grad(self, set_to_none=False):
        for p in self.param_groups[0]["params"]:
            if p.grad is not None:
                p.grad.mul_(0.5)


@case
def a_zero_grad_that_does_not_zero(rank):
    def script(model, o, backward, x, index):
        o.zero_grad()
        backward(loss_of(model(x(6, 12))))
        o.step()

    for way in WAYS[:4]:
        with poseidon_warnings():
            as_in_one_process(rank, script, optimizer=lambda parameters: Keeps(parameters, lr=0.01), **way)


@case
def zeroed_by_a_product(rank):
    """-0.0 is nothing."""

    def script(model, o, backward, x, index):
        for p in model.parameters():
            if p.grad is not None:
                p.grad.mul_(0)
        backward(loss_of(model(x(6, 12))))
        o.step()

    optimizer = as_in_one_process(rank, script, policy="sfb")
    assert set(schemes_of(optimizer).values()) == {"sfb"}


@case
def synchronize_twice_and_go_on(rank):
    """Horovod's one warning, and the layer stays factored."""
    torch.manual_seed(7)
    model = mlp()
    optimizer = hvd.DistributedOptimizer(sgd(model.parameters()), model.named_parameters(), policy="sfb")
    for step in range(4):
        optimizer.zero_grad()
        loss_of(model(rank.random(step, 6, 12).float())).backward()
        optimizer.synchronize()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        before = [p.grad.clone() for p in model.parameters()]
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            optimizer.step()
        assert ["skip_synchronize" in str(w.message) for w in caught] == [True], [str(w.message) for w in caught]
        for old, p in zip(before, model.parameters()):
            assert relative_error(p.grad, old.double()) < 1e-6
    assert set(schemes_of(optimizer).values()) == {"sfb"}


@case
def heads_of_single_ranks(rank):
    """Ranks use different heads: nobody waits in a circle, and the trunk, which all use, is reduced in backward()."""

    class Model(Module):
        def __init__(self):
            super().__init__()
            self.trunk, self.heads = Linear(12, 16), torch.nn.ModuleList(Linear(16, 4) for _ in range(rank.size))

        def forward(self, x):
            return self.heads[rank.rank](self.trunk(x).relu())

    for way in WAYS:
        torch.manual_seed(7)
        model = Model()
        optimizer = hvd.DistributedOptimizer(sgd(model.parameters()), model.named_parameters(), **way)
        for step in range(6):
            optimizer.zero_grad()
            loss_of(model(rank.random(step, 6, 12).float())).backward()
            if way.get("dense") != "bsp":
                rank.assert_same_everywhere(
                    [p.grad for p in model.trunk.parameters()], f"the trunk's gradient, step {step}, {way}"
                )
            optimizer.step()
            rank.assert_same_everywhere(model.parameters(), f"parameters after step {step}, {way}")


@case
def two_losses_one_after_the_other(rank):
    """backward() of the first waits for nothing that the second sends."""

    def script(model, o, backward, x, index):
        o.zero_grad()
        y = model[:2](x(6, 12)).detach()
        backward(loss_of(model[2:](y)))
        first = loss_of(model[:2](x(6, 12, salt=1)))
        if hasattr(o, "scheme_report"):
            first.backward()
        else:  # averaged again what is equal on all ranks already
            backward(first)
        o.step()

    for way in WAYS[:3]:
        as_in_one_process(rank, script, lambda: Sequential(Linear(12, 16), ReLU(), Linear(16, 4)), **way)


@case
def inside_reentrant_checkpoints(rank):
    """A walk inside a walk: the outer one is not over when the inner one ends."""

    def script(model, o, backward, x, index):
        o.zero_grad()
        h = model[0](x(6, 12).requires_grad_())
        h = torch.utils.checkpoint.checkpoint(model[1:3], h, use_reentrant=True)
        backward(loss_of(model[3:](h)))
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        o.step()

    for way in WAYS[:3]:
        as_in_one_process(rank, script, **way)


@case
def converted_in_the_middle(rank):
    """.grad has the parameter's type, also where factors gave it before."""
    for first in (0, 2):
        torch.manual_seed(7)
        model = mlp()
        optimizer = hvd.DistributedOptimizer(sgd(model.parameters()), model.named_parameters(), policy="sfb")
        for step in range(5):
            if step == first:
                model.half()
            optimizer.zero_grad() if first else model.zero_grad()
            dtype = model[0].weight.dtype
            loss_of(model(rank.random(step, 6, 12).to(dtype)).float()).backward()
            assert all(p.grad.dtype == p.dtype == dtype for p in model.parameters()), step
            optimizer.step()
            rank.assert_same_everywhere(model.parameters(), f"parameters after step {step}")
        assert set(schemes_of(optimizer).values()) == {"sfb"}, (first, schemes_of(optimizer))


@case
def gradients_of_another_type(rank):
    """torch's grad_dtype is kept."""
    if not hasattr(torch.Tensor, "grad_dtype"):
        return
    for way in ({"policy": "sfb"}, {"policy": "allreduce"}):
        torch.manual_seed(7)
        model = mlp().to(torch.bfloat16)
        for p in model.parameters():
            p.grad_dtype = torch.float32
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.0), model.named_parameters(), **way
        )
        for step in range(3):
            optimizer.zero_grad()
            loss_of(model(rank.random(step, 6, 12).to(torch.bfloat16)).float()).backward()
            assert all(p.grad.dtype == torch.float32 for p in model.parameters()), (
                step,
                [p.grad.dtype for p in model.parameters()],
            )
            rank.assert_same_everywhere([p.grad for p in model.parameters()], f"gradients of step {step}")


@case
def overflow_in_the_first_step(rank):
    """Usual with loss scaling. It says nothing about the layer, which is looked at again."""
    torch.manual_seed(7)
    model = mlp()
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.0), model.named_parameters(), policy="sfb"
    )
    for step in range(6):
        optimizer.zero_grad()
        loss = loss_of(model(rank.random(step, 6, 12).float()))
        (loss * float("inf") if step == 0 else loss).backward()
        optimizer.synchronize()
        if step == 0:
            plan = optimizer.plan()
            assert all("not finite" in t["reason"] for t in plan["tensors"] if "weight" in t["name"]), plan["tensors"]
            continue
        with optimizer.skip_synchronize():
            optimizer.step()
    assert set(schemes_of(optimizer).values()) == {"sfb"}, optimizer.scheme_report()


@case
def dense_for_one_odd_step(rank):
    """A FLOP counter watches one step. The layer is dense there, one warning says so, and it comes back."""
    from torch.utils.flop_counter import FlopCounterMode

    torch.manual_seed(7)
    model = mlp()
    optimizer = hvd.DistributedOptimizer(sgd(model.parameters()), model.named_parameters(), policy="sfb")
    with poseidon_warnings() as texts:
        for step in range(12):
            optimizer.zero_grad()
            if step == 2:
                with FlopCounterMode(display=False):
                    loss_of(model(rank.random(step, 6, 12).float())).backward()
            else:
                loss_of(model(rank.random(step, 6, 12).float())).backward()
            optimizer.step()
            rank.assert_same_everywhere(model.parameters(), f"parameters after step {step}")
    assert set(schemes_of(optimizer).values()) == {"sfb"}, optimizer.scheme_report()
    assert len(texts) <= 3, texts


@case
def a_subclass_of_the_wrapped_class(rank):
    """As one trainer makes it."""
    torch.manual_seed(7)
    model = mlp()
    optimizer = hvd.DistributedOptimizer(sgd(model.parameters()), model.named_parameters(), policy="sfb")

    class Sub(type(optimizer)):
        pass

    optimizer.__class__ = Sub
    for step in range(3):
        optimizer.zero_grad()
        loss_of(model(rank.random(step, 6, 12).float())).backward()
        optimizer.step()
    optimizer.load_state_dict(optimizer.state_dict())
    rank.assert_same_everywhere(model.parameters(), "parameters")


@case(real="a collective of the script's own")
def a_collective_between_backward_and_step(rank):
    """Also in steps in which some rank does not use a layer that it used before: nobody waits in a circle."""
    for way in WAYS:
        torch.manual_seed(7)
        model = mlp()
        optimizer = hvd.DistributedOptimizer(sgd(model.parameters()), model.named_parameters(), **way)
        for step in range(8):
            optimizer.zero_grad()
            x = rank.random(step, 6, 12).float()
            left_out = step in (2, 4, 5) and rank.rank == step % rank.size
            loss = loss_of(model[4](model[1](model[0](x))[:, :24]) if left_out else model(x))
            loss.backward()
            hvd.allreduce(loss.detach(), name="loss")
            optimizer.step()
            rank.assert_same_everywhere(model.parameters(), f"parameters after step {step}, {way}")


@case(real="a collective of the script's own")
def a_collective_between_two_losses(rank):
    """A step of two walks: the rank does not take the first for the last."""
    for way in WAYS[:3]:
        torch.manual_seed(7)
        model = Sequential(Linear(12, 16), ReLU(), Linear(16, 4))
        optimizer = hvd.DistributedOptimizer(sgd(model.parameters()), model.named_parameters(), **way)
        for step in range(6):
            optimizer.zero_grad()
            x = rank.random(step, 6, 12).float()
            loss_of(model[2](model[:2](x).detach())).backward()
            hvd.allreduce(torch.ones(1), name="metric")
            loss_of(model[:2](x)).backward()
            optimizer.step()
            rank.assert_same_everywhere(model.parameters(), f"parameters after step {step}, {way}")

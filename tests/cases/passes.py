"""Backward passes per step, and everything a user may do to gradients between them."""

import copy

import torch
from harness.compare import (
    assert_schemes,
    check,
    expect_error,
    poseidon_warnings,
    relative_error,
    schemes_of,
    sgd,
    trajectories,
)
from harness.registry import BOTH, case
from torch.nn import Linear, Sequential, Tanh

import poseidon_hvd as hvd
from cases.linear import loss_of, mlp, train


def several(passes, rows=6):
    """That many backward passes, each over other data; ``passes`` may be a function of the step."""

    def run(m, t):
        for i in range(passes(t) if callable(passes) else passes):
            loss_of(m(t.x(rows, 12, salt=i))).backward()

    return run


@case
def three_passes(rank):
    check(rank, mlp, several(3), expect={"*": "sfb"}, backward_passes_per_step=3)


@case(**BOTH)
def three_passes_of_unequal_rows(rank):
    def run(m, t):
        for i in range(3):
            loss_of(m(t.x(1 + (rank.rank + i + t.index) % 3, 12, salt=i))).backward()

    check(rank, mlp, run, expect={"*": "sfb"}, backward_passes_per_step=3)


@case
def fewer_passes_than_configured(rank):
    check(rank, mlp, several(2), expect={"*": "sfb"}, backward_passes_per_step=3)


@case(**BOTH)
def fewer_passes_on_one_rank(rank):
    check(
        rank,
        mlp,
        several(lambda t: 2 if rank.rank == t.index % rank.size else 3),
        expect={"*": "sfb"},
        backward_passes_per_step=3,
    )


@case
def no_pass_on_one_rank(rank):
    check(
        rank,
        mlp,
        several(lambda t: 0 if t.index > 0 and rank.rank == t.index % rank.size else 2),
        expect={"*": "sfb"},
        backward_passes_per_step=2,
    )


@case
def passes_that_reach_different_layers(rank):
    """Layer by layer the number of passes differs from the configured one."""

    def run(m, t):
        h = m[1](m[0](t.x(6, 12)))
        loss_of(h).backward()
        loss_of(m(t.x(4, 12, salt=1))).backward()

    check(rank, mlp, run, expect={"*": "sfb"}, backward_passes_per_step=2)


@case
def three_passes_op_sum(rank):
    check(rank, mlp, several(3), expect={"*": "sfb"}, backward_passes_per_step=3, op=rank.horovod.Sum)


@case
def two_losses_over_one_graph(rank):
    def run(m, t):
        h = m[1](m[0](t.x(6, 12)))
        loss_of(m[2](h)).backward(retain_graph=True)
        loss_of(m[4](m[3](m[2](h)))).backward()

    check(rank, mlp, run, expect={"*": "sfb"}, backward_passes_per_step=2)


@case
def same_graph_twice(rank):
    def run(m, t):
        loss = loss_of(m(t.x(6, 12)))
        loss.backward(retain_graph=True)
        loss.backward()

    check(rank, mlp, run, expect={"*": "sfb"}, backward_passes_per_step=2)


@case
def interleaved_graphs(rank):
    """All forwards first, then the backwards in the other order."""

    def run(m, t):
        losses = [loss_of(m(t.x(3 + i, 12, salt=i))) for i in range(3)]
        for loss in reversed(losses):
            loss.backward()

    check(rank, mlp, run, expect={"*": "sfb"}, backward_passes_per_step=3)


@case(**BOTH)
def set_backward_passes_per_step(rank):
    def run(m, t):
        passes = 1 + t.index % 3
        if t.optimizer is not None:
            t.optimizer.set_backward_passes_per_step(passes)
        several(passes)(m, t)

    check(rank, mlp, run, expect={"*": "sfb"}, steps=6)


@case
def too_many_passes(rank):
    """Horovod's AssertionError, and after load_state_dict the optimizer works again."""
    model = mlp()
    optimizer = hvd.DistributedOptimizer(sgd(model.parameters()), model.named_parameters(), policy="sfb")
    for step in range(3):
        optimizer.zero_grad()
        loss_of(model(rank.random(step, 6, 12).float())).backward()
        optimizer.step()
    for dense_first in (True, False):
        if dense_first:
            optimizer.zero_grad()
        loss_of(model(rank.random(3, 6, 12).float())).backward()
        expect_error(
            rank,
            AssertionError,
            ["backward_passes_per_step"],
            lambda: loss_of(model(rank.random(4, 6, 12).float())).backward(),
        )
        optimizer.synchronize()


@case
def too_many_passes_in_the_profiling_step(rank):
    model = mlp()
    optimizer = hvd.DistributedOptimizer(sgd(model.parameters()), model.named_parameters(), policy="sfb")
    loss_of(model(rank.random(3, 6, 12).float())).backward()
    expect_error(
        rank,
        AssertionError,
        ["backward_passes_per_step"],
        lambda: loss_of(model(rank.random(4, 6, 12).float())).backward(),
    )
    optimizer.synchronize()


# ---- zero_grad in all forms


def _zero_case(zero):
    def run(rank):
        check(rank, mlp, train(6, 12), expect={"*": "sfb"}, zero=zero)

    return run


@case
def zero_grad_set_to_none(rank):
    _zero_case(lambda m, o: o.zero_grad(set_to_none=True))(rank)


@case
def zero_grad_keep(rank):
    _zero_case(lambda m, o: o.zero_grad(set_to_none=False))(rank)


@case
def zero_grad_positional(rank):
    _zero_case(lambda m, o: o.zero_grad(False))(rank)


@case
def model_zero_grad(rank):
    _zero_case(lambda m, o: m.zero_grad())(rank)


@case
def model_zero_grad_keep(rank):
    _zero_case(lambda m, o: m.zero_grad(set_to_none=False))(rank)


@case
def zero_grad_alternating(rank):
    calls = []

    def zero(m, o):
        calls.append(0)
        m.zero_grad(set_to_none=False) if len(calls) % 2 else o.zero_grad()

    check(rank, mlp, train(6, 12), expect={"*": "sfb"}, zero=zero, steps=6)


@case
def zero_grad_does_as_asked(rank):
    model = mlp()
    optimizer = hvd.DistributedOptimizer(sgd(model.parameters()), model.named_parameters(), policy="sfb")
    for step, to_none in enumerate((True, False, True, False)):
        loss_of(model(rank.random(step, 6, 12).float())).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=to_none)
        for p in model.parameters():
            assert (p.grad is None) if to_none else (p.grad.count_nonzero() == 0)
    assert set(schemes_of(optimizer).values()) == {"sfb"}


@case
def zero_grad_between_backward_and_step(rank):
    """Where step() reduces it is refused, as in Horovod, also while factors are in flight; the step then goes on
    unharmed. Where backward() has reduced it discards the step, as in one process.
    """

    def refused(m, t):
        loss_of(m(t.x(6, 12))).backward()
        if t.optimizer is not None:
            expect_error(rank, AssertionError, ["zero_grad"], t.optimizer.zero_grad)

    check(rank, mlp, refused, expect={"*": "sfb"}, reduce_in="step")

    def discarded(m, t):
        if t.index % 2:
            loss_of(m(t.x(6, 12, salt=1))).backward()
            m.zero_grad() if t.optimizer is None or t.kind == "horovod" else t.optimizer.zero_grad()
        loss_of(m(t.x(6, 12))).backward()

    check(rank, mlp, discarded, expect={"*": "sfb"}, steps=5)


@case
def accumulation_without_zero_grad(rank):
    """The reduced gradient of the last step is a part of this one's that no factor covers."""
    with poseidon_warnings():
        check(
            rank,
            mlp,
            train(6, 12),
            expect={"*": "allreduce"},
            keep_grads=True,
            warns=["its gradient came from elsewhere"] * 3,
        )


@case
def gradients_discarded_between_passes(rank):
    """model.zero_grad() in the middle of a step throws away what was captured so far, as it does in Horovod."""

    def run(m, t):
        loss_of(m(t.x(6, 12))).backward()
        if t.index == 2:
            m.zero_grad(set_to_none=True)
        if t.index == 3:
            m.zero_grad(set_to_none=False)
        loss_of(m(t.x(5, 12, salt=1))).backward()

    check(rank, mlp, run, expect={"*": "sfb"}, steps=5, backward_passes_per_step=2)


@case
def gradients_discarded_after_the_last_but_one_pass(rank):
    """... and nothing follows: what is left is zero."""

    def run(m, t):
        loss_of(m(t.x(6, 12))).backward()
        if t.index == 2:
            m.zero_grad(set_to_none=False)
        if t.index == 3:
            m.zero_grad(set_to_none=True)

    check(rank, mlp, run, expect={"*": "sfb"}, steps=5, backward_passes_per_step=2)


@case
def zero_gradients_scaled_between_passes(rank):
    """What .grad shows between passes is zero, and zero times anything looks as if it had been discarded.

    It must not.
    """
    model = Sequential(Linear(12, 20), Tanh(), Linear(20, 4))
    optimizer = hvd.DistributedOptimizer(
        sgd(model.parameters()), model.named_parameters(), policy="sfb", backward_passes_per_step=2
    )

    def step(index, between=lambda: None):
        optimizer.zero_grad()
        for salt in range(2):
            loss_of(model(rank.random(index, 6, 12, salt=salt).float())).backward()
            if salt == 0:
                between()
        optimizer.step()

    step(0)
    step(1, lambda: [p.grad.mul_(1.0) for p in model.parameters()])  # changes nothing
    assert_schemes(optimizer, {"*": "sfb"})
    scaled = {
        "both": lambda: [p.grad.mul_(0.5) for p in model.parameters()],
        "bias": lambda: model[2].bias.grad.mul_(2),
    }
    for index, between in enumerate(scaled.values()):
        expect_error(rank, RuntimeError, ["was modified between two backward passes"], lambda: step(2 + index, between))
        optimizer._session.reset()
    step(4)


COPIES = {
    "clone": lambda p: setattr(p, "grad", p.grad.clone()),
    "detached clone": lambda p: setattr(p, "grad", p.grad.detach().clone()),
    "deep copy": lambda p: setattr(p, "grad", copy.deepcopy(p.grad)),
    "copy of the memory": lambda p: setattr(p, "grad", torch.empty_like(p).copy_(p.grad)),
    "data": lambda p: setattr(p.grad, "data", p.grad.data.clone()),
    "alias": lambda p: setattr(p, "grad", p.grad.view_as(p)),
}


@case
def gradients_copied_between_passes(rank):
    """A copy of .grad in its place changes nothing, on whatever ranks and after whichever passes."""
    for replace in COPIES.values():

        def run(m, t, replace=replace):
            for salt in range(3):
                loss_of(m(t.x(6, 12, salt=salt))).backward()
                if t.index > 0 and salt < 2 and (rank.rank + salt) % 2 == 0:
                    for p in m.parameters():
                        replace(p)

        check(rank, mlp, run, expect={"*": "sfb"}, backward_passes_per_step=3)


@case
def gradients_copied_where_no_pass_follows(rank):
    def run(m, t):
        loss_of(m(t.x(6, 12))).backward()
        if t.index > 0 and rank.rank == 0:
            for p in m.parameters():
                COPIES["clone"](p)

    check(rank, mlp, run, expect={"*": "sfb"}, backward_passes_per_step=2)


@case
def gradients_copied_and_discarded(rank):
    """Zeros of the user's own, in place of .grad or of its copy, throw away what was captured."""

    def run(m, t):
        loss_of(m(t.x(6, 12))).backward()
        for p in m.parameters():
            if t.index in (2, 3):
                COPIES["clone"](p)
            if t.index in (1, 2):
                p.grad = torch.zeros_like(p)
            if t.index == 3:
                p.grad.zero_()
        loss_of(m(t.x(5, 12, salt=1))).backward()

    check(rank, mlp, run, expect={"*": "sfb"}, steps=5, backward_passes_per_step=2)


@case
def gradients_replaced_between_passes(rank):
    """By a tensor that may be made from what .grad showed, which was not all: refused."""
    model = mlp()
    optimizer = hvd.DistributedOptimizer(
        sgd(model.parameters()), model.named_parameters(), policy="sfb", backward_passes_per_step=2
    )

    def step(index, between=lambda p: None):
        optimizer.zero_grad()
        for salt in range(2):
            loss_of(model(rank.random(index, 6, 12, salt=salt).float())).backward()
            if salt == 0:
                for p in model.parameters():
                    between(p)
        optimizer.step()

    step(0)
    step(1)
    assert_schemes(optimizer, {"*": "sfb"})
    replacements = (
        lambda p: setattr(p, "grad", p.grad * 0.5),
        lambda p: setattr(p, "grad", p.grad + 0.1 * p.detach()),
        lambda p: setattr(p, "grad", torch.ones_like(p)),
    )
    for index, between in enumerate(replacements):
        expect_error(rank, RuntimeError, ["was modified between two backward passes"], lambda: step(2 + index, between))
        optimizer._session.reset()
    step(5)


@case
def gradients_scaled_between_passes(rank):
    """In Horovod this works. Where SFB cannot, it must say so on the rank that does it, not send something else."""
    model = Sequential(Linear(12, 20), Tanh(), Linear(20, 4))
    optimizer = hvd.DistributedOptimizer(
        sgd(model.parameters()), model.named_parameters(), policy="sfb", backward_passes_per_step=2
    )
    for step in range(2):
        optimizer.zero_grad()
        for salt in range(2):
            loss_of(model(rank.random(step, 6, 12, salt=salt).float())).backward()
        optimizer.step()
    optimizer.zero_grad()

    def scale_between():
        loss_of(model(rank.random(2, 6, 12).float())).backward()
        for p in model.parameters():
            p.grad.add_(1.0)
        loss_of(model(rank.random(2, 6, 12, salt=1).float())).backward()

    text = expect_error(rank, RuntimeError, ["schemes", "allreduce"], scale_between)
    assert "weight" in text
    optimizer._session.reset()


# ---- synchronize() and step()


@case
def clipping(rank):
    """synchronize(), clip, step without a second reduction: one round of collectives, the same norm on all ranks."""
    model = mlp()
    optimizer = hvd.DistributedOptimizer(sgd(model.parameters()), model.named_parameters(), policy="sfb")
    for step in range(4):
        optimizer.zero_grad()
        before = optimizer.stats()
        loss_of(model(rank.random(step, 6, 12).float())).backward()
        optimizer.synchronize()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        with optimizer.skip_synchronize():
            optimizer.step()
        rank.assert_same_everywhere([norm, *model.parameters()], "clipped")
        after = optimizer.stats()
        assert after["steps"] == before["steps"] + 1
        rounds = sum(
            after["schemes"][s]["collectives"] - before["schemes"][s]["collectives"] for s in ("sfb", "allreduce")
        )
        assert rounds == (6 if step == 0 else 3), (rounds, after)


@case(**BOTH)
def clipping_like_the_reference(rank):
    """The norm is that of the reduced gradients, and so is what is left of them."""

    def script(wrap, t):
        m = mlp().to(t.dtype)
        o = wrap(sgd(m.parameters()), named_parameters=list(m.named_parameters()))
        norms = []
        for step in range(5):
            o.zero_grad()
            loss_of(m(rank.random(step, 6, 12).float().to(t.dtype))).backward()
            o.synchronize()
            norms.append(torch.nn.utils.clip_grad_norm_(m.parameters(), 0.1))
            with o.skip_synchronize():
                o.step()
        return [*m.named_parameters(), ("norms", torch.stack(norms))]

    trajectories(rank, script)


@case(real="plain Horovod beside")
def step_after_synchronize_warns(rank):
    """Without skip_synchronize() the gradients are reduced twice, as in Horovod: harmless for averages, warned of."""
    import warnings

    model, plain = mlp(), mlp()
    plain.load_state_dict(model.state_dict())
    ours = hvd.DistributedOptimizer(sgd(model.parameters()), model.named_parameters(), policy="sfb")
    theirs = rank.horovod.DistributedOptimizer(sgd(plain.parameters()), plain.named_parameters())
    for step in range(3):
        for m, o in ((model, ours), (plain, theirs)):
            o.zero_grad()
            loss_of(m(rank.random(step, 6, 12).float())).backward()
            o.synchronize()
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                o.step()
            assert sum("skip_synchronize" in str(w.message) for w in caught) == 1, [str(w.message) for w in caught]
    for p, q in zip(model.parameters(), plain.parameters()):
        assert relative_error(p.detach(), q.detach().double()) < 1e-5
    rank.assert_same_everywhere(model.parameters(), "parameters")


@case
def synchronize_twice_op_sum(rank):
    """The second synchronize() multiplies by the number of ranks, as in Horovod."""

    def run(m, t):
        loss_of(m(t.x(6, 12))).backward()
        if t.optimizer is not None:
            t.optimizer.synchronize()
        else:
            for p in m.parameters():
                p.grad = rank.reduce(p.grad, op=rank.horovod.Sum)

    runs = check(rank, mlp, run, expect={}, steps=0, op=rank.horovod.Sum)
    with poseidon_warnings():
        runs.step(0)
        runs.rank.assert_same_everywhere(runs.model.parameters(), "parameters")

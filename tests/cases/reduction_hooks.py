"""register_reduction_hook(): functions that see gradients before and after they are reduced."""

import copy
import gc
import weakref

import torch
from harness.compare import Run3, expect_error, reasons_of, schemes_of
from harness.registry import BOTH, case

import poseidon_hvd as hvd
from cases.embedding import Table, Words, plain_sgd
from cases.linear import loss_of, mlp, train


def clip(name, grad):
    """To a norm of 0.0005, which all gradients here exceed."""
    norm = float(grad.norm())
    assert norm > 0.0005, f"{name} has a norm of {norm}: too little to test with"
    grad.mul_(0.0005 / norm)


def clipped_in_the_reference(run, names):
    """``run``, whose gradients of these names are clipped also where nothing is distributed."""

    def clipping(m, t):
        run(m, t)
        if t.kind == "reference":
            for name, p in m.named_parameters():
                if name in names and p.grad is not None:
                    clip(name, p.grad)

    return clipping


def check(rank, build, run, hooks, *, expect, steps=4, **options):
    """As ``harness.compare.check``, with these hooks (arguments of ``register_reduction_hook``) from the start.

    Horovod has none such.
    """
    runs = Run3(rank, build, run, horovod=False, **options)
    for hook in hooks:
        runs.optimizer.register_reduction_hook(**hook)
    for index in range(steps):
        runs.step(index)
    runs.finish(expect)
    return runs


def made(rank, build=mlp, optimizer=plain_sgd, **wrap):
    torch.manual_seed(7)
    model = build()
    return model, hvd.DistributedOptimizer(
        optimizer(model.parameters()), model.named_parameters(), **{"policy": "sfb", **wrap}
    )


def one_step(rank, model, optimizer, index):
    optimizer.zero_grad()
    loss_of(model(rank.random(index, 6, 12).float())).backward()
    optimizer.step()
    rank.assert_same_everywhere(model.parameters(), f"parameters after step {index}")


# ---- Before


@case(**BOTH)
def clips_local_gradients(rank):
    """Each rank's own, before the mean; the layers without a hook are factored."""
    names = {"2.weight", "2.bias"}
    runs = check(
        rank,
        mlp,
        clipped_in_the_reference(train(16, 12), names),
        [{"before": clip, "parameters": "2.*"}],
        expect={"0.*": "sfb", "2.*": "allreduce", "4.*": "sfb"},
    )
    assert "a hook looks at its gradient before reduction" in reasons_of(runs.optimizer)["2.weight"]
    assert "a hook looks at its gradient before reduction" in runs.optimizer.scheme_report()


@case
def hook_on_a_bias_alone(rank):
    """The bias is sent whole; the factors of its weight do without it."""
    runs = check(
        rank,
        mlp,
        clipped_in_the_reference(train(16, 12), {"0.bias"}),
        [{"before": clip, "parameters": ["0.bias"]}],
        expect={"0.bias": "allreduce", "0.weight": "sfb", "2.*": "sfb"},
    )
    assert not runs.optimizer.plan()["tensors"][0]["reason"].startswith("follows")


@case
def once_per_step_with_the_gradient_of_all_passes(rank):
    def run(m, t):
        for salt in range(2 if (t.index + rank.rank) % 2 else 1):  # fewer than announced: synchronize() calls it
            loss_of(m(t.x(6, 12, salt=salt))).backward()

    calls = []

    def before(name, grad):
        calls.append(name)
        clip(name, grad)

    names = {name for name, _ in mlp().named_parameters()}
    check(
        rank,
        mlp,
        clipped_in_the_reference(run, names),
        [{"before": before}],
        expect={"*": "allreduce"},
        backward_passes_per_step=2,
    )
    assert sorted(calls) == sorted([*names] * 4), calls


@case
def with_groups_and_compression(rank):
    names = ["0.weight", "2.bias"]
    run, hooks = clipped_in_the_reference(train(16, 12), names), [{"before": clip, "parameters": names}]
    check(
        rank,
        mlp,
        run,
        hooks,
        expect={"0.*": "allreduce", "4.*": "sfb"},
        groups=[["0.weight", "0.bias"], ["2.weight", "2.bias"]],
    )
    check(rank, mlp, run, hooks, expect={"0.weight": "allreduce"}, compression=hvd.Compression.fp16, floor=2e-3)


@case
def members_of_a_group_that_synchronize_sends(rank):
    """No gradient of a group is sent before its hook has seen it, and none is called without a gradient."""

    def run(m, t):
        x = t.x(6, 12)
        loss_of(m(x) if (t.index + rank.rank) % 2 else m[0](x)).backward()

    names = {name for name, _ in mlp().named_parameters()}
    seen = []

    def before(name, grad):
        seen.append(name)
        clip(name, grad)

    check(rank, mlp, clipped_in_the_reference(run, names), [{"before": before}], expect={"*": "allreduce"}, groups=1)
    assert len(seen) == sum(6 if (index + rank.rank) % 2 else 2 for index in range(4)), seen


@case(**BOTH)
def sparse_gradients(rank):
    """Seen sparse; such a table's rows go Horovod's own way."""

    def halve(name, grad):
        assert grad.is_sparse
        grad.mul_(0.5)

    def run(m, t):
        loss_of(m(t.ids(30, 9))).backward()
        if t.kind == "reference":
            m.embed.weight.grad.mul_(0.5)

    check(
        rank,
        lambda: Table(sparse=True),
        run,
        [{"before": halve}],
        expect={"*": "sparse_allgather"},
        optimizer=plain_sgd,
    )


@case
def may_ask_the_optimizer(rank):
    """And so refers to it, which does not keep it alive."""

    def run():
        model, optimizer = made(rank)
        steps = []
        optimizer.register_reduction_hook(
            before=lambda name, grad: steps.append((optimizer.stats()["steps"], optimizer.plan() is None))
        )
        for index in range(2):
            one_step(rank, model, optimizer, index)
        assert steps == [(0, True)] * 6 + [(1, False)] * 6, steps
        return weakref.ref(optimizer)

    dropped = run()
    gc.collect()
    assert dropped() is None


# ---- After


@case
def logs_norms(rank):
    """Before: of the local gradient. After: of the reduced one, under every scheme, in the order of names."""
    model, optimizer = made(rank, build=Words)
    local, reduced = [], []
    optimizer.register_reduction_hook(
        before=lambda name, grad: local.append((name, float(grad.norm()))), parameters="head.bias"
    )
    optimizer.register_reduction_hook(after=lambda name, grad: reduced.append((name, float(grad.norm()))))
    for index in range(4):
        ids = rank.integers(index, 30, 9)
        reference = copy.deepcopy(model)
        reference.zero_grad()
        loss_of(reference(ids)).backward()
        optimizer.zero_grad()
        loss_of(model(ids)).backward()
        optimizer.synchronize()
        expected = [(name, float(p.grad.norm())) for name, p in sorted(model.named_parameters())]
        assert reduced == expected, (reduced, expected)
        assert [name for name, _ in local] == ["head.bias"] and abs(
            local[0][1] - float(reference.head.bias.grad.norm())
        ) < 1e-6
        with optimizer.skip_synchronize():
            optimizer.step()
        local.clear()
        reduced.clear()
    assert schemes_of(optimizer)["embed.weight"] == "row-sparse"


@case
def changes_the_reduced_gradient(rank):
    """Two hooks in the order in which they were registered; layers stay factored."""

    def run(m, t):
        train(16, 12)(m, t)
        if t.kind == "reference":
            for p in m.parameters():
                p.grad.mul_(2).add_(1)

    def double(name, grad):
        grad.mul_(2)

    def add(name, grad):
        grad.add_(1)

    check(rank, mlp, run, [{"after": double}, {"after": add}], expect={"*": "sfb"}, floor=1e-5)


# ---- Registering and removing


@case
def removed(rank):
    model, optimizer = made(rank)
    handle = optimizer.register_reduction_hook(before=clip)
    seen = []
    after = optimizer.register_reduction_hook(after=lambda name, grad: seen.append(name))
    for index in range(3):
        one_step(rank, model, optimizer, index)
    assert set(schemes_of(optimizer).values()) == {"allreduce"} and len(seen) == 3 * 6
    handle.remove()
    handle.remove()
    after.remove()
    for index in range(3, 6):
        one_step(rank, model, optimizer, index)
    assert set(schemes_of(optimizer).values()) == {"sfb"} and len(seen) == 3 * 6


@case
def registered_between_steps(rank):
    model, optimizer = made(rank)
    for index in range(3):
        one_step(rank, model, optimizer, index)
    calls = []
    optimizer.register_reduction_hook(before=lambda name, grad: calls.append(name), parameters="4.weight")
    for index in range(3, 6):
        one_step(rank, model, optimizer, index)
    assert calls == ["4.weight"] * 3
    assert schemes_of(optimizer)["4.weight"] == "allreduce" and schemes_of(optimizer)["0.weight"] == "sfb"


@case
def registered_while_gradients_are_reduced(rank):
    model, optimizer = made(rank)
    handle = optimizer.register_reduction_hook(before=clip, parameters="0.*")
    loss_of(model(rank.random(0, 6, 12).float())).backward()
    expect_error(rank, RuntimeError, ["after step()"], lambda: optimizer.register_reduction_hook(before=clip))
    expect_error(rank, RuntimeError, ["after step()"], handle.remove)
    optimizer.register_reduction_hook(after=lambda name, grad: None)  # changes nothing between ranks
    optimizer.step()
    handle.remove()


@case
def ranks_that_register_differently(rank):
    """Before the first step also where some ranks register nothing; later where all register something."""
    for before, patterns in ((0, ["0.*", None]), (0, ["0.*", "2.*"]), (2, ["0.*", "2.*"])):
        model, optimizer = made(rank)
        for index in range(before):
            one_step(rank, model, optimizer, index)
        pattern = patterns[rank.rank % 2]
        if pattern is not None:
            optimizer.register_reduction_hook(before=clip, parameters=pattern)
        optimizer.zero_grad()
        loss = loss_of(model(rank.random(9, 6, 12).float()))

        def first_step():
            loss.backward()
            optimizer.step()

        expect_error(rank, ValueError, ["hooks before reduction=0.bias,0.weight"], first_step)


@case
def added_parameters_have_it_too(rank):
    model, optimizer = made(rank)
    calls = []
    optimizer.register_reduction_hook(before=lambda name, grad: calls.append(name), parameters="*")
    one_step(rank, model, optimizer, 0)
    calls.clear()
    extra = torch.nn.Linear(10, 3)
    rank.horovod.broadcast_parameters(extra.state_dict(), 0)
    optimizer.add_param_group({"params": list(extra.parameters())})
    loss_of(extra(model(rank.random(1, 6, 12).float()))).backward()
    optimizer.step()
    assert len(calls) == 8 and set(schemes_of(optimizer).values()) == {"allreduce"}, calls


@case
def errors_name_the_parameter(rank):
    """In backward() or synchronize(), on the rank whose hook failed; the optimizer goes on after the step has been
    dropped.
    """
    model, optimizer = made(rank)
    failing = []

    def fail(name, grad):
        if failing:
            raise FloatingPointError("not a good gradient")

    def give_back(name, grad):
        return grad if failing else None

    def forward():
        return loss_of(model(rank.random(1, 6, 12).float()))

    kinds = (
        (fail, RuntimeError, "FloatingPointError: not a good gradient"),
        (give_back, TypeError, "returned a Tensor"),
    )
    for hook, kind, fragment in kinds:
        for when in ("before", "after"):
            handle = optimizer.register_reduction_hook(**{when: hook}, parameters="2.weight")
            one_step(rank, model, optimizer, 0)
            failing.append(True)
            optimizer.zero_grad()
            loss = forward()
            expect_error(rank, kind, [f"hook {when} reduction", "2.weight", fragment], loss.backward)
            failing.clear()
            optimizer.load_state_dict(optimizer.state_dict())
            one_step(rank, model, optimizer, 2)
            handle.remove()

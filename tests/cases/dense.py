"""Gradients that are allreduced in slices: several in one buffer, of which ``.grad`` are parts, or one alone, in
place.
"""

import gc
import time

import torch
from harness.compare import check, expect_error, relative_error, schemes_of, sgd
from harness.registry import BOTH, case
from torch.nn import BatchNorm2d, Conv2d, Embedding, Flatten, Linear, ReLU, Sequential

import poseidon_hvd as hvd
from cases.linear import loss_of, mlp, train

METHODS = ("horovod", "bsp", "wfbp", "merged", "priority:500", "lazy", "lazy:500", "auto")
NETWORK = {kind: {"alpha_seconds": 1e-3, "beta_seconds_per_byte": 1e-8} for kind in ("allreduce", "allgather")}


def convolutions():
    # A bias in front of a normalization has no gradient but rounding.
    return Sequential(
        Conv2d(3, 8, 3, bias=False), BatchNorm2d(8), ReLU(), Conv2d(8, 4, 1), Flatten(), Linear(4 * 36, 5)
    )


def dense_check(rank, build, run, *, dense="lazy", **options):
    """Everything allreduced, in slices."""
    return check(rank, build, run, expect={"*": "allreduce"}, policy="allreduce", dense=dense, **options)


def wrap(model, **options):
    return hvd.DistributedOptimizer(sgd(model.parameters()), model.named_parameters(), policy="allreduce", **options)


def step_of(rank, model, optimizer, index, *, zero=True, rows=6):
    if zero:
        optimizer.zero_grad()
    loss_of(model(rank.random(index, rows, 12).float())).backward()
    optimizer.step()


def planned(rank, model, dense):
    """After the step without slices and the first with them."""
    optimizer = wrap(model, dense=dense)
    for index in range(2):
        step_of(rank, model, optimizer, index)
    return optimizer


@case(**BOTH, seconds=180)
def every_method_is_exact(rank):
    for method in METHODS:
        runs = dense_check(rank, convolutions, train(4, 3, 8, 8), dense=method, network=NETWORK)
        plan, stats = runs.optimizer.plan()["dense"], runs.optimizer.stats()["dense"]
        assert plan["method"] == method.partition(":")[0]
        names = [name for names in plan["slices"] for name in names]
        assert len(set(names)) == (0 if method == "horovod" else 7), plan
        if method not in ("merged", "auto"):  # these may have changed their mind
            assert stats["slices"] == 3 * len(plan["slices"]), (method, plan, stats)  # step 0 has no plan


@case(real="times of real ranks")
def measured_layout_is_the_same_on_all_ranks(rank):
    runs = dense_check(rank, mlp, train(6, 12), dense="auto", steps=6)
    slices = rank.horovod.allgather_object(runs.optimizer.plan()["dense"]["slices"], name="dense.slices")
    assert all(each == slices[0] for each in slices) and slices[0], slices


@case
def one_allreduce_for_every_theta_bytes(rank):
    model = mlp()
    bytes_of_all = sum(4 * p.numel() for p in model.parameters())
    for theta in (1, 400, 1 << 20):
        model = mlp()
        optimizer = planned(rank, model, f"lazy:{theta}")
        before = optimizer.stats()["schemes"]["allreduce"]["collectives"]
        step_of(rank, model, optimizer, 2)
        sent = optimizer.stats()["schemes"]["allreduce"]["collectives"] - before
        assert sent <= bytes_of_all / theta + 1, (theta, sent)
        assert sent == len(optimizer.plan()["dense"]["slices"])


@case
def slices_hold_gradients_in_the_order_of_backward(rank):
    model = mlp()
    optimizer = planned(rank, model, "bsp")
    (names,) = optimizer.plan()["dense"]["slices"]
    layers = [name.split(".")[0] for name in names]
    assert layers == sorted(layers, key=int, reverse=True), names


@case(**BOTH)
def nothing_is_copied_that_stays_in_its_slice(rank):
    """zero_grad(set_to_none=False) keeps the gradients where they are; a large one alone is never copied."""
    model = mlp()
    total = sum(4 * p.numel() for p in model.parameters())
    optimizer = planned(rank, model, "bsp")
    assert optimizer.stats()["dense"] == {"slices": 1, "in_place_bytes": 0, "copied_bytes": total}
    for index in range(2, 5):
        optimizer.zero_grad(set_to_none=False)
        step_of(rank, model, optimizer, index, zero=False)
    assert optimizer.stats()["dense"] == {"slices": 4, "in_place_bytes": 3 * total, "copied_bytes": total}
    optimizer = wrap(model, dense="wfbp")
    for index in range(4):
        step_of(rank, model, optimizer, index)
    assert optimizer.stats()["dense"] == {"slices": 3 * 6, "in_place_bytes": 3 * total, "copied_bytes": 0}


@case
def zeroed_in_place(rank):
    for method in METHODS:
        dense_check(
            rank,
            mlp,
            train(6, 12),
            dense=method,
            network=NETWORK,
            zero=lambda m, o: o.zero_grad(set_to_none=False),
            horovod=False,
        )


@case
def accumulation_without_zeroing(rank):
    for method in METHODS:
        dense_check(rank, mlp, train(6, 12), dense=method, network=NETWORK, keep_grads=True)


@case
def several_passes(rank):
    def run(m, t):
        for i in range(3 if t.index != 2 or rank.rank else 2):  # one fewer on rank 0 once
            loss_of(m(t.x(6, 12, salt=i))).backward()

    for method in METHODS:
        dense_check(rank, mlp, run, dense=method, network=NETWORK, backward_passes_per_step=3)


@case
def gradients_that_are_kept(rank):
    """What the user holds of an earlier step does not change under his hands, as in Horovod."""
    model = mlp()
    optimizer = wrap(model, dense="bsp")
    kept = []
    for index in range(5):
        step_of(rank, model, optimizer, index)
        kept.append([(p.grad, p.grad.clone()) for p in model.parameters()])
        if index == 3:
            kept.append([(p.grad.detach()[:1], p.grad[:1].clone()) for p in model.parameters()])
            kept.pop(0)
            gc.collect()
    for grads in kept:
        for grad, copy in grads:
            assert torch.equal(grad, copy)


@case
def gradients_that_are_detached_replaced_or_saved(rank):
    def run(m, t):
        for p in m.parameters():
            if p.grad is None:
                continue
            if t.index == 1:
                p.grad.detach_()
                p.grad.requires_grad_(False)
                p.grad.zero_()
            elif t.index == 2:
                p.grad = torch.zeros_like(p)
            elif t.index == 3:
                p.grad = p.grad.clone().zero_()
            else:
                p.grad = None
        loss_of(m(t.x(6, 12))).backward()

    dense_check(rank, mlp, run, dense="bsp", steps=6, zero=lambda m, o: None, before=lambda m, i: None)


@case(real="plain Horovod beside")
def gradients_that_are_changed_after_synchronize(rank):
    """Clipped in place, scaled by foreach functions, and looked at as flat views."""

    def script(wrapper):
        torch.manual_seed(7)
        model = mlp()
        optimizer = wrapper(model)
        for index in range(5):
            model.zero_grad(set_to_none=index % 2 == 0)
            loss_of(model(rank.random(index, 6, 12).float())).backward()
            optimizer.synchronize()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            torch._foreach_mul_([p.grad for p in model.parameters()], 0.5)
            model[0].weight.grad.view(-1)[:3] = 0
            with optimizer.skip_synchronize():
                optimizer.step()
        return torch.cat([p.detach().reshape(-1) for p in model.parameters()])

    ours = script(lambda m: wrap(m, dense="lazy"))
    theirs = script(lambda m: rank.horovod.DistributedOptimizer(sgd(m.parameters()), m.named_parameters()))
    assert relative_error(ours, theirs.double()) < 1e-6


@case
def unused_and_frozen_parameters(rank):
    """Of a slice some have no gradient on one rank, on all, later, or want none any more."""

    class Heads(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.body = Linear(12, 8)
            self.heads = torch.nn.ModuleList(Linear(8, 3) for _ in range(3))

        def forward(self, x, head):
            return self.heads[head](torch.tanh(self.body(x)))

    def run(m, t):
        if t.index == 4:
            m.body.weight.requires_grad_(False)
        heads = (0, 1, 2) if t.index < 2 else ((rank.rank + t.index) % 2,)
        sum(loss_of(m(t.x(6, 12), head)) for head in heads).backward()

    for method in ("bsp", "wfbp", "lazy:300", "priority:100"):
        dense_check(rank, Heads, run, dense=method, steps=4, network=NETWORK)
    dense_check(rank, Heads, run, dense="bsp", steps=6, horovod=False)


@case
def half_precision(rank):
    for method in ("bsp", "wfbp", "priority:100"):
        dense_check(
            rank, mlp, train(6, 12), dense=method, network=NETWORK, compression=hvd.Compression.fp16, floor=2e-3
        )
        dense_check(rank, mlp, train(6, 12), dense=method, network=NETWORK, dtype=torch.bfloat16, horovod=False)
        dense_check(rank, mlp, train(6, 12), dense=method, network=NETWORK, dtype=torch.float64)


@case
def dtypes_have_slices_of_their_own(rank):
    class Mixed(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.narrow, self.wide = Linear(12, 8), Linear(8, 3).double()

        def forward(self, x):
            return self.wide(torch.tanh(self.narrow(x.to(self.narrow.weight.dtype))).double())

    model = Mixed()
    optimizer = wrap(model, dense="bsp")
    for index in range(3):
        step_of(rank, model, optimizer, index)
    assert sorted(map(sorted, optimizer.plan()["dense"]["slices"])) == [
        ["narrow.bias", "narrow.weight"],
        ["wide.bias", "wide.weight"],
    ]
    rank.assert_same_everywhere(model.parameters(), "parameters")


@case
def other_layouts_in_memory(rank):
    """channels_last, transposed and expanded gradients."""

    def prepare(model):
        model.to(memory_format=torch.channels_last)

    dense_check(rank, convolutions, train(4, 3, 8, 8), dense="bsp", prepare=prepare, horovod=False, floor=1e-5)

    def run(m, t):
        (t.x(6, 12) @ m[0].weight.t()).sum().backward()
        m[0].bias.sum().backward()

    dense_check(rank, lambda: Sequential(Linear(12, 5)), run, dense="bsp", horovod=False)


@case
def reductions_and_groups(rank):
    for options in ({"op": hvd.Sum}, {"gradient_predivide_factor": 2.0}, {"groups": [["0.weight", "2.bias"]]}):
        for method in ("lazy", "wfbp", "priority:100"):
            dense_check(rank, mlp, train(6, 12), dense=method, network=NETWORK, **options)


@case
def with_factors_beside(rank):
    """Biases of dense layers share slices; a factored layer's go with its factors."""
    for method in METHODS:
        runs = check(
            rank,
            mlp,
            train(2, 12),
            expect={"0.*": "sfb", "2.*": "allreduce", "4.*": "allreduce"},
            policy="bytes",
            schemes={"0.*": "sfb", "2.*": "allreduce", "4.*": "allreduce"},
            dense=method,
            network=NETWORK,
        )
        names = {name for names in runs.optimizer.plan()["dense"]["slices"] for name in names}
        assert names == (set() if method == "horovod" else {"2.weight", "2.bias", "4.weight", "4.bias"}), names


@case
def sparse_gradients_in_between(rank):
    class Words(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.table, self.head = Embedding(40, 6, sparse=True), Linear(6, 3)

        def forward(self, ids):
            return self.head(self.table(ids)).sum()

    def run(m, t):
        m(t.ids(40, 5)).backward()

    check(rank, Words, run, expect={"head.*": "allreduce"}, policy="allreduce", dense="bsp")
    check(
        rank,
        Words,
        run,
        expect={"*": "allreduce"},
        policy="allreduce",
        dense="bsp",
        sparse_as_dense=True,
        horovod=False,
    )


@case
def a_dense_gradient_that_becomes_sparse(rank):
    """At some step, also one in which the plan is looked at again, on one rank only or on all."""

    class Table(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight, self.other = torch.nn.Parameter(torch.randn(20, 3)), torch.nn.Parameter(torch.randn(4))

        def forward(self, ids, sparse):
            return torch.nn.functional.embedding(ids, self.weight, sparse=sparse).sum() + (self.other**2).sum()

    for method in ("bsp", "wfbp", "auto", "priority:100"):
        for step in (2, 3):
            for ranks in ((0,), range(rank.size)):

                def run(m, t, step=step, ranks=ranks):
                    m(t.ids(20, 4), t.kind == "poseidon" and t.index == step and rank.rank in ranks).backward()

                check(
                    rank,
                    Table,
                    run,
                    expect={"other": "allreduce"},
                    policy="allreduce",
                    dense=method,
                    network=NETWORK,
                    horovod=False,
                    steps=6,
                )


@case
def errors_name_the_slice(rank):
    model = mlp()
    optimizer = planned(rank, model, "lazy")
    optimizer.zero_grad()
    loss = loss_of(model(rank.random(2, 6, 12).float()))
    loss.backward(retain_graph=True)
    expect_error(rank, AssertionError, ["backward_passes_per_step"], lambda: loss.backward())
    optimizer.load_state_dict(optimizer.state_dict())  # forgets the step: its gradients changed while they were reduced
    step_of(rank, model, optimizer, 3)
    rank.assert_same_everywhere(model.parameters(), "parameters")


@case
def steps_that_are_dropped(rank):
    """load_state_dict with slices filled and in flight."""
    for method in ("lazy", "wfbp", "priority:100"):
        model = mlp()
        optimizer = wrap(model, dense=method, network=NETWORK)
        for index in range(6):
            optimizer.zero_grad()
            loss_of(model(rank.random(index, 6, 12).float())).backward()
            if index in (2, 4):
                optimizer.load_state_dict(optimizer.state_dict())
                continue
            optimizer.step()
            rank.assert_same_everywhere(model.parameters(), f"parameters after step {index}")
        reference = [rank.reduce(p.grad.double()) for p in model.parameters()]
        for p, mean in zip(model.parameters(), reference):
            assert relative_error(p.grad, mean) < 1e-6


@case(seconds=120)
def same_bits_in_every_run(rank):
    """cases.md 36: delays in hooks, other ones in each run, change nothing."""

    def run(seed):
        torch.manual_seed(7)
        model = Sequential(*(Linear(12, 12) for _ in range(8)))
        generator = torch.Generator().manual_seed(1000 * seed + rank.rank)
        for p in model.parameters():
            p.register_post_accumulate_grad_hook(
                lambda p: time.sleep(0.003 * float(torch.rand((), generator=generator)))
            )
        optimizer = wrap(model, dense="lazy:1000")
        for index in range(6):
            step_of(rank, model, optimizer, index)
        return optimizer.plan()["dense"]["slices"], [p.detach().clone() for p in model.parameters()]

    (slices, first), (again, second) = run(1), run(2)
    assert slices == again
    assert all(torch.equal(a, b) for a, b in zip(first, second))
    rank.assert_same_everywhere(second, "parameters")


@case(**BOTH)
def two_optimizers_and_a_process_set(rank):
    first, second = mlp(), mlp()
    optimizers = [wrap(first, dense="bsp"), wrap(second, dense="lazy:500")]
    for index in range(4):
        for model, optimizer in zip((first, second), optimizers):
            optimizer.zero_grad()
            loss_of(model(rank.random(index, 6, 12).float())).backward()
        for optimizer in optimizers:
            optimizer.step()
    rank.assert_same_everywhere([*first.parameters(), *second.parameters()], "parameters")
    assert set(schemes_of(optimizers[0]).values()) == {"allreduce"}


def clipped(rank, dense, thetas=(None,)):
    """Parameters after two clipped steps under each theta, which wraps the optimizer again; every gradient is
    checked on the way.
    """
    torch.manual_seed(7)
    model = mlp()
    for i, theta in enumerate(thetas):
        optimizer = wrap(model, dense=dense if theta is None else f"{dense}:{theta}", network=NETWORK)
        for index in range(4 * i, 4 * i + 4):
            optimizer.zero_grad(set_to_none=index % 2 == 0)
            loss = loss_of(model(rank.random(index, 6, 12).float()))
            local = torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
            loss.backward()
            before = optimizer.stats()["schemes"]["allreduce"]["collectives"]
            optimizer.synchronize()
            for p, grad in zip(model.parameters(), local):
                assert relative_error(p.grad, rank.reduce(grad.double())) < 1e-6
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
            sent = optimizer.stats()["schemes"]["allreduce"]["collectives"]
            with optimizer.skip_synchronize():
                optimizer.step()
            assert (
                optimizer.stats()["schemes"]["allreduce"]["collectives"] == sent >= before
            )  # nothing is reduced twice
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


@case(seconds=120)
def clipping_does_not_depend_on_the_layout(rank):
    """cases.md 30 and 68: the norm is that of all gradients, whatever messages they came in."""
    results = {method: clipped(rank, method) for method in METHODS}
    for method, result in results.items():
        assert relative_error(result, results["horovod"].double()) < 1e-6, method


@case(seconds=120)
def thresholds_that_change(rank):
    """cases.md 45: buffers of other sizes again and again over the same gradients."""
    thetas = (1000, 1, 1 << 20, 300, 5000, 64)
    assert relative_error(clipped(rank, "lazy", thetas), clipped(rank, "horovod", [None] * len(thetas)).double()) < 1e-6


class Skips(torch.nn.Module):
    """Layers that are used in another order than they are declared in; with ``turned`` in the opposite one."""

    def __init__(self):
        super().__init__()
        self.last, self.first, self.middle, self.skip = Linear(8, 3), Linear(12, 8), Linear(8, 8), Linear(12, 8)

    def forward(self, x, turned=False):
        branches = (lambda: self.middle(torch.relu(self.first(x))), lambda: self.skip(x))
        outputs = [branch() for branch in (reversed(branches) if turned else branches)]
        return self.last(torch.tanh(sum(outputs)))


@case(seconds=120)
def backward_orders_of_all_kinds(rank):
    """cases.md 36 and 69: not the order of the parameters, and another one on each rank and in each step."""
    for method in METHODS:
        dense_check(rank, Skips, train(6, 12), dense=method, network=NETWORK)
        dense_check(
            rank,
            Skips,
            lambda m, t: loss_of(m(t.x(6, 12), turned=(rank.rank + t.index) % 2 == 1)).backward(),
            dense=method,
            network=NETWORK,
            steps=5,
        )


@case
def gradients_in_a_flat_buffer(rank):
    """The user's own memory stays what ``.grad`` is, in every step."""
    for method in METHODS:
        torch.manual_seed(7)
        model = mlp()
        parameters = list(model.parameters())
        flat = torch.zeros(sum(p.numel() for p in parameters))
        for p, part in zip(parameters, flat.split([p.numel() for p in parameters])):
            p.grad = part.view_as(p)
        optimizer = wrap(model, dense=method, network=NETWORK)
        for index in range(5):
            flat.zero_()
            loss = loss_of(model(rank.random(index, 6, 12).float()))
            local = torch.cat([grad.reshape(-1) for grad in torch.autograd.grad(loss, parameters, retain_graph=True)])
            loss.backward()
            optimizer.synchronize()
            assert relative_error(flat, rank.reduce(local.double())) < 1e-6, (method, index)
            with optimizer.skip_synchronize():
                optimizer.step()


@case
def gradients_are_the_same_tensors_in_every_step(rank):
    for method in METHODS:
        model = mlp()
        optimizer = wrap(model, dense=method, network=NETWORK)
        step_of(rank, model, optimizer, 0)
        grads = [p.grad for p in model.parameters()]
        for index in range(1, 6):
            optimizer.zero_grad(set_to_none=False)
            step_of(rank, model, optimizer, index, zero=False)
            assert all(p.grad is grad for p, grad in zip(model.parameters(), grads)), (method, index)


@case
def model_converted_between_steps(rank):
    for method in METHODS:
        model = mlp()
        optimizer = wrap(model, dense=method, network=NETWORK)
        for index in range(6):
            if index == 2:
                model.double()
            dtype = model[0].weight.dtype
            optimizer.zero_grad()
            loss = loss_of(model(rank.random(index, 6, 12).to(dtype)))
            local = torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
            loss.backward()
            optimizer.synchronize()
            for p, grad in zip(model.parameters(), local):
                assert relative_error(p.grad, rank.reduce(grad.double())) < (1e-6 if index < 2 else 1e-13), (
                    method,
                    index,
                )
            with optimizer.skip_synchronize():
                optimizer.step()


@case(real="plain Horovod beside")
def bits_are_those_of_horovod(rank):
    """A message of ours and one of Horovod's with the same content. float64 is left to fusion, so its messages may
    be others.
    """
    for op in (hvd.Average, hvd.Sum):
        for dtype in (torch.float32, torch.float16):
            for elements in (7, 300_000):
                parameter = torch.nn.Parameter(torch.zeros(elements, dtype=dtype))
                optimizer = hvd.DistributedOptimizer(
                    torch.optim.SGD([parameter], lr=1.0), [("weight", parameter)], op=op, dense="wfbp"
                )
                for index in range(3):
                    gradient = (rank.random(index, elements) / 3).to(dtype)
                    optimizer.zero_grad()
                    (parameter * gradient).sum().backward()
                    optimizer.synchronize()
                    expected = hvd.allreduce(gradient, op=op, name=f"{op}.{dtype}.{elements}.{index}")
                    assert torch.equal(parameter.grad, expected), (op, dtype, elements, index)
                    with optimizer.skip_synchronize():
                        optimizer.step()

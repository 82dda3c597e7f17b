"""Graphs that are walked twice, walks that fail, weights that change between forward and backward, and hooks that
appear late: what autograd would have put into .grad is what is sent.
"""

import contextlib
import os

import torch
from harness.compare import expect_error, poseidon_warnings, schemes_of, sgd
from harness.registry import case
from torch.nn import Embedding, Linear, Module
from torch.nn import functional as F

import poseidon_hvd as hvd
from cases.linear import loss_of, mlp
from cases.reduced import WAYS, as_in_one_process


class Twice(Module):
    """A layer that is called twice, around something that may fail."""

    def __init__(self):
        super().__init__()
        self.lin, self.head = Linear(12, 12), Linear(12, 4)

    def forward(self, x, between=torch.tanh):
        return self.head(self.lin(between(torch.tanh(self.lin(x)))))


class Recurrent(Module):
    def __init__(self):
        super().__init__()
        self.cell, self.head = torch.nn.RNNCell(12, 12), Linear(12, 4)

    def forward(self, x, between=torch.tanh):
        h = x
        for _ in range(3):
            h = between(self.cell(x, h))
        return self.head(h)


class Words(Module):
    """A table that is looked up twice."""

    def __init__(self):
        super().__init__()
        self.embed, self.head = Embedding(12, 6), Linear(6, 4)

    def forward(self, x, between=torch.tanh):
        a, b = self.embed(x.abs().mul(3).long() % 12), self.embed(x.abs().mul(5).long() % 12)
        return self.head(a.mean(1) * between(b.mean(1)))


class Trap(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, armed):
        ctx.armed = armed
        return x.clone()

    @staticmethod
    def backward(ctx, g):
        if ctx.armed:
            raise MemoryError("no memory")
        return g, None


@case
def graph_walked_before_backward(rank):
    """autograd.grad(retain_graph=True), then backward(): saliency, GradNorm, PCGrad."""
    for build in (Twice, Recurrent, Words):

        def script(model, o, backward, x, index):
            o.zero_grad()
            data = x(6, 12)
            if build is not Words:
                data.requires_grad_()
            loss = loss_of(model(data))
            torch.autograd.grad(loss, data if build is not Words else model.head.weight, retain_graph=True)
            backward(loss)
            o.step()

        for way in WAYS[:2]:
            as_in_one_process(rank, script, build, **way)


@case
def graph_walked_twice_in_two_passes(rank):
    for build in (Twice, Recurrent, Words):

        def script(model, o, backward, x, index):
            o.zero_grad()
            loss = loss_of(model(x(6, 12)))
            loss.backward(retain_graph=True)
            backward(loss)
            o.step()

        for way in WAYS[:2]:
            as_in_one_process(rank, script, build, backward_passes_per_step=2, **way)


@case
def graph_walked_twice_and_hooked_between(rank):
    """The last call of the second walk is not captured."""

    def script(model, o, backward, x, index):
        o.zero_grad()
        y = model.lin(torch.tanh(model.lin(x(6, 12))))
        loss = loss_of(model.head(y))
        loss.backward(retain_graph=True)
        handle = y.grad_fn.register_hook(lambda *grads: None) if index == 2 else None
        backward(loss)
        if handle is not None:
            handle.remove()
        o.step()

    with poseidon_warnings():
        as_in_one_process(rank, script, Twice, policy="sfb", backward_passes_per_step=2)


@case
def backward_that_fails_and_is_repeated(rank):
    """On all ranks and on one, where rows of a first call have been taken already."""
    for build in (Twice, Recurrent, Words):
        for ranks in (range(rank.size), (0,)):
            as_in_one_process(rank, _failing(rank, ranks), build, policy="sfb")


def _failing(rank, ranks):
    """The trap lies above every parameter but those of the layer that is called twice, so nothing is sent before it
    snaps.
    """

    def script(model, o, backward, x, index):
        o.zero_grad()
        data = x(6, 12)
        for armed in (True, False) if index in (2, 3) and rank.rank in ranks else (False,):
            loss = loss_of(model(data, lambda h, armed=armed: Trap.apply(h, armed)))
            if armed:
                head = list(model.head.parameters())
                with contextlib.suppress(MemoryError):  # without the head: its gradient is complete before the trap
                    loss.backward(inputs=[p for p in model.parameters() if not any(p is q for q in head)])
            else:
                backward(loss)
        o.step()

    return script


@case
def weight_changed_in_place_where_nobody_needs_it(rank):
    """The first layer's x wants no gradient, so PyTorch does not keep its weight."""

    def script(model, o, backward, x, index):
        o.zero_grad()
        loss = loss_of(model(x(6, 12)))
        with torch.no_grad():
            model[0].weight.clamp_(-0.1, 0.1)
        backward(loss)
        o.step()

    for way in WAYS[:4]:
        as_in_one_process(rank, script, **way)


@case
def weight_changed_in_place_where_x_needs_it(rank):
    """PyTorch's own error."""
    model = mlp()
    optimizer = hvd.DistributedOptimizer(sgd(model.parameters()), model.named_parameters(), policy="sfb")
    loss = loss_of(model(rank.random(0, 6, 12).float()))
    with torch.no_grad():
        model[2].weight.clamp_(-0.1, 0.1)
    expect_error(rank, RuntimeError, ["modified by an inplace operation"], loss.backward)
    optimizer._session.reset()


@case
def data_restored_before_backward(rank):
    """Forward with other weights through .data: the input's gradient comes from those."""

    def script(model, o, backward, x, index):
        o.zero_grad()
        old = [p.data for p in model.parameters()]
        for p in model.parameters():
            p.data = p.data * 1.5
        loss = loss_of(model(x(6, 12)))
        for p, data in zip(model.parameters(), old):
            p.data = data
        backward(loss)
        o.step()

    for way in WAYS[:4]:
        as_in_one_process(rank, script, **way)


@case
def frozen_between_forward_and_backward(rank):
    """Autograd drops its gradient, so nothing of it is sent."""

    def script(model, o, backward, x, index):
        o.zero_grad()
        loss = loss_of(model(x(6, 12)))
        if index == 2:
            model[2].weight.requires_grad_(False)
        backward(loss)
        if hasattr(o, "scheme_report"):
            o.synchronize()
        if index == 2:
            assert model[2].weight.grad is None or not model[2].weight.grad.any()
        model[2].weight.requires_grad_(True)
        with o.skip_synchronize() if hasattr(o, "scheme_report") else torch.enable_grad():
            o.step()

    with poseidon_warnings():
        as_in_one_process(rank, script, optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.05), policy="sfb")


def half(grads, *_):
    return tuple(None if g is None else 0.5 * g for g in grads)


def halve_in_place(p):
    p.grad.mul_(0.5)


def hooks_of(model):
    """Every way to hook in: name -> registers and returns handles.

    The weight's and the bias's gradient are halved by all but those that look.
    """
    weight, bias = model.lin.weight, model.lin.bias
    accumulators = [p.view_as(p).grad_fn.next_functions[0][0] for p in (weight, bias)]  # PyTorch does not keep them
    seen = []
    return {
        "tensor": lambda: [p.register_hook(lambda g: 0.5 * g) for p in (weight, bias)],
        "accumulator prehook": lambda: [a.register_prehook(half) for a in accumulators],
        "accumulator hook": lambda: [
            a.register_hook(lambda *_, p=p: seen.append(p.grad is not None))
            for a, p in zip(accumulators, (weight, bias))
        ],
        "after accumulation": lambda: [p.register_post_accumulate_grad_hook(halve_in_place) for p in (weight, bias)],
        "module backward": lambda: [model.lin.register_backward_hook(lambda m, grad_in, grad_out: half(grad_in))],
    }, seen


class One(Module):
    def __init__(self):
        super().__init__()
        self.lin = Linear(12, 4)

    def forward(self, x):
        return self.lin(x)


@case
def hooks_that_appear_late(rank):
    """Of every kind, set after the plan and removed again: they see the local gradient, and what they change is
    sent.
    """
    kinds = list(hooks_of(One())[0])
    for kind in kinds:

        def script(model, o, backward, x, index):
            o.zero_grad()
            ways, seen = hooks_of(model)
            handles = ways[kind]() if index in (2, 4) else []
            backward(loss_of(model(x(6, 12))))
            for handle in handles:
                handle.remove()
            assert all(seen), kind
            o.step()

        with poseidon_warnings():
            as_in_one_process(rank, script, One, steps=6, policy="sfb")


@case
def hooks_that_appear_between_passes(rank):
    """They see what the earlier pass has given."""
    for kind in hooks_of(One())[0]:

        def script(model, o, backward, x, index, kind=kind):
            o.zero_grad()
            loss_of(model(x(6, 12))).backward()
            ways, _ = hooks_of(model)
            handles = ways[kind]() if index == 2 else []
            backward(loss_of(model(x(6, 12, salt=1))))
            for handle in handles:
                handle.remove()
            o.step()

        with poseidon_warnings():
            as_in_one_process(rank, script, One, policy="sfb", backward_passes_per_step=2)


@case
def hooks_on_the_nodes_of_a_call(rank):
    """On the layer's own node, and on a cast of the weight, with retain_grad() there."""
    for kind in ("node", "node before", "cast", "retained"):

        def script(model, o, backward, x, index):
            o.zero_grad()
            late = index in (2, 4)
            if kind.startswith("node"):
                y = model.lin(x(6, 12))
                if late and kind == "node":
                    y.grad_fn.register_hook(half)
                elif late:
                    y.grad_fn.register_prehook(half)
            else:
                other = torch.float32 if model.lin.weight.dtype == torch.float64 else torch.float64
                weight = model.lin.weight.to(other)
                if late and kind == "cast":
                    weight.register_hook(lambda g: 0.5 * g)
                elif late:
                    weight.retain_grad()
                y = F.linear(x(6, 12).to(other), weight, model.lin.bias.to(other)).to(model.lin.weight.dtype)
            backward(loss_of(y))
            if late and kind == "retained":
                assert weight.grad is not None
            o.step()

        with poseidon_warnings():
            as_in_one_process(rank, script, One, steps=6, policy="sfb")


@case
def compiled_for_several_shapes(rank):
    """Sizes become symbols with the second batch size."""
    for build, data in (
        (lambda: Linear(8, 4), lambda step, n: rank.random(step, n, 8).float()),
        (lambda: Embedding(20, 4), lambda step, n: rank.integers(step, 20, n, 3)),
        (lambda: torch.nn.EmbeddingBag(20, 4, mode="sum"), lambda step, n: rank.integers(step, 20, n, 3)),
    ):
        torch.manual_seed(7)
        model = build()
        optimizer = hvd.DistributedOptimizer(sgd(model.parameters()), model.named_parameters(), policy="sfb")
        compiled = torch.compile(model, backend="aot_eager")
        for step, batch in enumerate((4, 4, 3, 5)):
            optimizer.zero_grad()
            compiled(data(step, batch)).pow(2).mean().backward()
            optimizer.step()
            rank.assert_same_everywhere(model.parameters(), f"parameters after step {step}")


@case
def exported_and_faked(rank):
    """Nobody asks a fake, functional or symbolic tensor for its numbers."""
    torch.manual_seed(7)
    model = mlp()
    optimizer = hvd.DistributedOptimizer(sgd(model.parameters()), model.named_parameters(), policy="sfb")
    for step in range(3):
        optimizer.zero_grad()
        loss_of(model(rank.random(step, 6, 12).float())).backward()
        optimizer.step()
    if rank.rank == 0:  # tracing is for one thread of a process
        with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True) as mode:
            model(mode.from_tensor(torch.ones(3, 12)))
        rows = torch.export.Dim("rows", min=2, max=64)
        torch.export.export(model, (torch.ones(3, 12),), dynamic_shapes=({0: rows},))
    F.linear(torch.nested.nested_tensor([torch.ones(2, 12), torch.ones(3, 12)]), model[0].weight, model[0].bias)
    optimizer.zero_grad()
    loss_of(model(rank.random(9, 6, 12).float())).backward()
    optimizer.step()
    assert set(schemes_of(optimizer).values()) == {"sfb"}


@case(real="forks")
def backward_in_a_forked_child(rank):
    """Its gradients stay its own; it cannot step the wrapped optimizer, and says so."""
    torch.manual_seed(7)
    model = mlp()
    optimizer = hvd.DistributedOptimizer(sgd(model.parameters()), model.named_parameters(), policy="sfb")
    for step in range(3):
        optimizer.zero_grad()
        loss_of(model(rank.random(step, 6, 12).float())).backward()
        optimizer.step()
    optimizer.zero_grad()
    child = os.fork()
    if child == 0:
        try:
            loss_of(model(rank.random(9, 6, 12).float())).backward()
            there = all(p.grad is not None and p.grad.any() for p in model.parameters())
            try:
                optimizer.step()
                refused = False
            except RuntimeError as error:
                refused = "forked child" in str(error)
            os._exit(0 if there and refused else 1)
        except BaseException:
            os._exit(2)
    assert os.waitpid(child, 0)[1] == 0
    loss_of(model(rank.random(3, 6, 12).float())).backward()
    optimizer.step()
    rank.assert_same_everywhere(model.parameters(), "parameters")


@case
def reentrant_checkpoints_that_accumulate_twice(rank):
    """Horovod's error, which says what to do."""
    model = mlp()
    optimizer = hvd.DistributedOptimizer(sgd(model.parameters()), model.named_parameters(), policy="allreduce")
    x = rank.random(0, 6, 12).float().requires_grad_()
    lin = Linear(12, 12)
    shared = hvd.DistributedOptimizer(sgd(lin.parameters()), list(lin.named_parameters("shared")), policy="allreduce")
    h = x
    for _ in range(2):
        h = torch.utils.checkpoint.checkpoint(lin, h, use_reentrant=True)
    expect_error(
        rank, AssertionError, ["backward_passes_per_step", "shared", "use_reentrant=False"], loss_of(h).backward
    )
    shared._session.reset()
    del optimizer

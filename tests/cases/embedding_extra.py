"""Embedding tables whose gradient comes, wholly or in part, from elsewhere than their own calls; autograd used in
other ways.
"""

import torch
from harness.compare import check, reasons_of, schemes_of, sgd
from harness.registry import PROCESS_SET, case
from torch.nn import Embedding, Linear, Module
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import poseidon_hvd as hvd
from cases.embedding import DENSE, ONE_STOP, ROWS, Table, Words, on, plain_sgd
from cases.linear import loss_of


def with_penalty(when):
    def run(m, t):
        loss = loss_of(m(t.ids(30, 9)))
        if when(t):
            loss = loss + 0.1 * m.embed.weight.pow(2).sum()
        loss.backward()

    return run


@case
def penalty_from_the_first_step(rank):
    runs = check(rank, Words, with_penalty(lambda t: True), expect={**DENSE, "head.*": "sfb"})
    assert "elsewhere than embedding calls" in reasons_of(runs.optimizer)["embed.weight"]


@case
def penalty_from_step_2(rank):
    check(rank, Words, with_penalty(lambda t: t.index >= 2), expect={**DENSE, "head.*": "sfb"}, steps=5, warns=ONE_STOP)


@case
def penalty_at_step_2_on_one_rank(rank):
    fp16 = {"compression": rank.horovod.Compression.fp16, "floor": torch.finfo(torch.float16).eps}
    for options in ({}, {"op": rank.horovod.Sum}, fp16, {"gradient_predivide_factor": 2.0}):
        check(
            rank,
            Words,
            with_penalty(lambda t: t.index == 2 and rank.rank == 1),
            expect={**ROWS, "head.*": "sfb"},
            steps=5,
            warns=ONE_STOP,
            **options,
        )


@case
def penalty_without_ids(rank):
    def run(m, t):
        if t.index == 2:
            (0.1 * m.embed.weight.pow(2).sum() + m.head.weight.sum() + m.head.bias.sum()).backward()
        else:
            on(9)(m, t)

    check(rank, Words, run, expect=ROWS, steps=5, warns=["its gradient came from elsewhere"] * 2)


@case
def penalty_in_bfloat16(rank):
    check(
        rank,
        Words,
        with_penalty(lambda t: t.index == 2 and rank.rank == 0),
        expect=ROWS,
        warns=ONE_STOP,
        dtype=torch.bfloat16,
        horovod_wrap={"compression": rank.horovod.Compression.fp16},
    )


class Tied(Module):
    def __init__(self, **options):
        super().__init__()
        self.embed = Embedding(30, 6, **options)
        self.out = Linear(6, 30, bias=False)
        self.out.weight = self.embed.weight

    def forward(self, ids):
        return self.out(torch.tanh(self.embed(ids)))


@case
def tied_weight_stays_dense(rank):
    check(rank, Tied, on(9), expect=DENSE, policy="bytes")
    check(
        rank,
        Tied,
        on(9),
        expect=DENSE,
        policy="bytes",
        schemes={"embed.weight": "row-sparse"},
        warns=["weight of linear calls too"],
    )


@case
def tied_weight_whose_linear_call_comes_later(rank):
    def run(m, t):
        y = m.embed(t.ids(30, 9))
        loss_of(m.out(torch.tanh(y)) if t.index >= 2 else y).backward()

    check(rank, Tied, run, expect=DENSE, steps=4, warns=ONE_STOP)


@case
def indexed_without_an_embedding(rank):
    """weight[ids] is no embedding call."""

    def run(m, t):
        y = m(t.ids(30, 9))
        if t.index >= 2:
            y = y + m.head(m.embed.weight[t.ids(30, 9, salt=1)])
        loss_of(y).backward()

    check(rank, Words, run, expect=DENSE, warns=ONE_STOP)


@case
def user_hooks_keep_it_dense(rank):
    def prepare(m):
        m.embed.weight.register_hook(lambda grad: 2 * grad)

    check(rank, Words, on(9), expect=DENSE, prepare=prepare)


@case
def hook_that_comes_later(rank):
    def run(m, t):
        if t.index == 2:
            m.embed.weight.register_hook(lambda grad: 2 * grad)
        on(9)(m, t)

    check(rank, Words, run, expect=DENSE, steps=4, warns=ONE_STOP)


# ---- Autograd


@case
def gradient_taken_by_hand(rank):
    """autograd.grad gets PyTorch's own gradient and nothing is sent for it."""

    def run(m, t):
        ids = t.ids(30, 9)
        (grad,) = torch.autograd.grad(loss_of(m(ids)), m.embed.weight)
        plain = m.embed.weight.detach().clone().requires_grad_()
        (expected,) = torch.autograd.grad(loss_of(m.head(F.embedding(ids, plain))), plain)
        assert torch.equal(grad, expected)
        loss_of(m(t.ids(30, 5, salt=1))).backward()

    check(rank, Words, run, expect=ROWS)


@case
def second_derivative(rank):
    """A penalty on the gradient: the outputs of the call depend on the table, its own gradient does not."""

    def run(m, t):
        loss = loss_of(m(t.ids(30, 9)))
        if t.index >= 2:
            (grad,) = torch.autograd.grad(loss, m.embed.weight, create_graph=True)
            loss = loss + 0.1 * grad.pow(2).sum()
        loss.backward()

    check(rank, Table, run, expect=ROWS)


@case
def checkpointed(rank):
    for reentrant in (False, True):

        def run(m, t):
            ids = t.ids(30, 9)
            start = t.x(9, 6).requires_grad_()
            y = checkpoint(lambda x: m.head(m.embed(ids) + x), start, use_reentrant=reentrant)
            loss_of(y).backward()

        check(rank, Words, run, expect=ROWS)


@case
def functional_transforms(rank):
    """torch.func beside capture: per-sample gradients are PyTorch's own."""

    def run(m, t):
        ids = t.ids(30, 4, 3)
        weight = m.embed.weight.detach()
        each = torch.func.vmap(torch.func.grad(lambda w, i: loss_of(F.embedding(i, w))), in_dims=(None, 0))(weight, ids)
        assert each.shape == (4, 30, 6)
        loss_of(m(ids)).backward()

    check(rank, Words, run, expect=ROWS)


@case
def frozen_table(rank):
    def prepare(m):
        m.embed.weight.requires_grad_(False)

    check(rank, Words, on(9), expect={"head.*": "sfb"}, prepare=prepare)


@case(real="torch.compile's caches belong to the process", seconds=150)
def compiled(rank):
    forms = {}

    def run(m, t):
        if id(m) not in forms:
            torch._dynamo.reset()
            forms[id(m)] = torch.compile(m, backend="aot_eager")
        loss_of(forms[id(m)](t.ids(30, 9))).backward()

    check(rank, Words, run, expect=DENSE)


# ---- Options of the optimizer


@case
def group_keeps_it_dense(rank):
    check(
        rank,
        Words,
        on(9),
        expect={**DENSE, "head.*": "allreduce"},
        groups=[["embed.weight", "head.weight", "head.bias"]],
    )


@case
def optimizer_that_was_dropped(rank):
    """The table belongs to the latest optimizer; the first one's plan is gone with it."""
    model = Words()
    for policy, expected in (("sfb", "row-sparse"), ("allreduce", "allreduce"), ("sfb", "row-sparse")):
        optimizer = hvd.DistributedOptimizer(sgd(model.parameters()), model.named_parameters(), policy=policy)
        for step in range(3):
            optimizer.zero_grad()
            loss_of(model(rank.integers(step, 30, 9))).backward()
            optimizer.step()
        rank.assert_same_everywhere([p.grad for p in model.parameters()], f"gradients under policy {policy}")
        assert schemes_of(optimizer)["embed.weight"] == expected
        del optimizer


@case(threads=(4, 8), real=PROCESS_SET, ranks=(4,))
def process_set_of_two(rank):
    for sparse in (False, True):
        check(
            rank,
            lambda: Table(sparse=sparse),
            on(lambda t: (3 + 4 * rank.rank,)),
            expect=ROWS,
            process_set=rank.subset,
            optimizer=plain_sgd,
        )


@case(threads=(4, 8), real=PROCESS_SET, ranks=(4,))
def process_set_and_extra(rank):
    check(
        rank,
        Words,
        with_penalty(lambda t: t.index == 2 and rank.rank == 1),
        expect=ROWS,
        process_set=rank.subset,
        warns=ONE_STOP if rank.subset.included() else (),
    )

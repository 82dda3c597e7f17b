"""Embedding tables whose touched rows are gathered: forms of calls, options, rows by rank, passes, types."""

import sys

import torch
from harness.compare import check, reasons_of
from harness.registry import BOTH, case
from torch.nn import Embedding, Linear, Module
from torch.nn import functional as F

from cases.linear import loss_of

ROWS = {"embed.weight": "row-sparse"}
DENSE = {"embed.weight": "allreduce"}
GATHERED = {"embed.weight": "sparse_allgather"}  # Horovod's own way
ONE_STOP = ("its gradient came from elsewhere than embedding calls",)


class Words(Module):
    """A table of 30 x 6 below a linear layer."""

    def __init__(self, **options):
        super().__init__()
        self.embed = Embedding(30, 6, **options)
        self.head = Linear(6, 3)

    def forward(self, ids):
        return self.head(self.embed(ids))


class Table(Module):
    """The table alone."""

    def __init__(self, rows=30, **options):
        super().__init__()
        self.embed = Embedding(rows, 6, **options)

    def forward(self, ids):
        return self.embed(ids)


def on(*shape, high=30):
    """One pass over ids of that shape; a callable shape gets the step."""

    def run(m, t):
        sizes = shape[0](t) if callable(shape[0]) else shape
        loss_of(m(t.ids(high, *sizes))).backward()

    return run


def plain_sgd(parameters):
    """Without momentum, which takes no sparse gradients."""
    return torch.optim.SGD(parameters, lr=0.05)


def sparse_table(**options):
    return lambda: Table(sparse=True, **options)


# ---- Forms of calls


@case(**BOTH)
def repeated_ids(rank):
    check(rank, Words, on(40, high=3), expect={**ROWS, "head.*": "sfb"})


@case
def ids_of_every_shape(rank):
    shapes = [(5,), (), (2, 3), (1, 2, 2, 2), (7,)]
    check(rank, Words, on(lambda t: shapes[t.index]), expect=ROWS, steps=5)


@case
def ids_of_32_bits(rank):
    check(rank, Words, lambda m, t: loss_of(m(t.ids(30, 8).int())).backward(), expect=ROWS)


@case
def strided_ids_and_gradients(rank):
    def run(m, t):
        y = m.embed(t.ids(30, 4, 5).t()[::2])
        (
            y.sum() + loss_of(m.embed(t.ids(30, 6, salt=1)).t()) + m.embed(t.ids(30, 3, salt=2))[:, :2].sum() * 0.5
        ).backward()

    check(rank, Table, run, expect=ROWS)


@case
def first_and_last_row(rank):
    def run(m, t):
        loss_of(m(torch.tensor([0, 29, 29, rank.rank]))).backward()

    check(rank, Words, run, expect=ROWS)


@case
def large_table(rank):
    """Few rows of many: those of other steps must be zero again."""
    check(rank, lambda: Table(5000), on(50, high=5000), expect=ROWS, steps=6)


@case
def one_column(rank):
    class Model(Module):
        def __init__(self):
            super().__init__()
            self.embed = Embedding(30, 1)

        def forward(self, ids):
            return self.embed(ids)

    check(rank, Model, on(9), expect=ROWS)


@case
def several_calls(rank):
    """With and without padding, by module and by function; some ids only in one of them."""

    def run(m, t):
        a = m.embed(t.ids(30, 5))
        b = F.embedding(t.ids(30, 4, salt=1), m.embed.weight, padding_idx=3)
        c = m.embed(t.ids(5, 20, salt=2))
        loss_of(torch.cat([a, b, c])).backward()

    check(rank, Table, run, expect=ROWS)


@case
def a_call_whose_output_is_dropped(rank):
    def run(m, t):
        dropped = m(t.ids(30, 5, salt=1))
        loss_of(m(t.ids(30, 6))).backward()
        del dropped

    check(rank, Words, run, expect=ROWS)


@case
def two_tables_and_a_shared_one(rank):
    class Model(Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = Embedding(20, 6), Embedding(12, 6)
            self.third = Embedding(20, 6)
            self.third.weight = self.first.weight

        def forward(self, ids):
            return self.first(ids) + self.second(ids) * self.third(ids)

    check(rank, Model, on(9, high=12), expect={"first.weight": "row-sparse", "second.weight": "row-sparse"})


# ---- Options of a table


@case
def padding_row(rank):
    """Stored as 29. Its gradient is exactly zero although its id is in every batch."""

    def run(m, t):
        ids = t.ids(30, 5, 3)
        ids[0, 0] = 29
        loss_of(m(ids)).backward()

    runs = check(rank, lambda: Words(padding_idx=-1), run, expect=ROWS)
    assert runs.model.embed.weight.grad[29].count_nonzero() == 0


@case
def only_padding(rank):
    def run(m, t):
        ids = t.ids(30, 6)
        loss_of(m(torch.full_like(ids, 7) if t.index >= 1 and rank.rank == 0 else ids)).backward()

    check(rank, lambda: Words(padding_idx=7), run, expect=ROWS)


@case
def scale_grad_by_freq(rank):
    """Counted within each call."""

    def run(m, t):
        loss_of(torch.cat([m(t.ids(4, 20)), m(t.ids(4, 7, salt=1))])).backward()

    check(rank, lambda: Words(scale_grad_by_freq=True, padding_idx=2), run, expect=ROWS)


@case
def max_norm(rank):
    """Rows are shortened in place by the forward; all of them on all ranks, or the ranks' tables would part."""

    def run(m, t):
        loss_of(m(torch.cat([torch.arange(30), t.ids(30, 10)]))).backward()

    runs = check(rank, lambda: Words(max_norm=0.8), run, expect=ROWS)
    assert (runs.model.embed.weight.norm(dim=1) < 1.0).all()


@case
def scheme_by_override(rank):
    check(
        rank,
        Words,
        on(8),
        expect={**ROWS, "head.*": "allreduce"},
        policy="allreduce",
        schemes={"embed.*": "row-sparse"},
    )


@case
def sfb_is_refused_for_a_table(rank):
    check(rank, Words, on(8), expect=DENSE, schemes={"embed.weight": "sfb"}, warns=["for which there is row-sparse"])


@case
def row_sparse_is_refused_for_a_linear_weight(rank):
    check(
        rank,
        Words,
        on(8),
        expect={**ROWS, "head.weight": "allreduce"},
        schemes={"head.weight": "row-sparse"},
        warns=["not an embedding table"],
    )


@case
def policy_bytes(rank):
    """30 rows of 6: 2 V D = 360 elements, a row is sent as 8, so 45 merged rows of all ranks break even."""
    runs = check(rank, Words, on(lambda t: (45 // rank.size - 1,)), expect=ROWS, policy="bytes")
    assert "row-sparse sends fewer up to 45" in reasons_of(runs.optimizer)["embed.weight"]

    class Small(Module):
        def __init__(self):
            super().__init__()
            self.embed = Embedding(4, 6)

        def forward(self, ids):
            return self.embed(ids)

    def run(m, t):
        loss_of(m(torch.arange(4))).backward()

    # 2 V D = 48 elements break even at 6 rows; 2 ranks send 8.
    check(rank, Small, run, expect=DENSE, policy="bytes")


# ---- Rows by rank and step


@case(**BOTH)
def unequal_rows(rank):
    check(rank, Words, on(lambda t: (3 + 5 * ((rank.rank + t.index) % rank.size),)), expect=ROWS, steps=5)


@case
def growing_and_shrinking_rows(rank):
    rows = [2, 100, 1, 300, 0, 3]
    check(rank, Words, on(lambda t: (rows[t.index],)), expect=ROWS, steps=6)


@case
def unused_on_one_rank(rank):
    def run(m, t):
        if t.index >= 1 and rank.rank == t.index % rank.size:
            loss_of(m.head(t.x(5, 6))).backward()
        else:
            on(9)(m, t)

    check(rank, Words, run, expect=ROWS, steps=5)


@case
def unused_on_one_rank_in_the_profiling_step(rank):
    def run(m, t):
        if t.index == 0 and rank.rank == 0:
            loss_of(m.head(t.x(5, 6))).backward()
        else:
            on(9)(m, t)

    check(rank, Words, run, expect=ROWS)


@case
def unused_on_all_ranks(rank):
    def run(m, t):
        if t.index == 2:
            loss_of(m.head(t.x(5, 6))).backward()
        else:
            on(9)(m, t)

    check(rank, Words, run, expect=ROWS)


@case
def no_ids_on_one_rank(rank):
    check(rank, Words, on(lambda t: (0 if rank.rank == t.index % rank.size else 6,)), expect=ROWS, steps=5)


@case
def no_ids_on_any_rank(rank):
    check(rank, Words, on(lambda t: (0 if t.index == 2 else 6,)), expect=ROWS)


@case
def more_rows_than_one_collective_takes(rank):
    module = sys.modules["poseidon_hvd.optimizer"]
    module._MAX_GATHERED_ELEMENTS = 20
    try:
        check(rank, Table, on(9), expect=DENSE, warns=ONE_STOP, steps=3)
        check(rank, sparse_table(), on(9), expect=GATHERED, warns=ONE_STOP, optimizer=plain_sgd, steps=3)
    finally:
        module._MAX_GATHERED_ELEMENTS = None


@case
def bytes_as_predicted(rank):
    """12 different ids on every rank in every step: the message has the bytes that the plan says, id and flag
    included.
    """

    def run(m, t):
        loss_of(m(torch.cat([torch.arange(12), torch.arange(12)]))).backward()

    for dtype, row_bytes in ((torch.float32, 8 * 4), (torch.float64, 8 * 8), (torch.float16, 9 * 2)):
        runs = check(rank, Table, run, expect=ROWS, dtype=dtype, steps=4)
        (tensor,) = runs.optimizer.plan()["tensors"]
        stats = runs.optimizer.stats()
        expected = 12 * row_bytes * (rank.size - 1)
        assert tensor["costs"]["row-sparse"]["bytes"] == expected and tensor["costs"]["sfb"]["bytes"] is None, tensor
        assert tensor["rows"] == 24 * rank.size
        assert stats["schemes"]["row-sparse"]["wire_bytes"] == 3 * expected
        assert stats["early_messages"] == 3


# ---- Passes


@case
def three_passes(rank):
    def run(m, t):
        for salt in range(3):
            loss_of(m(t.ids(30, 4 + salt, salt=salt))).backward()

    check(rank, Words, run, expect=ROWS, backward_passes_per_step=3)


@case
def fewer_passes_on_one_rank(rank):
    def run(m, t):
        for salt in range(1 if rank.rank == t.index % rank.size else 2):
            loss_of(m(t.ids(30, 6, salt=salt))).backward()

    check(rank, Words, run, expect=ROWS, backward_passes_per_step=2)


@case
def gradients_discarded_between_passes(rank):
    def run(m, t):
        loss_of(m(t.ids(30, 6))).backward()
        if t.index == 2:
            m.zero_grad(set_to_none=True)
        if t.index == 3:
            m.zero_grad(set_to_none=False)
        loss_of(m(t.ids(30, 5, salt=1))).backward()

    check(rank, Words, run, expect=ROWS, steps=5, backward_passes_per_step=2)
    check(rank, lambda: Words(sparse=True), run, expect=ROWS, steps=5, backward_passes_per_step=2, optimizer=plain_sgd)


@case
def same_graph_twice(rank):
    def run(m, t):
        loss = loss_of(m(t.ids(30, 6)))
        loss.backward(retain_graph=True)
        loss.backward()

    check(rank, Words, run, expect=ROWS, backward_passes_per_step=2)


@case
def step_that_is_thrown_away(rank):
    """load_state_dict() between backward and step, also with rows in flight."""

    def run(m, t):
        if t.index == 2 and t.kind == "poseidon":
            loss_of(m(t.ids(30, 7, salt=1))).backward()
            t.optimizer.load_state_dict(t.optimizer.state_dict())
            m.zero_grad()
        on(9)(m, t)

    check(rank, Words, run, expect=ROWS, steps=5)
    check(rank, lambda: Words(sparse=True), run, expect=ROWS, steps=5, optimizer=plain_sgd)


@case(**BOTH)
def op_sum_and_predivide(rank):
    check(rank, Words, on(9), expect=ROWS, op=rank.horovod.Sum)
    check(rank, Words, on(9), expect=ROWS, gradient_predivide_factor=2.0)


# ---- The kept gradient buffer, of which only the touched rows are zeroed


def _writing(write, zero=lambda m, o: o.zero_grad()):
    def before(m, o):
        if m.embed.weight.grad is not None:
            write(m.embed.weight)
        zero(m, o)

    return before


@case
def gradient_buffer_is_kept(rank):
    addresses = []

    def zero(m, o):
        if m.embed.weight.grad is not None:
            addresses.append(m.embed.weight.grad.data_ptr())
        o.zero_grad()

    check(rank, lambda: Table(300), on(20, high=300), expect=ROWS, zero=zero, steps=6)
    assert len(addresses) == 5 and set(addresses[1:]) == {addresses[1]}, addresses


@case
def gradients_kept_and_zeroed(rank):
    forms = (
        lambda m, o: o.zero_grad(set_to_none=False),
        lambda m, o: m.zero_grad(set_to_none=False),
        lambda m, o: m.zero_grad(),
    )
    for zero in forms:
        check(rank, lambda: Table(300), on(20, high=300), expect=ROWS, zero=zero, steps=5)


@case
def gradient_written_in_place(rank):
    check(
        rank,
        lambda: Table(300),
        on(20, high=300),
        expect=ROWS,
        zero=_writing(lambda p: p.grad.add_(p.detach())),
        steps=5,
    )
    check(
        rank, lambda: Table(300), on(20, high=300), expect=ROWS, zero=_writing(lambda p: p.grad[7].fill_(1.0)), steps=5
    )


@case
def gradient_written_through_data(rank):
    """Weight decay by hand, as optimizers of PyTorch 1 did it: the version counter does not see it."""
    check(
        rank,
        lambda: Table(300),
        on(20, high=300),
        expect=ROWS,
        zero=_writing(lambda p: p.grad.data.add_(p.data)),
        steps=5,
    )


@case
def gradient_still_held_by_somebody(rank):
    held = []

    def hold(p):
        held.append((p.grad, p.grad.clone()))

    check(rank, lambda: Table(300), on(20, high=300), expect=ROWS, zero=_writing(hold), steps=5)
    assert all(torch.equal(grad, copy) for grad, copy in held) and len(held) >= 4


# ---- Types


@case(**BOTH)
def fp16_compression(rank):
    check(
        rank, Words, on(9), expect=ROWS, compression=rank.horovod.Compression.fp16, floor=torch.finfo(torch.float16).eps
    )


@case(**BOTH)
def bfloat16_table(rank):
    check(
        rank,
        lambda: Table(300),
        on(90, high=300),
        expect=ROWS,
        dtype=torch.bfloat16,
        horovod_wrap={"compression": rank.horovod.Compression.fp16},
    )


@case
def bfloat16_table_with_many_repeated_ids(rank):
    """Sums in float32: added up in bfloat16, 500 of them would lose most of their digits."""

    def run(m, t):
        on(500 if t.index >= 1 else 2, high=2)(m, t)  # step 0 is PyTorch's own

    check(rank, Table, run, expect=ROWS, dtype=torch.bfloat16, horovod=False)


@case
def float16_table(rank):
    check(rank, lambda: Table(300), on(90, high=300), expect=ROWS, dtype=torch.float16)


@case
def float64_table(rank):
    check(rank, Words, on(9), expect=ROWS, dtype=torch.float64)


@case
def table_cast_by_the_call(rank):
    """The rows travel in the type of the call."""

    def run(m, t):
        weight = m.embed.weight.to(torch.bfloat16)
        if t.kind == "reference":
            weight = weight.to(t.dtype)
        loss_of(F.embedding(t.ids(30, 9), weight).to(t.dtype)).backward()

    check(rank, Table, run, expect=ROWS, horovod=False, floor=torch.finfo(torch.bfloat16).eps)

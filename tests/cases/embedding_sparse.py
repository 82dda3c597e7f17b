"""Embedding tables with sparse gradients, and bags: how they are sent when their rows are gathered."""

import torch
from harness.compare import check
from harness.registry import BOTH, case
from torch.nn import EmbeddingBag, Linear, Module, Parameter
from torch.nn import functional as F

from cases.embedding import DENSE, GATHERED, ONE_STOP, ROWS, on, plain_sgd, sparse_table
from cases.linear import loss_of


def sparse_adam(parameters):
    return torch.optim.SparseAdam(list(parameters), lr=0.01)


def sparse_adam_case(rank, used, **options):
    """Steps of SparseAdam on which ``used`` says where the table is used.

    Returns how many rows each gradient had, all sparse.
    """
    sizes = []

    def zero(m, o):
        grad = m.embed.weight.grad
        if grad is not None:
            assert grad.is_sparse and grad.sparse_dim() == 1
            assert not sizes or (
                grad.is_coalesced() and grad._indices().unique().numel() == grad._nnz()
            )  # step 0 is Horovod's own
            sizes.append(grad._nnz())
        o.zero_grad()

    def run(m, t):
        if used(t):
            loss_of(m(t.ids(8, 20))).backward()

    check(rank, sparse_table(), run, expect=ROWS, optimizer=sparse_adam, steps=6, zero=zero, **options)
    assert len(sizes) == 5 and max(sizes[1:]) <= 8, sizes
    return sizes


@case(**BOTH)
def sparse_gradient_with_sparse_adam(rank):
    """Ids repeat within a batch: each row is there once."""
    sparse_adam_case(rank, lambda t: True)


@case
def sparse_gradient_unused_on_one_rank(rank):
    """Plain Horovod hangs."""
    sparse_adam_case(rank, lambda t: t.index == 0 or rank.rank != t.index % rank.size, horovod=False)


@case
def sparse_gradient_unused_on_all_ranks(rank):
    assert sparse_adam_case(rank, lambda t: t.index != 2, horovod=False)[2] == 0


@case
def sparse_with_padding_and_no_ids(rank):
    def run(m, t):
        loss_of(m(t.ids(8, 0 if rank.rank == t.index % rank.size else 20))).backward()

    check(rank, sparse_table(padding_idx=3), run, expect=ROWS, optimizer=plain_sgd, steps=5)


@case
def sparse_zeroed_in_place(rank):
    for zero in (lambda m, o: o.zero_grad(set_to_none=False), lambda m, o: m.zero_grad(set_to_none=False)):
        runs = check(rank, sparse_table(), on(9), expect=ROWS, optimizer=plain_sgd, zero=zero, steps=4)
        assert runs.model.embed.weight.grad.is_sparse


@case
def sparse_table_used_densely_later(rank):
    """Its gradient is dense in that step. Afterwards rows go Horovod's own way, until it is looked at again."""

    def run(m, t):
        if t.index == 2:
            loss_of(F.embedding(t.ids(30, 9), m.embed.weight)).backward()
        else:
            on(9)(m, t)

    check(rank, sparse_table(), run, expect=ROWS, optimizer=plain_sgd, steps=5, warns=ONE_STOP)


@case
def sparse_table_hooked_later(rank):
    def run(m, t):
        handle = m.embed.weight.register_hook(lambda grad: 2 * grad) if t.index == 2 else None
        on(9)(m, t)
        if handle is not None:
            handle.remove()

    runs = check(rank, sparse_table(), run, expect=GATHERED, optimizer=plain_sgd, steps=5, warns=ONE_STOP)
    assert runs.model.embed.weight.grad.is_sparse


@case
def sparse_and_dense_calls(rank):
    def run(m, t):
        loss_of(torch.cat([m(t.ids(30, 9)), F.embedding(t.ids(30, 5, salt=1), m.embed.weight)])).backward()

    check(rank, sparse_table(), run, expect=DENSE, optimizer=plain_sgd)


@case
def fp16_compression_of_a_sparse_gradient(rank):
    check(
        rank,
        sparse_table(),
        on(9),
        expect=ROWS,
        compression=rank.horovod.Compression.fp16,
        optimizer=plain_sgd,
        horovod=False,
        floor=torch.finfo(torch.float16).eps,
    )


# ---- Bags


class Bag(Module):
    def __init__(self, **options):
        super().__init__()
        self.embed = EmbeddingBag(30, 6, **options)
        self.head = Linear(6, 3)

    def forward(self, *args, **options):
        return self.head(self.embed(*args, **options))


@case
def bag_sum_and_mean(rank):
    for mode in ("sum", "mean"):
        check(rank, lambda: Bag(mode=mode), on(5, 4, high=12), expect={**ROWS, "head.*": "sfb"})


@case(**BOTH)
def bag_with_offsets(rank):
    """Bags of different sizes, empty ones among them."""
    for mode in ("sum", "mean"):

        def run(m, t):
            loss_of(m(t.ids(12, 11), torch.tensor([0, 0, 3, 4, 11, 11]))).backward()

        check(rank, lambda: Bag(mode=mode), run, expect=ROWS)


@case
def bag_with_last_offset(rank):
    def run(m, t):
        loss_of(m(t.ids(12, 11).int(), torch.tensor([0, 2, 2, 7, 11], dtype=torch.int32))).backward()

    check(rank, lambda: Bag(mode="mean", include_last_offset=True), run, expect=ROWS)


@case
def bag_with_padding(rank):
    """Padding does not count in a mean; a bag may consist of nothing else."""
    for mode in ("sum", "mean"):

        def run(m, t):
            ids = t.ids(4, 6, 5)
            ids[0] = 3
            loss_of(m(ids)).backward()

        runs = check(rank, lambda: Bag(mode=mode, padding_idx=3), run, expect=ROWS)
        assert runs.model.embed.weight.grad[3].count_nonzero() == 0


@case
def bag_by_frequency_stays_dense(rank):
    """PyTorch 2.13 divides by frequencies of other ids than the row's. What it computes is averaged, whatever it is."""
    for mode in ("sum", "mean"):
        check(rank, lambda: Bag(mode=mode, scale_grad_by_freq=True), on(5, 6, high=7), expect=DENSE)


@case
def bag_with_sample_weights(rank):
    """They get their own gradient, or none."""

    class Model(Module):
        def __init__(self):
            super().__init__()
            self.embed = EmbeddingBag(30, 6, mode="sum")
            self.importance = Parameter(torch.rand(20))

    def run(m, t):
        ids, offsets = t.ids(12, 20), torch.tensor([0, 4, 4, 13])
        fixed = t.x(20, salt=1)
        y = m.embed(ids, offsets, per_sample_weights=m.importance)
        loss_of(y + m.embed(ids, offsets, per_sample_weights=fixed)).backward()

    check(rank, Model, run, expect={**ROWS, "importance": "allreduce"})


@case
def bag_without_ids(rank):
    def run(m, t):
        if rank.rank == t.index % rank.size:
            loss_of(m(torch.empty(0, dtype=torch.int64), torch.tensor([0, 0]))).backward()
        else:
            on(5, 4)(m, t)

    check(rank, lambda: Bag(mode="mean"), run, expect=ROWS, steps=5)


@case
def bag_with_sparse_gradient(rank):
    for mode in ("sum", "mean"):
        runs = check(rank, lambda: Bag(mode=mode, sparse=True), on(5, 4, high=12), expect=ROWS, optimizer=plain_sgd)
        assert runs.model.embed.weight.grad.is_sparse


@case
def bag_in_float64_and_bfloat16(rank):
    check(rank, lambda: Bag(mode="mean"), on(5, 4, high=12), expect=ROWS, dtype=torch.float64)
    check(
        rank,
        lambda: Bag(mode="mean"),
        on(5, 4, high=12),
        expect=ROWS,
        dtype=torch.bfloat16,
        horovod_wrap={"compression": rank.horovod.Compression.fp16},
    )


@case
def bag_max_stays_dense(rank):
    check(rank, lambda: Bag(mode="max"), on(5, 4), expect={**DENSE, "head.*": "sfb"})


@case
def bag_and_embedding_over_one_table(rank):
    def run(m, t):
        loss_of(m.head(m.embed(t.ids(30, 5, 4)) + F.embedding(t.ids(30, 5, salt=1), m.embed.weight))).backward()

    check(rank, lambda: Bag(mode="sum"), run, expect=ROWS)


@case
def zeroed_by_a_product_between_steps(rank):
    """A sparse gradient of zeros holds nothing, whatever rows it lists; the rows of both passes count."""

    def run(m, t):
        if t.kind == "poseidon" and t.optimizer is not None and m.embed.weight.grad is not None:
            m.embed.weight.grad.mul_(0)
        for salt in range(2):
            loss_of(m(t.ids(30, 9, salt=salt))).backward()

    keep = {
        "zero": lambda model, optimizer: (
            None if optimizer is not None and hasattr(optimizer, "scheme_report") else model.zero_grad()
        )
    }
    check(
        rank,
        sparse_table(),
        run,
        expect=ROWS,
        optimizer=plain_sgd,
        steps=4,
        backward_passes_per_step=2,
        horovod=False,
        **keep,
    )

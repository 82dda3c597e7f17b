"""Embeddings with dense and with sparse gradients."""

import torch
from harness.compare import Step, check, relative_error
from harness.registry import BOTH, case
from torch.nn import Embedding, EmbeddingBag, Linear, Module

import poseidon_hvd as hvd
from cases.embedding import plain_sgd
from cases.linear import loss_of


class Words(Module):
    def __init__(self, sparse, padding=None):
        super().__init__()
        self.embed = Embedding(10, 4, sparse=sparse, padding_idx=padding)
        self.head = Linear(4, 3)

    def forward(self, ids):
        return self.head(self.embed(ids))


def run_words(m, t):
    loss_of(m(t.ids(10, 5, 3))).backward()


def check_sparse(rank, run, **options):
    return check(rank, lambda: Words(True), run, optimizer=plain_sgd, **options)


@case
def dense_embedding(rank):
    check(rank, lambda: Words(False), run_words, expect={"embed.weight": "row-sparse", "head.*": "sfb"})


@case
def dense_embedding_called_with_two_shapes(rank):
    def run(m, t):
        loss_of(m(t.ids(10, 4, 1)).sum() + m(t.ids(10, 4, 7, salt=1)).sum()).backward()

    check(rank, lambda: Words(False), run, expect={"embed.weight": "row-sparse", "head.*": "sfb"})


@case
def padding_index(rank):
    def run(m, t):
        ids = t.ids(10, 5, 3)
        ids[0, 0] = 9
        loss_of(m(ids)).backward()

    runs = check(rank, lambda: Words(False, padding=-1), run, expect={"embed.weight": "row-sparse"})
    assert runs.model.embed.weight.grad[9].count_nonzero() == 0


@case(**BOTH)
def sparse_embedding(rank):
    """The gradient stays sparse, repeated rows included. SGD with momentum takes no sparse gradients."""
    runs = check_sparse(rank, run_words, expect={"embed.weight": "row-sparse", "head.*": "sfb"})
    assert runs.model.embed.weight.grad.is_sparse


@case
def sparse_embedding_under_policy_allreduce(rank):
    """Horovod's own way: indices and values gathered, not merged."""
    runs = check_sparse(
        rank, run_words, expect={"embed.weight": "sparse_allgather", "head.*": "allreduce"}, policy="allreduce"
    )
    assert runs.model.embed.weight.grad.is_sparse


@case
def sparse_embedding_two_passes(rank):
    def run(m, t):
        for salt in range(2):
            loss_of(m(t.ids(10, 5, 3, salt=salt))).backward()

    check_sparse(rank, run, expect={"head.*": "sfb"}, backward_passes_per_step=2)


@case(**BOTH)
def sparse_embedding_op_sum(rank):
    check_sparse(rank, run_words, expect={"head.*": "sfb"}, op=rank.horovod.Sum)


@case
def sparse_embedding_unused_on_one_rank(rank):
    """Plain Horovod hangs: one rank gathers rows, the other reduces zeros."""

    def run(m, t):
        if t.index >= 1 and rank.rank == t.index % rank.size:
            loss_of(m.head(t.x(5, 4))).backward()
        else:
            run_words(m, t)

    check_sparse(rank, run, expect={"head.*": "sfb"}, horovod=False)


@case
def sparse_embedding_unused_in_the_profiling_step(rank):
    def run(m, t):
        if t.index == 0 and rank.rank == 0:
            loss_of(m.head(t.x(5, 4))).backward()
        else:
            run_words(m, t)

    check_sparse(rank, run, expect={"head.*": "sfb"}, horovod=False)


@case
def sparse_embedding_unused_on_all_ranks(rank):
    def run(m, t):
        if t.index == 2:
            loss_of(m.head(t.x(5, 4))).backward()
        else:
            run_words(m, t)

    check_sparse(rank, run, expect={"head.*": "sfb"}, horovod=False)


@case
def sparse_embedding_that_starts_after_the_plan(rank):
    """Nobody saw a sparse gradient in step 0; later one rank has one and another has none."""

    def run(m, t):
        if t.index < 2 or rank.rank == 0:
            loss_of(m.head(t.x(5, 4))).backward()
        else:
            run_words(m, t)

    check_sparse(rank, run, expect={"head.*": "sfb"}, horovod=False)


@case
def sparse_as_dense(rank):
    """Dense on the wire; afterwards the gradient is sparse again, as in Horovod, because SparseAdam wants it so."""
    runs = check_sparse(rank, run_words, expect={"embed.weight": "allreduce", "head.*": "sfb"}, sparse_as_dense=True)
    assert runs.model.embed.weight.grad.is_sparse


@case
def sparse_as_dense_unused_on_one_rank(rank):
    def run(m, t):
        if rank.rank == t.index % rank.size:
            loss_of(m.head(t.x(5, 4))).backward()
        else:
            run_words(m, t)

    check_sparse(rank, run, expect={"embed.weight": "allreduce", "head.*": "sfb"}, sparse_as_dense=True, horovod=False)


@case
def sparse_with_fp16_compression(rank):
    """Plain Horovod raises AttributeError."""
    check_sparse(
        rank,
        run_words,
        expect={"head.*": "sfb"},
        horovod=False,
        compression=rank.horovod.Compression.fp16,
        floor=torch.finfo(torch.float16).eps,
    )


@case
def embedding_bag(rank):
    class Model(Module):
        def __init__(self):
            super().__init__()
            self.bag = EmbeddingBag(10, 4, sparse=True, mode="sum")
            self.head = Linear(4, 3)

        def forward(self, ids):
            return self.head(self.bag(ids))

    check(
        rank, Model, lambda m, t: loss_of(m(t.ids(10, 5, 3))).backward(), expect={"head.*": "sfb"}, optimizer=plain_sgd
    )


@case(real="plain Horovod beside")
def sparse_adam_and_adam(rank):
    """Two optimizers over one model: SparseAdam for the table, Adam for the rest."""

    def script(wrap, t):
        m = Words(True).to(t.dtype)
        tables = wrap(
            torch.optim.SparseAdam(list(m.embed.parameters()), lr=0.01),
            named_parameters=[("embed.weight", m.embed.weight)],
        )
        rest = wrap(
            torch.optim.Adam(m.head.parameters(), lr=0.01),
            named_parameters=list(m.head.named_parameters(prefix="head")),
        )
        for step in range(5):
            tables.zero_grad()
            rest.zero_grad()
            loss_of(m(rank.integers(step, 10, 5, 3))).backward()
            tables.step()
            rest.step()
        return list(m.named_parameters())

    # Adam divides by the square root of a gradient's square: where a gradient is nearly zero its rounding decides a
    # whole step, so the floor is wider. Reference gradients are dense, and SparseAdam refuses those, so only Horovod is
    # compared.
    results = {}
    for kind, wrap in (
        ("horovod", rank.horovod.DistributedOptimizer),
        ("poseidon", lambda *a, **k: hvd.DistributedOptimizer(*a, policy="sfb", **k)),
    ):
        torch.manual_seed(7)
        results[kind] = dict(script(wrap, Step(rank, 0, kind, torch.float32, torch.float32)))
    for name, p in results["poseidon"].items():
        assert relative_error(p.detach(), results["horovod"][name].detach().double()) < 1e-4, name
    rank.assert_same_everywhere(results["poseidon"].values(), "parameters")

"""Dtypes, compression, reductions, groups and process sets."""

import torch
from harness.compare import check, schemes_of, sgd
from harness.registry import BOTH, PROCESS_SET, case
from torch.nn import Linear, Module, Parameter, ReLU, Sequential

import poseidon_hvd as hvd
from cases.embedding import GATHERED, Words, plain_sgd
from cases.linear import loss_of, mlp, train
from cases.passes import several


@case
def float64_model(rank):
    check(rank, mlp, train(6, 12), expect={"*": "sfb"}, dtype=torch.float64)


@case(**BOTH)
def float16_model(rank):
    check(rank, mlp, train(6, 12), expect={"*": "sfb"}, dtype=torch.float16)


@case
def float16_model_with_tiles(rank):
    """Large enough that a 16-bit gradient is rebuilt in several float32 tiles, the last of them smaller."""

    def build():
        return Sequential(Linear(600, 1001), ReLU(), Linear(1001, 5))

    check(rank, build, train(3, 600), expect={"*": "sfb"}, dtype=torch.float16, steps=3)


@case
def float16_three_passes(rank):
    check(rank, mlp, several(3), expect={"*": "sfb"}, dtype=torch.float16, backward_passes_per_step=3)


@case(**BOTH)
def bfloat16_model(rank):
    """Plain Horovod refuses bfloat16; with fp16 compression it runs, and is what we are measured against."""
    check(
        rank,
        mlp,
        train(6, 12),
        expect={"*": "sfb"},
        dtype=torch.bfloat16,
        horovod_wrap={"compression": rank.horovod.Compression.fp16},
    )


@case
def bfloat16_dense(rank):
    check(
        rank,
        mlp,
        train(6, 12),
        expect={"*": "allreduce"},
        policy="allreduce",
        dtype=torch.bfloat16,
        horovod_wrap={"compression": rank.horovod.Compression.fp16},
    )


@case
def bfloat16_three_passes(rank):
    check(
        rank,
        mlp,
        several(3),
        expect={"*": "sfb"},
        dtype=torch.bfloat16,
        backward_passes_per_step=3,
        horovod_wrap={"compression": rank.horovod.Compression.fp16, "backward_passes_per_step": 3},
    )


@case
def layers_of_different_dtypes(rank):
    class Mixed(Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = Linear(12, 16), Linear(16, 16)
            self.c = Linear(16, 4)

        def forward(self, x):
            h = self.b(torch.relu(self.a(x)).to(self.b.weight.dtype))
            return self.c(torch.relu(h).to(self.c.weight.dtype))

    def narrow(m):
        if m.a.weight.dtype != torch.float64:
            m.b.half()

    # The floor is that of the half-precision layer for all: its rounding reaches the others through the graph.
    check(rank, Mixed, train(6, 12), expect={"*": "sfb"}, prepare=narrow, floor=2 * torch.finfo(torch.float16).eps)


def _autocast(dtype):
    def run(m, t):
        with torch.autocast("cpu", dtype=dtype, enabled=t.kind != "reference"):
            y = m(t.x(6, 12))
        loss_of(y.to(t.dtype)).backward()

    return run


@case(**BOTH)
def autocast_bfloat16(rank):
    """Factors have 16 bits, the gradient 32: error against float64 at most twice that of the gradient that autograd
    makes.
    """
    runs = check(rank, mlp, _autocast(torch.bfloat16), expect={"*": "sfb"})
    costs = {t["name"]: t["costs"] for t in runs.optimizer.plan()["tensors"]}
    expected = 6 * rank.size * (12 + 32) * 2 * (rank.size - 1) / rank.size
    assert costs["0.weight"]["sfb"]["bytes"] == expected, costs["0.weight"]


@case
def autocast_float16(rank):
    check(rank, mlp, _autocast(torch.float16), expect={"*": "sfb"})


@case
def autocast_without_weight_cache(rank):
    def run(m, t):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=t.kind != "reference", cache_enabled=False):
            y = m(t.x(6, 12)) + m(t.x(6, 12, salt=1))
        loss_of(y.to(t.dtype)).backward()

    check(rank, mlp, run, expect={"*": "sfb"})


@case
def autocast_from_step_2(rank):
    """The wire type was agreed for float32 factors: 16-bit ones are widened without loss."""

    def run(m, t):
        (_autocast(torch.bfloat16) if t.index >= 2 else train(6, 12))(m, t)

    check(rank, mlp, run, expect={"*": "sfb"}, steps=5)


@case
def autocast_until_step_2(rank):
    """The wire type was agreed for bfloat16 factors, float32 ones come later: never rounded silently, so dense until
    it is looked at again.
    """

    def run(m, t):
        (_autocast(torch.bfloat16) if t.index < 2 else train(6, 12))(m, t)

    check(rank, mlp, run, expect={"*": "sfb"}, steps=5, warns=["its gradient came from elsewhere"] * 3)


@case
def grad_scaler(rank):
    """scale, backward, synchronize, unscale, clip, step."""
    model = mlp()
    optimizer = hvd.DistributedOptimizer(sgd(model.parameters()), model.named_parameters(), policy="sfb")
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for step in range(4):
        optimizer.zero_grad()
        loss = loss_of(model(rank.random(step, 6, 12).float()))
        if step == 2 and rank.rank == 0:
            loss = loss * float("inf")  # every rank must see it and skip the step
        scaler.scale(loss).backward()
        optimizer.synchronize()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        with optimizer.skip_synchronize():
            scaler.step(optimizer)
        scaler.update()
        rank.assert_same_everywhere(model.parameters(), "parameters")
    assert scaler.get_scale() == 512.0
    assert all(torch.isfinite(p).all() for p in model.parameters())


@case
def grad_scaler_changes_nothing(rank):
    """Powers of two are exact, so the parameters are the same, bit for bit, as without it.

    Fused optimizers undo the scale in their step.
    """

    def trained(enabled, make, cast, unscale):
        torch.manual_seed(7)
        model = mlp()
        optimizer = hvd.DistributedOptimizer(make(model.parameters()), model.named_parameters(), policy="sfb")
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, enabled=enabled)
        for step in range(4):
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=cast):
                y = model(rank.random(step, 6, 12).float())
            scaler.scale(loss_of(y.float())).backward()
            optimizer.synchronize()
            if unscale:
                scaler.unscale_(optimizer)
            with optimizer.skip_synchronize():
                scaler.step(optimizer)
            scaler.update()
        assert set(schemes_of(optimizer).values()) == {"sfb"}
        rank.assert_same_everywhere(model.parameters(), "parameters")
        return list(model.parameters())

    for make in (sgd, lambda p: torch.optim.AdamW(p, lr=0.01, fused=True)):
        for cast in (False, True):
            plain = trained(False, make, cast, unscale=False)
            for unscale in (False, True):
                scaled = trained(True, make, cast, unscale)
                assert all(torch.equal(p, q) for p, q in zip(scaled, plain)), (cast, unscale)


@case(**BOTH)
def fp16_compression(rank):
    check(
        rank,
        mlp,
        train(6, 12),
        expect={"*": "sfb"},
        compression=rank.horovod.Compression.fp16,
        floor=torch.finfo(torch.float16).eps,
    )


@case
def fp16_compression_dense(rank):
    check(
        rank,
        mlp,
        train(6, 12),
        expect={"*": "allreduce"},
        policy="allreduce",
        compression=rank.horovod.Compression.fp16,
        floor=torch.finfo(torch.float16).eps,
    )


@case
def fp16_compression_of_a_float64_model(rank):
    # The floor is that of what travels.
    check(
        rank,
        mlp,
        train(6, 12),
        expect={"*": "sfb"},
        compression=rank.horovod.Compression.fp16,
        dtype=torch.float64,
        floor=torch.finfo(torch.float16).eps,
    )


@case
def fp16_compression_of_a_bfloat16_model(rank):
    check(rank, mlp, train(6, 12), expect={"*": "sfb"}, compression=rank.horovod.Compression.fp16, dtype=torch.bfloat16)


@case
def custom_compressor(rank):
    """Python code of the user's: its gradients are allreduced."""

    class Halving(rank.horovod.Compression.none):
        @staticmethod
        def compress(tensor):
            return tensor / 2, tensor.dtype

        @staticmethod
        def decompress(tensor, context):
            assert context == tensor.dtype
            return tensor * 2

    check(rank, mlp, train(6, 12), expect={"*": "allreduce"}, compression=Halving)


@case
def custom_compressor_that_changes_dtype_and_shape(rank):
    class Flat(rank.horovod.Compression.none):
        @staticmethod
        def compress(tensor):
            return tensor.double().reshape(-1), tensor.shape

        @staticmethod
        def decompress(tensor, context):
            return tensor.float().view(context)

    check(rank, mlp, several(2), expect={"*": "allreduce"}, compression=Flat, backward_passes_per_step=2, horovod=False)


@case(real="Horovod tells when a collective of the script's own is waited for")
def custom_compressor_with_collectives(rank):
    """Ranks agree on a scale before they send, and look at something together when the sum has come."""

    class Agreeing(rank.horovod.Compression.none):
        @staticmethod
        def compress(tensor):
            scale = rank.horovod.allreduce(tensor.abs().max().reshape(1), op=rank.horovod.Max).clamp(min=1e-6)
            return tensor / scale, scale

        @staticmethod
        def decompress(tensor, context):
            same = rank.horovod.allreduce(context, op=rank.horovod.Min)
            assert torch.equal(same, context)
            return tensor * context

    check(rank, mlp, train(6, 12), expect={"*": "allreduce"}, compression=Agreeing, horovod=False)


@case(**BOTH)
def op_sum(rank):
    check(rank, mlp, train(lambda t: (3 + rank.rank, 12)), expect={"*": "sfb"}, op=rank.horovod.Sum)


@case
def predivide_2(rank):
    check(rank, mlp, train(6, 12), expect={"*": "sfb"}, gradient_predivide_factor=2.0)


@case(**BOTH)
def predivide_by_size(rank):
    check(
        rank,
        mlp,
        several(3),
        expect={"*": "sfb"},
        gradient_predivide_factor=float(rank.size),
        backward_passes_per_step=3,
    )


@case
def predivide_dense(rank):
    check(rank, mlp, train(6, 12), expect={"*": "allreduce"}, policy="allreduce", gradient_predivide_factor=3.0)


@case(seconds=150)
def sums_and_averages(rank):
    """Passes are summed on the rank, and averaged or summed over ranks: with every reduction, number of passes and
    scheme alike.
    """
    reductions = [
        {"op": rank.horovod.Sum},
        *({"gradient_predivide_factor": factor} for factor in (1.0, 2.0, float(rank.size))),
    ]
    for reduction in reductions:
        for passes in (1, 3):

            def run(m, t):
                for salt in range(passes):
                    loss_of(m(t.ids(30, 9, salt=salt))).backward()

            options = {"steps": 3, "backward_passes_per_step": passes, **reduction}
            check(rank, Words, run, expect={"embed.weight": "row-sparse", "head.*": "sfb"}, **options)
            check(rank, Words, run, expect={"*": "allreduce"}, policy="allreduce", **options)
            check(
                rank,
                lambda: Words(sparse=True),
                run,
                expect=GATHERED,
                policy="allreduce",
                optimizer=plain_sgd,
                **options,
            )


@case
def predivide_keeps_half_precision_finite(rank):
    """Dense sums over ranks in 16 bits: 40 000 on each overflow unless they are divided before, a millionth does not
    bear it.
    """

    class Model(Module):
        def __init__(self):
            super().__init__()
            self.weight = Parameter(torch.zeros(8, 4))

    for value, factor in ((40000.0, float(rank.size)), (17 * 2.0**-24, 1.0)):
        for options in ({"dtype": torch.float16}, {"compression": rank.horovod.Compression.fp16}):
            runs = check(
                rank,
                Model,
                lambda m, t: (m.weight * value).sum().backward(),
                expect={"weight": "allreduce"},
                steps=2,
                gradient_predivide_factor=factor,
                **options,
            )
            assert (runs.model.weight.grad == value).all(), (runs.model.weight.grad, options)


@case(**BOTH)
def op_min_and_max(rank):
    """Not an average nor a sum: dense, element by element."""
    for name in ("Min", "Max"):
        op = getattr(rank.horovod, name)
        check(rank, mlp, train(6, 12), expect={"*": "allreduce"}, op=op, steps=2)


@case
def groups_as_a_number(rank):
    check(rank, mlp, train(6, 12), expect={"*": "allreduce"}, groups=2)


@case(**BOTH)
def groups_as_lists(rank):
    """Members of a group are dense, the others are free."""
    check(
        rank,
        mlp,
        train(6, 12),
        expect={"0.*": "allreduce", "2.weight": "allreduce", "4.*": "sfb"},
        groups=[["0.weight", "0.bias"], ["2.weight", "2.bias"]],
    )


@case
def group_with_predivide(rank):
    """Plain Horovod ignores the factor for groups, where it cancels anyway."""
    check(rank, mlp, train(6, 12), expect={"*": "allreduce"}, groups=1, gradient_predivide_factor=2.0)


@case
def group_unused_on_one_rank(rank):
    """Plain Horovod deadlocks: one rank sends the group, the other its members one by one."""

    def run(m, t):
        h = torch.relu(m[0](t.x(6, 12)))
        loss_of(m[4](torch.tanh(m[2](h))) if rank.rank != t.index % rank.size else h).backward()

    check(
        rank,
        mlp,
        run,
        expect={"2.*": "allreduce", "0.*": "sfb"},
        groups=[["2.weight", "4.weight", "4.bias"]],
        horovod=False,
    )


@case
def groups_and_passes(rank):
    check(rank, mlp, several(3), expect={"*": "allreduce"}, groups=1, backward_passes_per_step=3)


@case(threads=(4, 8), real=PROCESS_SET, ranks=(4,))
def process_set_of_two(rank):
    """Ranks 1 and 3 train together, the others alone."""
    check(rank, mlp, train(lambda t: (3 + rank.rank, 12)), expect={"*": "sfb"}, process_set=rank.subset)


@case(threads=(4, 8), real=PROCESS_SET, ranks=(4,))
def process_set_dense_and_extra(rank):
    def run(m, t):
        loss = loss_of(m(t.x(6, 12)))
        if t.index == 2 and rank.rank == 3:
            loss = loss + 0.1 * m[2].weight.pow(2).sum()
        loss.backward()

    # Only members exchange, so only they warn.
    check(
        rank,
        mlp,
        run,
        expect={"*": "sfb"},
        process_set=rank.subset,
        warns=["its gradient came from elsewhere"] if rank.subset.included() else [],
    )


@case(threads=(4, 8), real=PROCESS_SET, ranks=(4,))
def process_set_beside_the_global_one(rank):
    """Two optimizers over different sets in one step: their collectives interleave."""
    torch.manual_seed(7)
    both, part = mlp(), mlp()
    outer = hvd.DistributedOptimizer(sgd(both.parameters()), both.named_parameters("both"), policy="sfb")
    inner = hvd.DistributedOptimizer(
        sgd(part.parameters()), part.named_parameters("part"), policy="sfb", process_set=rank.subset
    )
    for step in range(4):
        outer.zero_grad()
        inner.zero_grad()
        x = rank.random(step, 6, 12).float()
        loss_of(both(x) + part(x)).backward()
        outer.step()
        inner.step()
        rank.assert_same_everywhere(both.parameters(), "all ranks")
        rank.assert_same_everywhere(part.parameters(), "members", rank.subset.ranks)
    assert set(schemes_of(outer).values()) == {"sfb"}
    assert not rank.subset.included() or set(schemes_of(inner).values()) == {"sfb"}


@case
def values_that_overflow_half_precision(rank):
    """70 000 is no float16, but the sum over rows is taken in float32 and the mean is representable."""

    def run(m, t):
        # d is 1 in every row; the sum over all ranks' rows passes 65 504 and the mean does not. Step 0 is dense: small
        # there.
        x = torch.full((4, 8), 9000.0 if t.index > 0 else 1.0, dtype=t.dtype)
        m(x).sum().backward()

    def build():
        m = Linear(8, 4)
        torch.nn.init.zeros_(m.weight)
        return m

    check(
        rank,
        build,
        run,
        expect={"weight": "sfb"},
        dtype=torch.float16,
        horovod=False,
        steps=2,
        optimizer=lambda p: torch.optim.SGD(p, lr=1e-6),
    )

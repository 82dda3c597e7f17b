"""Factors of every magnitude under Compression.fp16: gradients that fit float16 arrive, also where factors do not."""

import sys

import torch
from harness.compare import Run3, Step, check, schemes_of
from harness.registry import case
from torch.nn import Linear, Sequential

import poseidon_hvd as hvd
from cases.embedding import ROWS, Words
from cases.linear import loss_of
from cases.planning import SLOW

# Two roundings to float16. Step 0 is dense, where the order in which ranks are summed in float16 is chance.
FLOOR = torch.finfo(torch.float16).eps

# Gradients from far below float16 to near its end, by every combination of factors.
POWERS = range(-10, 9, 2)
PAIRS = [(10.0**i, 10.0**j) for i in POWERS for j in POWERS if -12 <= i + j <= 2]


def half(rank, build, run, *, expect=None, **options):
    """Not further from float64 than plain Horovod."""
    options = {"floor": FLOOR, "times": 1.1, **options}
    expect = {"*": "sfb"} if expect is None else expect
    return check(rank, build, run, expect=expect, compression=rank.horovod.Compression.fp16, **options)


def distributed(model):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    return hvd.DistributedOptimizer(optimizer, model.named_parameters(), policy="sfb", compression=hvd.Compression.fp16)


def linear(bias=True):
    return lambda: Linear(24, 20, bias=bias)


def factors(m, t, x_scale, d_scale, *, rows=7, salt=0):
    """A call whose x and d have these magnitudes: numbers, or one per row."""
    x, d = t.x(rows, 24, salt=salt), t.x(rows, 20, salt=salt + 1)
    return (m(x * torch.as_tensor(x_scale).to(t.dtype)) * (d * torch.as_tensor(d_scale).to(t.dtype))).sum()


def balanced(t, rows=7, salt=0):
    """A power of ten per row of x and its inverse for d: every row adds as much to the gradient."""
    exponents = t.ids(17, rows, 1, salt=salt + 50) - 8
    return 10.0 ** exponents.double(), 10.0 ** -exponents.double()


@case
def every_magnitude(rank):
    def run(m, t):
        factors(m, t, *PAIRS[t.index]).backward()

    half(rank, linear(bias=False), run, steps=len(PAIRS))


@case
def every_magnitude_with_bias(rank):
    """The bias gradient is the sum of d as it was; from 1e4 on it overflows in plain Horovod."""
    pairs = [pair for pair in PAIRS if pair[1] <= 100]

    def run(m, t):
        factors(m, t, *pairs[t.index]).backward()

    half(rank, linear(), run, steps=len(pairs))


@case
def every_magnitude_of_a_float64_model(rank):
    def run(m, t):
        factors(m, t, *PAIRS[t.index]).backward()

    half(rank, linear(bias=False), run, steps=len(PAIRS), dtype=torch.float64)


@case
def magnitudes_of_a_bfloat16_model(rank):
    """bfloat16 has the range of float32. Its own rounding of the result dominates."""
    pairs = [pair for pair in PAIRS if torch.tensor(pair).log10().sum() >= -6]

    def run(m, t):
        factors(m, t, *pairs[t.index]).backward()

    floor = torch.finfo(torch.bfloat16).eps / 2
    half(rank, linear(bias=False), run, steps=len(pairs), dtype=torch.bfloat16, floor=floor)


@case
def rows_of_different_magnitudes(rank):
    def run(m, t):
        factors(m, t, *balanced(t)).backward()

    half(rank, linear(bias=False), run, steps=6)


@case
def ranks_of_different_magnitudes(rank):
    """What one rank divides by is unknown to the others."""

    def run(m, t):
        exponent = (rank.rank + t.index) % 5 * 3 - 6
        factors(m, t, 10.0**exponent, 10.0**-exponent, rows=3 + rank.rank).backward()

    half(rank, linear(bias=False), run, steps=6)


@case
def several_calls(rank):
    def run(m, t):
        loss = factors(m, t, 1e5, 1e-6) + factors(m, t, 1e-7, 1e6, salt=2, rows=4) + factors(m, t, 0.3, 0.3, salt=4)
        loss.backward()

    half(rank, linear(bias=False), run)


@case
def several_passes(rank):
    def run(m, t):
        for salt in range(3):
            factors(m, t, 10.0 ** (3 * salt), 10.0 ** (-3 * salt - 1), salt=2 * salt, rows=2 + salt).backward()

    half(rank, linear(), run, backward_passes_per_step=3)


@case
def wide_and_narrow_layers(rank):
    """Rebuilding scales the narrower factor; rows of one element and of none of the registers' widths."""
    for n, m_out in ((1, 24), (24, 1), (7, 9), (8, 16), (33, 5)):

        def run(m, t):
            x, d = t.x(5, n) * 1e5, t.x(5, m_out) * 1e-6
            (m(x) * d).sum().backward()

        half(rank, lambda: Linear(n, m_out), run, steps=3)


@case
def columns_of_different_magnitudes(rank):
    """Unscaled tabular inputs: element by element, within a few roundings, over the range that plain Horovod has."""
    x_scale, d_scale = 10.0 ** torch.linspace(-3, 4, 24).double(), 10.0 ** torch.linspace(-4, -1, 20).double()
    model = Linear(24, 20, bias=False)
    optimizer = distributed(model)
    for step in range(3):
        optimizer.zero_grad()
        x = (rank.random(step, 5, 24).abs() + 0.1) * x_scale
        d = (rank.random(step, 5, 20, salt=1).abs() + 0.1) * d_scale
        (model(x.float()) * d.float()).sum().backward()
        optimizer.step()
        reference = rank.reduce(d.float().double().t() @ x.float().double())
        error = ((model.weight.grad.double() - reference).abs() / reference).max().item()
        assert error <= 2 * torch.finfo(torch.float16).eps or step == 0, error
    assert schemes_of(optimizer) == {"weight": "sfb"}


@case
def gradients_that_float16_cannot_hold(rank):
    """Plain Horovod gives infinity and zero. The gradient is float32, and what travels holds both."""

    def run(m, t):
        x_scale, d_scale = ((1.0, 1.0), (1e5, 1e5), (1e-9, 1e-9), (1e30, 1e-2), (1e-30, 1e-3))[t.index]
        factors(m, t, x_scale, d_scale).backward()

    half(rank, linear(), run, steps=5, horovod=False)


@case
def memory_that_is_not_contiguous(rank):
    """Transposed inputs, and gradients that are one number for all."""

    def run(m, t):
        (m(t.x(24, 6).t() * 1e5) * 1e-6).sum().backward()
        m((t.x(24, 6, salt=1) * 1e-6).t()).sum().backward()

    half(rank, linear(bias=False), run, backward_passes_per_step=2)


@case
def zero_rows(rank):
    def run(m, t):
        x, d = t.x(6, 24) * 1e5, t.x(6, 20) * 1e-6
        x[1], d[2] = 0, 0
        if rank.rank == t.index % rank.size:
            x, d = (x * 0, d) if t.index % 2 else (x, d * 0)
        (m(x) * d).sum().backward()

    half(rank, linear(), run, steps=5)


@case
def no_rows_on_one_rank(rank):
    """Nor on any in the last step."""

    def run(m, t):
        factors(m, t, 1e5, 1e-6, rows=0 if t.index == 4 or rank.rank == t.index % rank.size else 5).backward()

    half(rank, linear(), run, steps=5)


@case
def infinity_and_nan(rank):
    """In one row on one rank: every rank has them in the same elements as plain Horovod, and the others are right."""

    def run(m, t):
        x, d = t.x(4, 24), t.x(4, 20)
        if t.index > 0 and rank.rank == rank.size - 1:
            value = float("inf") if t.index % 2 else float("nan")
            (x if t.index < 3 else d)[2, 5] = value
        (m(x) * d).sum().backward()

    runs = Run3(rank, linear(), run, compression=rank.horovod.Compression.fp16)
    for step in range(5):
        for model, optimizer in ((runs.plain_model, runs.plain_optimizer), (runs.model, runs.optimizer)):
            optimizer.zero_grad()
            run(model, Step(rank, step, "", torch.float32, torch.float32))
            optimizer.synchronize()
        for (name, p), q in zip(runs.model.named_parameters(), runs.plain_model.parameters()):
            plain = q.grad
            finite = plain.isfinite()
            assert torch.equal(p.grad.isfinite(), finite), (step, name)
            assert finite.all() == (step == 0 or (name == "bias" and step < 3)), (step, name)
            assert torch.allclose(p.grad[finite], plain[finite], rtol=4e-3, atol=4e-3), (step, name)
        rank.assert_same_everywhere([p.grad.isfinite() for p in runs.model.parameters()], f"step {step}")


@case
def scaler_sees_an_overflow(rank):
    """A loss scale beyond float32 on one rank."""
    model = Sequential(Linear(12, 8), Linear(8, 3))
    optimizer = distributed(model)
    for step in range(4):
        optimizer.zero_grad()
        scale = 1e38 if step > 0 and rank.rank == 0 else 1.0
        (loss_of(model(rank.random(step, 6, 12).float())) * scale * scale).backward()
        optimizer.synchronize()
        finite = [bool(p.grad.isfinite().all()) for p in model.parameters()]
        assert finite == [step == 0] * 4, finite
        with optimizer.skip_synchronize():
            if step == 0:
                optimizer.step()


@case
def extra_beside_scaled_factors(rank):
    """Flags and scales share an element."""

    def run(m, t):
        loss = factors(m, t, 1e5, 1e-6)
        if t.index == 2 and rank.rank == rank.size - 1:
            loss = loss + 0.1 * m.weight.pow(2).sum() + m.bias.sum()
        loss.backward()

    half(rank, linear(), run, expect={"*": "sfb"}, warns=["its gradient came from elsewhere"])


@case
def rows_that_are_rebuilt_on_the_rank(rank):
    """More than one collective takes. The product of rounded factors is rounded once more, so the usual limit holds."""
    module = sys.modules["poseidon_hvd.optimizer"]
    module._MAX_GATHERED_ELEMENTS = 10
    try:
        half(
            rank,
            linear(),
            lambda m, t: factors(m, t, 1e5, 1e-6).backward(),
            expect={"*": "allreduce"},
            times=2,
            steps=3,
            warns=["its gradient came from elsewhere"],
        )
    finally:
        module._MAX_GATHERED_ELEMENTS = None


@case
def autocast_and_wide_calls(rank):
    """From step 1 on some factors are of float16 and travel as they are, wider ones beside them scaled."""

    def run(m, t):
        loss = factors(m, t, 1e5, 1e-6)
        if t.index > 0:
            x = t.x(6, 24, salt=3)
            with torch.autocast("cpu", dtype=torch.float16, enabled=t.kind != "reference"):
                y = m(x)
            loss = loss + y.to(t.dtype).sum()
        loss.backward()

    half(rank, linear(bias=False), run, floor=2 * torch.finfo(torch.float16).eps)


@case(threads=(2,))  # on more ranks the factors of so small a layer are no longer worth it
def policy_time(rank):
    """The default policy, on a network where factors are worth it."""

    def run(m, t):
        factors(m, t, 1e5, 1e-6, rows=3).backward()

    half(rank, linear(), run, policy="time", network=SLOW)


@case
def embedding_rows(rank):
    """What travels is the gradient itself, as in plain Horovod."""
    for scale in (1.0, 1e-6, 1e4):

        def run(m, t):
            (loss_of(m(t.ids(30, 9))) * scale).backward()

        half(rank, Words, run, expect={**ROWS, "head.weight": "sfb"})

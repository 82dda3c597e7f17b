"""A network of sleeping layers: real gradients of the scaled sizes at the published times."""

import time
from collections.abc import Iterator, Sequence

import torch

from bench.replay.schedule import ScaledLayer, Schedule

__all__ = ["Clock", "Replay", "sleep_until"]


class Clock:
    """Where a step stands. Sleeps end at fixed times after the step's begin, so that their errors do not add up and
    what a layer really computes counts into its time.
    """

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.hurry = False  # no sleeping: to warm up
        self._begin = 0.0
        self.backward_ended = 0.0

    def begin(self) -> None:
        self._begin = time.monotonic()

    def after_forward(self, layer: int) -> None:
        self._sleep_until(self.schedule.forward[layer])

    def after_backward(self, layer: int) -> None:
        self._sleep_until(self.schedule.backward[layer])

    def end_backward(self) -> None:
        self.backward_ended = time.monotonic()

    @property
    def late_seconds(self) -> float:
        """How far behind its schedule the last backward pass ended."""
        return self.backward_ended - self._begin - self.schedule.step_seconds

    def _sleep_until(self, offset: float) -> None:
        if not self.hurry:
            sleep_until(self._begin + offset)


def sleep_until(deadline: float) -> None:
    while (left := deadline - time.monotonic()) > 0:
        time.sleep(left)


class _Whole(torch.autograd.Function):
    """A layer whose gradients are reduced whole: they appear when its backward has slept its time."""

    @staticmethod
    def forward(ctx, carrier, replay, index, *parameters):
        ctx.replay, ctx.index = replay, index
        replay.clock.after_forward(index)
        return carrier.view_as(carrier)

    @staticmethod
    def backward(ctx, carrier):
        ctx.replay.clock.after_backward(ctx.index)
        return (carrier, None, None, *ctx.replay.gradients[ctx.index])


class _Enter(torch.autograd.Function):
    """From whatever came before to the input of a fully connected layer."""

    @staticmethod
    def forward(ctx, carrier, replay, index):
        ctx.save_for_backward(carrier)
        return replay.x[index].detach()

    @staticmethod
    def backward(ctx, grad):
        return ctx.saved_tensors[0], None, None


class _Leave(torch.autograd.Function):
    """From a fully connected layer's output on. Its backward sleeps the layer's time *before* the layer's own node
    runs: neither a whole gradient nor factors leave any earlier.
    """

    @staticmethod
    def forward(ctx, y, replay, index):
        ctx.replay, ctx.index = replay, index
        replay.clock.after_forward(index)
        return torch.zeros(1)

    @staticmethod
    def backward(ctx, carrier):
        ctx.replay.clock.after_backward(ctx.index)
        return ctx.replay.d[ctx.index], None, None


class Replay(torch.nn.Module):
    """Calling it replays one forward pass and returns a scalar whose ``backward()`` replays the other.

    Ranks have different rows: rank r multiplies a common x by r + 1 and a common d by 2 r + 1, so that the mean
    gradient is known. Parameters are zeros, which nothing reads but the small real products. A copy for another system
    shares them and the rows.
    """

    def __init__(self, layers: Sequence[ScaledLayer], clock: Clock, rank: int) -> None:
        super().__init__()
        self.layers, self.clock, self._rank = layers, clock, rank
        self.x: list = [None] * len(layers)
        self.d: list = [None] * len(layers)
        self.gradients: list = [()] * len(layers)
        self.weights = torch.nn.ModuleList()
        for index, layer in enumerate(layers):
            module = torch.nn.Module()
            for number, elements in enumerate(layer.tensors):
                module.register_parameter(f"tensor{number}", torch.nn.Parameter(torch.zeros(elements)))
            self.gradients[index] = tuple(torch.full((elements,), float(rank + 1)) for elements in layer.tensors)
            if layer.rows:
                module = torch.nn.utils.skip_init(torch.nn.Linear, layer.in_features, layer.out_features)
                with torch.no_grad():
                    module.weight.data, module.bias.data = (
                        torch.zeros_like(module.weight),
                        torch.zeros_like(module.bias),
                    )
                x, d = _common_rows(layer, index)
                self.x[index], self.d[index] = x * (rank + 1), d * (2 * rank + 1)
            self.weights.append(module)

    def sharing(self, clock: Clock) -> "Replay":
        """Another model with parameters, and gradients, of its own over the same memory for parameters and rows."""
        other = Replay.__new__(Replay)
        torch.nn.Module.__init__(other)
        other.layers, other.clock, other._rank = self.layers, clock, self._rank
        other.x, other.d, other.gradients = self.x, self.d, self.gradients
        other.weights = torch.nn.ModuleList()
        for module in self.weights:
            twin = (
                torch.nn.Module()
                if not isinstance(module, torch.nn.Linear)
                else torch.nn.utils.skip_init(torch.nn.Linear, module.in_features, module.out_features)
            )
            for name, parameter in module.named_parameters():
                twin.register_parameter(name, torch.nn.Parameter(parameter.detach()))
            other.weights.append(twin)
        return other

    def forward(self) -> torch.Tensor:
        self.clock.begin()
        carrier = torch.zeros(1, requires_grad=True)
        carrier.register_hook(self._end_backward)
        for index, (layer, module) in enumerate(zip(self.layers, self.weights)):
            if layer.rows:
                carrier = _Leave.apply(module(_Enter.apply(carrier, self, index)), self, index)
            else:
                carrier = _Whole.apply(carrier, self, index, *module.parameters())
        return carrier.sum()

    def _end_backward(self, _grad: torch.Tensor) -> None:
        self.clock.end_backward()

    def wrong_gradients(self, ranks: int) -> Iterator[str]:
        """Parameters whose gradient is not the mean over ``ranks``.

        Linear weights are probed with a vector, not multiplied out.
        """
        scale = sum((r + 1) * (2 * r + 1) for r in range(ranks)) / ranks
        bias_scale = sum(2 * r + 1 for r in range(ranks)) / ranks
        for index, (layer, module) in enumerate(zip(self.layers, self.weights)):
            for name, parameter in module.named_parameters():
                got = parameter.grad.double()
                if not layer.rows:
                    expected = torch.full_like(got, (ranks + 1) / 2)
                else:
                    x, d = (rows.double() for rows in _common_rows(layer, index))
                    probe = torch.linspace(-1, 1, layer.in_features, dtype=torch.float64)
                    expected = bias_scale * d.sum(0) if name == "bias" else scale * (d.t() @ (x @ probe))
                    got = got if name == "bias" else got @ probe
                error = (got - expected).norm() / expected.norm()
                if not error < 1e-5:
                    yield f"{layer.name}.{name}: off by {error:.1e}"


def _common_rows(layer: ScaledLayer, index: int):
    generator = torch.Generator().manual_seed(1000 + index)
    x = torch.rand(layer.rows, layer.in_features, generator=generator) + 0.5
    return x, torch.rand(layer.rows, layer.out_features, generator=generator) / layer.rows

"""The arithmetic of a scale model: sizes, times, bandwidth. Pure functions; no torch."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Optional

from bench.cluster.shaping import parse_rate
from bench.replay.architectures import Layer
from bench.replay.networks import Network

__all__ = [
    "Scale",
    "ScaledLayer",
    "Schedule",
    "flops_per_second",
    "link_bits",
    "rebuild_seconds",
    "scaled_layers",
    "schedule",
]

_EQUIVALENT = "-equivalent"


@dataclasses.dataclass(frozen=True)
class Scale:
    """Features and rows are divided by ``size``, so bytes by its square; the clock runs ``dilation`` times slower."""

    size: int
    dilation: float

    @property
    def bytes(self) -> int:
        return self.size * self.size

    def rate(self, bits: float) -> float:
        """Bandwidth of the model's link, bits per second."""
        return bits / self.bytes / self.dilation

    def environment(self) -> dict[str, str]:
        """Horovod's settings in the model's units: its cycle is a time, its fusion threshold a size."""
        return {"HOROVOD_CYCLE_TIME": f"{self.dilation:g}", "HOROVOD_FUSION_THRESHOLD": str((128 << 20) // self.bytes)}

    @property
    def ddp_bucket_mb(self) -> float:
        return 25 / self.bytes


def link_bits(text: str) -> Optional[int]:
    """Bits per second of the link that is modelled: "10gbit" or "10gbit-equivalent". None: unshaped."""
    text = text.strip().lower()
    if text.endswith(_EQUIVALENT):
        text = text[: -len(_EQUIVALENT)]
    if (
        text.endswith("gbit") and text[:-4].isdigit()
    ):  # may exceed what a link of the cluster can be, as it is divided first
        return int(text[:-4]) * 1_000_000_000
    return parse_rate(text)


@dataclasses.dataclass(frozen=True)
class ScaledLayer:
    """What a rank really allocates.

    ``rows`` is of one rank and step; 0 and no features for a layer that is not linear.
    """

    name: str
    tensors: tuple[int, ...]
    out_features: int = 0
    in_features: int = 0
    rows: int = 0


def scaled_layers(network: Network, scale: Scale) -> list[ScaledLayer]:
    return [_scaled(layer, network.batch, scale) for layer in network.layers()]


def _scaled(layer: Layer, batch: int, scale: Scale) -> ScaledLayer:
    tensors = tuple(_divided(n, scale.bytes) for n in layer.tensors)
    fc = layer.linear
    if fc is None:
        return ScaledLayer(layer.name, tensors)
    rows = _divided(batch * fc.rows, scale.size)
    return ScaledLayer(
        layer.name, tensors, _divided(fc.out_features, scale.size), _divided(fc.in_features, scale.size), rows
    )


def _divided(value: int, by: int) -> int:
    return max(1, round(value / by))


@dataclasses.dataclass(frozen=True)
class Schedule:
    """When each layer ends, in seconds after the step began, on the dilated clock."""

    forward: tuple[float, ...]
    backward: tuple[float, ...]  # by layer index, so it falls with the index

    @property
    def step_seconds(self) -> float:
        return self.backward[0]


def schedule(network: Network, scale: Scale, extra_backward: Optional[Mapping[int, float]] = None) -> Schedule:
    """The published step time of one node, spread over layers by their multiply-adds.

    Backward counts twice the multiply-adds of forward (input and weight gradient), in the first layer once: nothing
    needs the gradient of the data. ``extra_backward``: seconds, not dilated, that layers take longer.
    """
    layers = network.layers()
    forward = [layer.macs for layer in layers]
    backward = [macs * (1 if i == 0 else 2) for i, macs in enumerate(forward)]
    second = network.step_seconds * scale.dilation / (sum(forward) + sum(backward))
    extra = {i: seconds * scale.dilation for i, seconds in (extra_backward or {}).items()}
    forward_ends = _running(macs * second for macs in forward)
    order = range(len(layers) - 1, -1, -1)
    ends = _running((backward[i] * second + extra.get(i, 0.0) for i in order), forward_ends[-1])
    return Schedule(tuple(forward_ends), tuple(reversed(ends)))


def _running(values, start: float = 0.0) -> list[float]:
    ends = []
    for value in values:
        start += value
        ends.append(start)
    return ends


def flops_per_second(network: Network) -> float:
    """What the published processor delivers on this network."""
    macs: Sequence[float] = [layer.macs for layer in network.layers()]
    return 2 * network.batch * (3 * sum(macs) - macs[0]) / network.step_seconds


def rebuild_seconds(network: Network, layer: Layer, ranks: int) -> float:
    """What the published processor would need to rebuild a gradient from all ranks' factors, less the local product
    that it replaces.
    """
    fc = layer.linear
    if fc is None:
        return 0.0
    return 2.0 * network.batch * fc.rows * (ranks - 1) * fc.out_features * fc.in_features / flops_per_second(network)

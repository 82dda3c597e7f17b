"""The grid of ``bench.selector``: single layers, batches, numbers of ranks and links; what of it a machine can do,
and a sample of that.
"""

import collections
import dataclasses
import functools
import itertools
import random
from collections.abc import Iterable, Sequence
from typing import Any, Optional

from bench.cluster.shaping import parse_rate
from poseidon_hvd._native import _C

__all__ = [
    "LAYERS",
    "MOST_ROUNDS",
    "RANKS",
    "RATES",
    "ROWS",
    "SCHEMES",
    "Cell",
    "grid",
    "reason_to_leave_out",
    "sample",
]

SCHEMES = ("allreduce", "sfb")
LAYERS: tuple[tuple[int, int], ...] = (
    *((width, width) for width in (64, 128, 256, 512, 1024, 2048, 4096, 8192)),
    (1000, 4096),
    (4096, 1024),
    (256, 4096),
)
ROWS = (1, 8, 32, 128, 512)
RANKS = (2, 4, 8)
MOST_ROUNDS = 60
RATES = ("50mbit", "200mbit", "1000mbit", "unshaped")

# Rough, for limits and the expected duration only: one core on 4096 x 4096 products of 32 rows
# (bench/results/sfb_layer.json, "none").
_FLOPS_PER_CORE = 40e9
_UNSHAPED_BYTES_PER_SECOND = 3e8  # of one of several ranks on two cores
_PROCESS_BYTES = 400e6  # Python, torch, Horovod


@dataclasses.dataclass(frozen=True)
class Cell:
    """One layer on one network.

    Attributes:
        outputs: M of the M x N weight.
        inputs: N.
        rows: per rank and step, K.
        ranks: P, one a host.
        rate: of each link, or unshaped.
    """

    outputs: int
    inputs: int
    rows: int
    ranks: int
    rate: str

    @property
    def layer(self) -> str:
        return f"{self.outputs} x {self.inputs}"

    def __str__(self) -> str:
        return f"{self.layer}, {self.rows} rows, {self.ranks} ranks, {self.rate}"

    @property
    def wire_bytes(self) -> dict[str, float]:
        """Scheme -> bytes that a rank sends for the weight per step (docs/sfb.md)."""
        return {scheme: self._offers[scheme]["sent_bytes"] for scheme in SCHEMES}

    @functools.cached_property
    def _offers(self) -> dict[str, dict[str, Any]]:
        """Scheme -> what it would take, as the selector counts it."""
        weight = _C.model.Tensor("weight", [self.outputs, self.inputs], kind="linear", rows=self.rows * self.ranks)
        return {offer["scheme"]: offer for offer in _C.model.offers(weight, ranks=self.ranks)}

    def network_seconds(self, scheme: str) -> float:
        """Bytes over rate; 0 for unshaped links."""
        bits = parse_rate(self.rate)
        return 0.0 if bits is None else 8 * self.wire_bytes[scheme] / bits

    def compute_seconds(self, scheme: str, cores: int) -> float:
        """Of a step's products on all ranks, which share the cores: with SFB every rank multiplies the rows of all."""
        products = 3 if scheme == "allreduce" else 2 + self.ranks
        return 2 * self.rows * self.outputs * self.inputs * products * self.ranks / (cores * _FLOPS_PER_CORE)

    @property
    def memory_bytes(self) -> float:
        """Of all ranks: the weight, three systems' gradients and a temporary one; rows of two systems."""
        weight, gathered = self._offers["allreduce"]["bytes"], self._offers["sfb"]["memory_bytes"]
        return self.ranks * (_PROCESS_BYTES + 5 * weight + 2 * (1 + 2 / self.ranks) * gathered)

    def expected_seconds(self, budget: float, cores: int) -> float:
        """Very roughly, how long ``bench.selector`` takes for the cell.

        Supposed: two seconds for what the policy measures, and five dense steps until its plan stands.
        """
        overhead = 0.01 * self.ranks
        step = {
            scheme: overhead
            + self.network_seconds(scheme)
            + self.compute_seconds(scheme, cores)
            + self.wire_bytes[scheme] * self.ranks / 2 / _UNSHAPED_BYTES_PER_SECOND
            for scheme in SCHEMES
        }
        timed = step["allreduce"] + step["sfb"] + min(step.values())
        warmup = 2 + 5 * step["allreduce"] + 4 * (step["allreduce"] - self.network_seconds("allreduce"))
        return 0.3 * self.ranks + warmup + max(timed, min(budget, MOST_ROUNDS * timed))


def grid(
    layers: Iterable[tuple[int, int]] = LAYERS,
    rows: Iterable[int] = ROWS,
    ranks: Iterable[int] = RANKS,
    rates: Iterable[str] = RATES,
) -> list[Cell]:
    """Every combination."""
    return [Cell(m, n, k, p, rate) for p, rate, (m, n), k in itertools.product(ranks, rates, layers, rows)]


def reason_to_leave_out(cell: Cell, *, limit_seconds: float, memory_bytes: float, cores: int) -> Optional[str]:
    """Why a cell is not measured, None if it can be.

    Args:
        cell: of the grid.
        limit_seconds: a step's allreduce on the links, or a step's products on the cores, may take so long.
        memory_bytes: that all ranks together may take.
        cores: that all ranks share.
    """
    network = cell.network_seconds("allreduce")
    if network > limit_seconds:
        return f"its allreduce is {network:.0f} s of {cell.rate}"
    compute = max(cell.compute_seconds(scheme, cores) for scheme in SCHEMES)
    if compute > limit_seconds:
        return f"its products are about {compute:.0f} s on {cores} cores"
    if cell.memory_bytes > memory_bytes:
        return f"its ranks take about {cell.memory_bytes / 2**30:.0f} GiB"
    return None


def sample(cells: Sequence[Cell], count: int, seed: int = 0) -> list[Cell]:
    """``count`` cells, spread evenly: over pairs of ranks and rate first, then over pairs of layer and rows, then over
    each within a pair.

    The same for the same arguments, and nearly the same where a few cells more are left out. Returned in the order of
    ``cells``.
    """
    order = sorted(cells, key=lambda cell: random.Random(f"{seed}: {cell}").random())
    taken: list[Cell] = []
    counts: dict[tuple, int] = collections.Counter()

    def keys(cell):
        network = cell.ranks, cell.rate
        return (network,), (cell.layer, cell.rows), (network, cell.layer), (network, cell.rows)

    while order and len(taken) < count:
        best = min(order, key=lambda cell: [counts[key] for key in keys(cell)])  # the first of equals: order is random
        order.remove(best)
        taken.append(best)
        counts.update(keys(best))
    chosen = set(taken)
    return [cell for cell in cells if cell in chosen]

"""A against B: two result files of one bench, system by system.

    python -m bench.compare bench/results/before.json bench/results/after.json

Works on every file with ``seconds_per_step`` (bench/results.py). The ratio is B's median over A's: below 1, B is
faster. Where both files keep single steps, a bootstrap gives the range that holds the ratio in 95 of 100 redraws of
these steps; it knows nothing of what changed on the machine between the two files.
"""

import argparse
import dataclasses
import json
import pathlib
import sys
from typing import Any, Optional

import numpy as np

REDRAWS = 2000


@dataclasses.dataclass(frozen=True)
class Row:
    """One system in both files; times in seconds."""

    system: str
    a: dict[str, float]
    b: dict[str, float]
    ratio: float
    interval: Optional[tuple[float, float]]

    @property
    def verdict(self) -> str:
        if self.interval is None:
            apart = self.a["p90"] < self.b["p10"] or self.b["p90"] < self.a["p10"]
        else:
            apart = not self.interval[0] <= 1 <= self.interval[1]
        return "no difference seen" if not apart else "B faster" if self.ratio < 1 else "B slower"


def compare(a: dict[str, Any], b: dict[str, Any]) -> list[Row]:
    """The systems that both results have, in A's order.

    Raises:
        ValueError: there is none.
    """
    rows = []
    for system, timing in a["seconds_per_step"].items():
        if system in b["seconds_per_step"]:
            other = b["seconds_per_step"][system]
            samples = [result.get("samples", {}).get(system) for result in (a, b)]
            rows.append(
                Row(
                    system,
                    timing,
                    other,
                    other["median"] / timing["median"],
                    _interval(*samples) if all(samples) else None,
                )
            )
    if not rows:
        raise ValueError(
            f"no system in common: {', '.join(a['seconds_per_step'])} against {', '.join(b['seconds_per_step'])}"
        )
    return rows


def differences(a: dict[str, Any], b: dict[str, Any]) -> list[tuple[str, Any, Any]]:
    """(what, in A, in B) of settings and environment: each is another explanation for a ratio."""
    found = []
    for part in ("settings", "environment"):
        left, right = a.get(part, {}), b.get(part, {})
        found += [
            (key, left.get(key), right.get(key))
            for key in dict.fromkeys([*left, *right])
            if left.get(key) != right.get(key)
        ]
    return found


def _interval(a: list[float], b: list[float]) -> tuple[float, float]:
    generator = np.random.default_rng(0)

    def medians(values):
        return np.median(generator.choice(np.asarray(values), (REDRAWS, len(values))), axis=1)

    low, high = np.percentile(medians(b) / medians(a), (2.5, 97.5))
    return float(low), float(high)


def _load(path: pathlib.Path) -> dict[str, Any]:
    try:
        result = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise SystemExit(f"bench.compare: {path}: {error}") from None
    if "seconds_per_step" not in result:
        raise SystemExit(
            f"bench.compare: {path} holds no seconds_per_step: it is no result of a bench that times steps."
        )
    return result


def main() -> None:
    from rich.console import Console
    from rich.table import Table

    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="python -m bench.compare", description=__doc__, formatter_class=formatter)
    parser.add_argument("a", type=pathlib.Path)
    parser.add_argument("b", type=pathlib.Path)
    args = parser.parse_args()
    a, b = _load(args.a), _load(args.b)
    try:
        rows = compare(a, b)
    except ValueError as error:
        raise SystemExit(f"bench.compare: {error}") from None
    console = Console(width=None if sys.stdout.isatty() else 120)
    table = Table(title=f"A {args.a.name}, B {args.b.name}: seconds per step")
    table.add_column("system")
    for column in ("A median", "p10", "p90", "steps", "B median", "p10", "p90", "steps", "B / A", "95% range", ""):
        table.add_column(column, justify="right")
    for row in rows:
        cells = [
            cell
            for t in (row.a, row.b)
            for cell in (*(f"{t[key]:.4f}" for key in ("median", "p10", "p90")), str(t["count"]))
        ]
        interval = "-" if row.interval is None else f"{row.interval[0]:.3f} to {row.interval[1]:.3f}"
        table.add_row(row.system, *cells, f"{row.ratio:.3f}", interval, row.verdict)
    console.print(table)
    for what, left, right in differences(a, b):
        console.print(f"differs: {what}: A {left}, B {right}", markup=False, highlight=False)


if __name__ == "__main__":
    main()

"""What a choice of scheme cost against the best one: figures, tables and picture of ``bench.selector``.

A record is what was measured of a cell: the fields of ``cells.Cell``; ``seconds``, scheme -> median of a step with that
scheme forced; ``predicted_seconds``, scheme -> what the plan thought the weight's exchange alone would cost, or None;
and ``chosen``, the scheme that the policy took.
"""

import dataclasses
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from bench.cells import SCHEMES, Cell

__all__ = ["CLOSE", "GOOD", "judge", "summary", "tables", "draw"]

GOOD = 1.10  # a regret that is not worth mentioning
CLOSE = 1.05  # schemes whose times differ by less are equal here
Record = Mapping[str, Any]


def cell_of(record: Record) -> Cell:
    return Cell(**{field.name: record[field.name] for field in dataclasses.fields(Cell)})


def judge(record: Record) -> dict[str, Any]:
    """The record with its verdict.

    Returns:
        Also ``best``, the faster scheme; ``regret``, the chosen one's time over its; ``near_tie``, whether the two are
        within 5%; and ``sfb_gain``, how many times faster SFB is than allreduce.
    """
    seconds = record["seconds"]
    best = min(seconds, key=seconds.__getitem__)
    return {
        **record,
        "best": best,
        "regret": seconds[record["chosen"]] / seconds[best],
        "near_tie": max(seconds.values()) <= CLOSE * seconds[best],
        "sfb_gain": seconds["allreduce"] / seconds["sfb"],
    }


def _choices(record: Record, policy: str) -> dict[str, str]:
    """What the policy took, and what simpler rules would have."""
    sent = cell_of(record).wire_bytes
    rules = {
        "bytes": "sfb" if sent["sfb"] <= sent["allreduce"] else "allreduce",
        **{f"always {scheme}": scheme for scheme in SCHEMES},
    }
    rules.pop(policy, None)
    return {policy: record["chosen"], **rules}


def summary(judged: Sequence[Record], policy: str) -> dict[str, Any]:
    """Over all cells.

    Returns:
        ``rules``, the policy and simpler rules by the same measurements -> share of cells with a regret of at most
        1.10, median, mean and worst regret, and where; ``confusion``, chosen -> cells in which allreduce, SFB or
        neither was faster; ``predicted_of_measured``, percentiles of the plan's time per step over the measured one,
        where plans predict.
    """
    rules = {}
    for rule in _choices(judged[0], policy):
        regrets = [r["seconds"][_choices(r, policy)[rule]] / r["seconds"][r["best"]] for r in judged]
        worst = int(np.argmax(regrets))
        rules[rule] = {
            "within_10_percent": float(np.mean([r <= GOOD for r in regrets])),
            "median": float(np.median(regrets)),
            "mean": float(np.mean(regrets)),
            "worst": float(regrets[worst]),
            "worst_cell": str(cell_of(judged[worst])),
        }
    confusion = {chosen: dict.fromkeys((*SCHEMES, "near_tie"), 0) for chosen in SCHEMES}
    for r in judged:
        confusion[r["chosen"]]["near_tie" if r["near_tie"] else r["best"]] += 1
    ratios = [
        r["predicted_step_seconds"] / r["policy_seconds"] for r in judged if r.get("predicted_step_seconds") is not None
    ]
    percentiles = {f"p{p}": float(np.percentile(ratios, p)) for p in (10, 50, 90)} if ratios else None
    return {"cells": len(judged), "rules": rules, "confusion": confusion, "predicted_of_measured": percentiles}


def tables(judged: Sequence[Record], totals: Mapping[str, Any], policy: str) -> list[Any]:
    """Every cell; then the rules; then what was chosen against what was best."""
    from rich.table import Table

    right = {"justify": "right"}
    cells = Table(
        title=f"Single layers, ms per step of the slowest rank: schemes forced, and what policy {policy} took"
    )
    measured = [column for scheme in SCHEMES for column in (scheme, "cost by plan")]
    for column in ("ranks", "link", "layer", "rows", *measured, "best", "chosen", "regret"):
        cells.add_column(column, **({} if column in ("link", "best", "chosen") else right))
    for r in judged:
        seconds = [each[scheme] for scheme in SCHEMES for each in (r["seconds"], r["predicted_seconds"])]
        cells.add_row(
            str(r["ranks"]),
            r["rate"],
            cell_of(r).layer,
            str(r["rows"]),
            *("-" if s is None else f"{1e3 * s:.1f}" for s in seconds),
            f"{r['best']} (close)" if r["near_tie"] else r["best"],
            r["chosen"],
            f"{r['regret']:.2f}",
        )
    rules = Table(title=f"Regret of each rule over {totals['cells']} cells: its scheme's time over the better scheme's")
    for column in ("rule", "within 1.10", "median", "mean", "worst", "in"):
        rules.add_column(column, **({} if column in ("rule", "in") else right))
    for rule, t in totals["rules"].items():
        ratios = (f"{t[key]:.2f}" for key in ("median", "mean", "worst"))
        rules.add_row(rule, f"{100 * t['within_10_percent']:.0f}%", *ratios, t["worst_cell"])
    confusion = Table(title="Cells, chosen against best")
    confusion.add_column("chosen")
    for column in (*(f"best {scheme}" for scheme in SCHEMES), "within 5%"):
        confusion.add_column(column, **right)
    for chosen, counts in totals["confusion"].items():
        confusion.add_row(chosen, *(str(counts[key]) for key in (*SCHEMES, "near_tie")))
    return [cells, rules, confusion]


def draw(
    judged: Sequence[Record], left_out: Sequence[Record], policy: str, path: pathlib.Path, footnote: str
) -> pathlib.Path:
    """A map for every number of ranks and link: layers by rows, coloured by SFB's gain, marked with what was chosen."""
    from bench.plots import HeatMap, heat_maps

    cells = [cell_of(r) for r in (*judged, *left_out)]
    ranks, rates = (list(dict.fromkeys(getattr(cell, key) for cell in cells)) for key in ("ranks", "rate"))
    layers = sorted({(cell.outputs * cell.inputs, cell.layer) for cell in cells})
    rows = sorted({cell.rows for cell in cells})
    maps = {}
    for p in ranks:
        for rate in rates:
            here = {(cell_of(r).layer, r["rows"]): r for r in judged if (r["ranks"], r["rate"]) == (p, rate)}
            maps[rate, p] = HeatMap(
                f"{p} ranks, {rate}",
                values={at: float(np.log2(r["sfb_gain"])) for at, r in here.items()},
                marks={at: r["chosen"][0].upper() for at, r in here.items()},
                framed={at for at, r in here.items() if r["regret"] > GOOD},
                absent={(cell_of(r).layer, r["rows"]) for r in left_out if (r["ranks"], r["rate"]) == (p, rate)},
            )
    return heat_maps(
        path,
        f"Policy {policy}: which scheme is faster, and which was chosen\n"
        f"(A allreduce, S SFB; framed: regret above {GOOD:.2f})",
        [[maps[rate, p] for p in ranks] for rate in rates],
        ys=[layer for _, layer in layers],
        xs=rows,
        label="time of allreduce / time of SFB",
        xlabel="rows per rank",
        footnote=footnote,
    )

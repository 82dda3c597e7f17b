"""From what the ranks measured to speedups, tables and a picture.

All times are divided by the dilation, all bytes multiplied back.
"""

import pathlib
from typing import Any, Optional

import numpy as np

from bench import results
from bench.replay.networks import Network
from bench.replay.schedule import Scale
from bench.replay.timeline import MARKS

__all__ = ["draw", "evaluate", "print_tables"]

STAGES = ("pack", "queue", "wire", "handoff", "rebuild", "waited")


def evaluate(network: Network, scale: Scale, hosts: int, bits: Optional[int], raw: dict[str, Any]) -> dict[str, Any]:
    """Per system: step time, speedup, where the time beyond the schedule went, bytes.

    ``step_seconds`` is that of the slowest rank. ``late_seconds``: how late the slowest rank's last layer ended its
    backward, which is processor contention here and not communication. ``exposed_seconds``: the rest beyond the
    schedule.
    """
    found = {}
    for name, by_rank in raw["blocks"].items():
        steps, late = [], []
        for blocks in zip(*by_rank):
            steps.append(np.diff(np.max([block["ends"] for block in blocks], axis=0)))
            late.append(np.max([block["late"] for block in blocks], axis=0))
        step = np.concatenate(steps) / scale.dilation
        late = np.concatenate(late) / scale.dilation
        own = raw["schedule_seconds"][name] / scale.dilation
        sent = [block["sent"] for blocks in by_rank for block in blocks]
        bytes_sent = None
        if None not in sent:
            bytes_sent = float(np.sum(sent)) / len(by_rank) / len(step) * scale.bytes
        median = float(np.median(step))
        found[name] = {
            "step_seconds": results.summary(step),
            "samples": [float(value) for value in step],
            "speedup": float(hosts * network.step_seconds / median),
            "speedup_p10": float(hosts * network.step_seconds / np.percentile(step, 90)),
            "speedup_p90": float(hosts * network.step_seconds / np.percentile(step, 10)),
            "charged_seconds": own - network.step_seconds,
            "late_seconds": float(np.median(late)),
            "exposed_seconds": float(np.median(step - own - late)),
            "sent_bytes_per_rank": bytes_sent,
            "link_busy": None if bits is None or bytes_sent is None else 8 * bytes_sent / (bits * float(np.mean(step))),
        }
        stages = _stages(by_rank, scale, len(step))
        if stages:
            found[name]["stages"] = stages
    if "none" in found:
        for entry in found.values():
            entry["of_none"] = entry["speedup"] / found["none"]["speedup"]
    return found


def _stages(by_rank: list[list[dict[str, Any]]], scale: Scale, steps: int) -> Optional[dict[str, Any]]:
    """Seconds per step, mean over ranks and maximum over ranks, of each stage of each scheme of
    ``optimizer.stats()``.
    """
    if by_rank[0][0]["before"] is None:
        return None

    def per_rank(pick):
        totals = [sum(pick(block["after"]) - pick(block["before"]) for block in blocks) for blocks in by_rank]
        return {
            "mean": float(np.mean(totals)) / steps / scale.dilation,
            "max": float(np.max(totals)) / steps / scale.dilation,
        }

    found: dict[str, Any] = {"synchronize": per_rank(lambda stats: stats["synchronize_seconds"])}
    for scheme in ("allreduce", "sfb"):
        found[scheme] = {
            stage: per_rank(lambda stats, s=scheme, key=f"{stage}_seconds": stats["schemes"][s][key])
            for stage in STAGES
        }
    return found


def print_tables(
    title: str, network: Network, hosts: int, found: dict[str, Any], tails: dict[str, Any], *, width: int = 140
) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    console = Console(width=width)
    table = Table(title=f"{title}: speedup over one node")
    for column in (
        "system",
        "step s",
        "p10",
        "p90",
        f"of {hosts}",
        "p10",
        "p90",
        "of none",
        "late ms",
        "exposed ms",
        "MB sent",
        "link busy",
    ):
        table.add_column(column, justify="left" if column == "system" else "right")
    for name, e in found.items():
        s = e["step_seconds"]
        sent = "-" if e["sent_bytes_per_rank"] is None else f"{e['sent_bytes_per_rank'] / 1e6:.0f}"
        busy = "-" if e["link_busy"] is None else f"{100 * e['link_busy']:.0f}%"
        of_none = f"{e['of_none']:.3f}" if "of_none" in e else "-"
        table.add_row(
            name,
            f"{s['median']:.3f}",
            f"{s['p10']:.3f}",
            f"{s['p90']:.3f}",
            f"{e['speedup']:.2f}",
            f"{e['speedup_p10']:.2f}",
            f"{e['speedup_p90']:.2f}",
            of_none,
            f"{1e3 * e['late_seconds']:.1f}",
            f"{1e3 * e['exposed_seconds']:.1f}",
            sent,
            busy,
        )
    console.print(table)
    if network.published:
        published = Table(title="Published")
        for column in ("system", "nodes", "link", "speedup", "of nodes", "source"):
            published.add_column(column, justify="left" if column in ("system", "source") else "right")
        for p in network.published:
            published.add_row(
                p.system,
                str(p.nodes),
                p.link,
                f"{p.speedup:.1f}",
                f"{100 * p.speedup / p.nodes:.1f}%",
                escape(p.source),
            )
        console.print(published)
    profiled = {name: e["stages"] for name, e in found.items() if "stages" in e}
    if profiled:
        stages = Table(
            title="Stages of optimizer.stats(), ms per step summed over tensors, mean of ranks; exchanges overlap"
        )
        for column in ("system", "scheme", *STAGES, "synchronize"):
            stages.add_column(column, justify="left" if column in ("system", "scheme") else "right")
        for name, e in profiled.items():
            for scheme in ("allreduce", "sfb"):
                cells = [f"{1e3 * e[scheme][stage]['mean']:.1f}" for stage in STAGES]
                stages.add_row(name, scheme, *cells, f"{1e3 * e['synchronize']['mean']:.1f}")
        console.print(stages)
    if any(tails.values()):
        table = Table(
            title="How a step ends on rank 0: first layer's tensors in Horovod's timeline, "
            "ms after backward, of some extra steps"
        )
        for column in ("system", *MARKS):
            table.add_column(column.replace("_", " "), justify="left" if column == "system" else "right")
        for name, tail in tails.items():
            if tail:
                table.add_row(name, *(f"{1e3 * tail[mark]:.1f}" for mark in MARKS))
        console.print(table)


def draw(path: pathlib.Path, title: str, network: Network, hosts: int, found: dict[str, Any]) -> None:
    """Bars: efficiency (speedup over number of nodes) measured here, and published, whose node counts may differ."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    bars = [
        (name, 100 * e["speedup"] / hosts, f"{e['speedup']:.2f} of {hosts}", "tab:blue") for name, e in found.items()
    ]
    bars += [
        (f"{p.system}, {p.nodes} x {p.link}", 100 * p.speedup / p.nodes, f"{p.speedup:.1f} of {p.nodes}", "tab:gray")
        for p in network.published
    ]
    figure, axes = pyplot.subplots(figsize=(8, 0.9 + 0.42 * len(bars)), layout="constrained")
    places = range(len(bars))[::-1]
    axes.barh(list(places), [value for _, value, _, _ in bars], color=[colour for *_, colour in bars])
    for place, e in zip(places, found.values()):
        low, high = (100 * e[key] / hosts for key in ("speedup_p10", "speedup_p90"))
        axes.plot([low, high], [place, place], color="black", linewidth=1.5)
    for place, (_, value, text, _) in zip(places, bars):
        axes.text(
            value - 1 if value > 25 else value + 1,
            place,
            text,
            ha="right" if value > 25 else "left",
            va="center",
            fontsize=9,
            color="white" if value > 25 else "black",
        )
    axes.set_yticks(list(places), [name for name, *_ in bars])
    axes.axvline(100, color="black", linewidth=0.8, linestyle=":")
    axes.set_xlim(0, 103)
    axes.set_xlabel("speedup over one node, % of nodes (blue: this replay with p10 to p90; gray: published)")
    axes.set_title(title, fontsize=10)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)

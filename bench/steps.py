"""Steps of several systems by turns: what a rank does, and how its figures are told.

Shared by the benches that train a model.
"""

import faulthandler
import os
import pathlib
import sys
from collections.abc import Mapping, Sequence
from typing import Any, Callable, Optional

import numpy as np

from bench import results

__all__ = ["begin", "figures", "measure", "publish"]

TOLERANCE = 1e-5  # sums of fp32 in another order; 1e-7 on the MLP
CELL = {"justify": "right"}


# ---- Rank


def begin(args) -> tuple[Any, int, Callable]:
    """Starts Horovod and builds what is trained: the same weights on all ranks, another batch on each.

    Args:
        args: ``model``, ``rows``, ``scale``, ``threads``, ``timeout``; see ``bench.train``.

    Returns:
        The model, rows of a rank's batch, and ``loss_of`` for ``System.run``.
    """
    import torch

    import poseidon_hvd as hvd
    from bench import models

    faulthandler.dump_traceback_later(args.timeout, exit=True)
    torch.set_num_threads(args.threads)
    hvd.init()
    workload = models.build(args.model)
    rows = models.rows_of(workload, args.rows, args.scale)
    torch.manual_seed(0)
    model = workload.make_model()
    torch.manual_seed(1 + hvd.rank())
    inputs, target = workload.make_batch(rows, args.scale)

    def loss_of(forward):
        return workload.loss(forward(*inputs), target)

    return model, rows, loss_of


def measure(built, model, loss_of: Callable, args, references: Sequence[str]) -> Optional[dict[str, Any]]:
    """Warms up, checks every gradient, then times.

    Args:
        built: the systems; see ``bench.systems``.
        model: whose parameters they share.
        loss_of: as for ``System.run``.
        args: ``steps``, rounds to time; ``local``, whether counters of bytes would say nothing.
        references: as for ``figures``.

    Returns:
        On rank 0 what a result file holds beside its settings, None on the others.

    Raises:
        SystemExit: an exact system is not exact; nothing is timed.
    """
    import poseidon_hvd as hvd
    from bench import systems
    from bench.cluster.counters import read_local

    load = os.getloadavg()[0]
    warmup = {system.name: systems.warm_up(system, loss_of) for system in built}
    errors = _check(built, model, loss_of)

    def after_round(number, samples):
        if hvd.rank() == 0:
            print(
                f"round {number}/{args.steps}:",
                ", ".join(f"{name} {s.seconds[-1]:.3f} s" for name, s in samples.items()),
                flush=True,
            )

    def sent():
        counters = None if args.local else read_local()
        return None if counters is None else counters[0]

    idle = hvd.allgather_object(systems.idle_cpu_share(), name="bench.idle")
    mine = systems.interleave(built, loss_of, args.steps, bytes_sent=sent, after_round=after_round)
    ranks = hvd.allgather_object(mine, name="bench.samples")
    if hvd.rank() != 0:
        return None
    found = figures(ranks, references)
    tensors = [p.numel() for p in model.parameters()]
    return {
        "environment": {**results.environment(), "load_average_before": load},
        "ranks": hvd.size(),
        "parameters": sum(tensors),
        "tensors": len(tensors),
        "gradient_error": errors,
        "warmup_steps": warmup,
        "idle_cores": sum(idle),
        "lossy": [system.name for system in built if system.lossy],
        **found,
        "predicted": _predicted(built, found["seconds_per_step"]),
        "plans": {
            s.name: s.optimizer.scheme_report().splitlines() for s in built if hasattr(s.optimizer, "scheme_report")
        },
    }


def _check(built, model, loss_of) -> dict[str, float]:
    """Each system's gradient error against Horovod's.

    Raises:
        SystemExit: an exact system is not exact; nothing is timed.
    """
    from bench import systems

    communicating = [system for system in built if system.name != "none"]
    expected = next((system for system in communicating if system.name == "horovod"), None)
    if expected is None and communicating:
        expected = systems.BUILDERS["horovod"](systems.share_parameters(model))
        expected.run(loss_of)
    errors = {
        system.name: systems.gradient_error(system, expected.model)
        for system in communicating
        if system is not expected
    }
    for system in communicating:
        if not system.lossy and not errors.get(system.name, 0.0) <= TOLERANCE:
            raise SystemExit(
                f"{system.name}: gradient differs from Horovod's by {errors[system.name]:.1e}; nothing is timed."
            )
    return errors


def figures(ranks, references: Sequence[str]) -> dict[str, Any]:
    """From every rank's samples: a step takes as long as its slowest rank, all else is the mean over ranks.

    Args:
        ranks: for each rank, name of a system -> ``systems.Samples``.
        references: systems that all are compared to, where they were timed.
    """
    names = list(ranks[0])
    times = {name: np.array([rank[name].seconds for rank in ranks]) for name in names}
    slowest = {name: time.max(axis=0) for name, time in times.items()}

    def mean(values):
        values = list(values)
        return None if None in values else float(np.mean(values))

    def mean_of_stages(name):
        schemes = ranks[0][name].stages
        return {
            scheme: {stage: mean(rank[name].stages[scheme][stage] for rank in ranks) for stage in stages}
            for scheme, stages in schemes.items()
        }

    return {
        "seconds_per_step": {name: results.summary(seconds) for name, seconds in slowest.items()},
        "samples": {name: [round(float(second), 6) for second in seconds] for name, seconds in slowest.items()},
        "seconds_over_ranks": {
            name: {f"p{p}": float(np.percentile(time, p)) for p in (50, 99)} for name, time in times.items()
        },
        # Step by step, so that numerator and denominator are neighbours in time.
        "speedup": {
            name: {r: float(np.median(slowest[r] / slowest[name])) for r in references if r in slowest}
            for name in names
        },
        "wire_bytes_per_step": {name: mean(sent for rank in ranks for sent in rank[name].bytes_sent) for name in names},
        "engine_bytes_per_step": {name: mean(rank[name].engine_bytes for rank in ranks) for name in names},
        "cpu_seconds_per_step": {name: mean(np.mean(rank[name].cpu_seconds) for rank in ranks) for name in names},
        "phases": {
            name: {
                phase: mean(np.median(rank[name].phases[phase]) for rank in ranks) for phase in ranks[0][name].phases
            }
            for name in names
        },
        "stages": {name: mean_of_stages(name) for name in names},
        "dense": {
            name: {key: mean(rank[name].dense[key] for rank in ranks) for key in ranks[0][name].dense} for name in names
        },
    }


def _predicted(built, timing: Mapping[str, Mapping[str, float]]) -> dict[str, dict[str, Any]]:
    """What the systems' own plans promised, beside what came of it; of those that predict."""
    from bench import systems

    found = {}
    for system in built:
        plan = systems.plan_of(system) or {}
        seconds = plan.get("predicted_step_seconds")
        if seconds is not None:
            found[system.name] = {
                "step_seconds": seconds,
                "of_measured": seconds / timing[system.name]["median"],
                **{
                    key: plan.get(key)
                    for key in ("predicted_dense_step_seconds", "exposed_seconds", "made_at_step", "network")
                },
            }
    return found


# ---- Launcher


def publish(
    args,
    measured: dict[str, Any],
    title: str,
    name: str,
    *,
    columns: Mapping[str, Mapping[str, str]] = {},
    note: str = "",
) -> None:
    """Prints, draws and files what was measured.

    Args:
        args: ``timeline``, whether to print where the steps went, and ``directory``.
        measured: of ``measure``, with ``settings``.
        title: of tables and picture.
        name: of the files; empty: none are written.
        columns: more of the first table, header -> system -> cell.
        note: of this bench, under the table.
    """
    from rich.console import Console

    # Of the machine: a rank may be kept to some of them.
    measured["environment"].update(command=results.command(), cores=len(os.sched_getaffinity(0)))
    console = Console(width=None if sys.stdout.isatty() else 140 + 12 * len(columns))
    console.print(_step_table(measured, title, columns))
    console.print(" ".join(filter(None, (_notes(measured), note))), style="dim", markup=False, highlight=False)
    for system, p in measured["predicted"].items():
        share = f"{100 * p['of_measured']:.0f}% of the {measured['seconds_per_step'][system]['median']:.3f} s measured"
        console.print(
            f"{system}: its plan predicted {p['step_seconds']:.3f} s per step, {share}", markup=False, highlight=False
        )
    if args.timeline:
        console.print(_timeline_table(measured))
    if name:
        path = results.write(name, measured, args.directory)
        console.print(f"written: {path.name} and {_draw(measured, title, path.with_suffix('.png')).name}")


def _notes(measured) -> str:
    errors = ", ".join(f"{name} {error:.0e}" for name, error in measured["gradient_error"].items())
    idle = (
        f"Horovod's threads alone, idle: {measured['idle_cores']:.2f} cores, all ranks together, in all systems' times."
    )
    sent = "MB sent: of one rank, on its interface; engine: payload by the engine's own count."
    return f"{sent} Gradient against Horovod's: {errors}. CPU: of one rank, all threads. {idle}"


def _step_table(measured, title, columns):
    """Seconds per step, what the plan predicted, how many times faster than the references, bytes, processor time."""
    from rich.table import Table

    references = list(next(iter(measured["speedup"].values())))
    predicted = {
        name: f"{p['step_seconds']:.3f} ({100 * p['of_measured']:.0f}%)" for name, p in measured["predicted"].items()
    }
    table = Table(title=title)
    table.add_column("system", no_wrap=True)
    between = {"predicted": predicted} if predicted else {}
    for column in (
        "s per step",
        "p10",
        "p90",
        *between,
        *(f"x {name}" for name in references),
        "MB sent",
        "engine",
        "CPU s",
        *columns,
    ):
        table.add_column(column, **CELL)
    for name, timing in measured["seconds_per_step"].items():
        sent, counted = measured["wire_bytes_per_step"][name], measured["engine_bytes_per_step"][name]
        table.add_row(
            f"{name} (lossy)" if name in measured["lossy"] else name,
            *(f"{timing[key]:.3f}" for key in ("median", "p10", "p90")),
            *(cells.get(name, "-") for cells in between.values()),
            *(f"{measured['speedup'][name][reference]:.2f}" for reference in references),
            *("-" if value is None else f"{value / 1e6:.2f}" for value in (sent, counted)),
            f"{measured['cpu_seconds_per_step'][name]:.2f}",
            *(cells.get(name, "-") for cells in columns.values()),
        )
    return table


def _timeline_table(measured):
    """Where a step's time went: the training thread's phases, then the stages of our exchanges."""
    from rich.table import Table

    phases = list(next(iter(measured["phases"].values())))
    stages = next((list(stage) for by_scheme in measured["stages"].values() for stage in by_scheme.values()), [])
    table = Table(
        title="Where a step went, ms, mean over ranks: training thread; then stages of all exchanges, which overlap"
    )
    table.add_column("system")
    for column in (*phases, *stages):
        table.add_column(column, **CELL)
    for name, seconds in measured["phases"].items():
        table.add_row(name, *(f"{1e3 * seconds[phase]:.1f}" for phase in phases), *("" for _ in stages))
        for scheme, stage in measured["stages"][name].items():
            table.add_row(f"  {scheme}", *("" for _ in phases), *(f"{1e3 * stage[key]:.1f}" for key in stages))
    return table


def _draw(measured, title, path: pathlib.Path) -> pathlib.Path:
    from bench.plots import Panel, bar_panels

    timing = measured["seconds_per_step"]
    faster = {name: speedup["horovod"] for name, speedup in measured["speedup"].items() if "horovod" in speedup}
    panels = [
        Panel(
            "seconds per step (median; line: p10 to p90)",
            {name: t["median"] for name, t in timing.items()},
            spread={name: (t["p10"], t["p90"]) for name, t in timing.items()},
            notes={
                name: f"{timing[name]['median']:.3g} s, {ratio:.2g}x Horovod's speed"
                for name, ratio in faster.items()
                if name != "horovod"
            },
        )
    ]
    if any(measured["wire_bytes_per_step"].values()):
        panels.append(
            Panel(
                "MB sent by a rank per step",
                {name: sent / 1e6 for name, sent in measured["wire_bytes_per_step"].items()},
            )
        )
    environment = measured["environment"]
    footnote = f"{environment['cpu']}, {environment['cores']} cores for all ranks, commit {environment['commit']}"
    return bar_panels(path, title, panels, footnote)

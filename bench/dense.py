"""Every way of sending gradients that are allreduced, by turns with stock Horovod, DDP and no communication.

    python -m bench.dense --models mlp,transformer,resnet50 --hosts 4 --rates unshaped,200mbit \\
        --methods horovod,lazy,merged,auto
    python -m bench.dense --memory                           # peak memory of a rank, a launch for each system
    python -m bench.dense --instructions                     # of our own work for 500 small tensors, by valgrind
    python -m bench.dense --local --np 2 --models mlp        # loopback, no shaping: says nothing about bandwidth

Ours has policy allreduce, so every model is dense, and one of the methods of ``DistributedOptimizer(dense=...)``. Each
model and rate is a launch of its own with a table and files of its own, dense-MODEL-HOSTSxRATE. A step is as in
bench.train. See docs/benchmarks.md.
"""

import argparse
import pathlib
import statistics
import sys
from collections.abc import Mapping, Sequence
from typing import Any, Optional

import numpy as np

from bench import instructions, launch, results, steps

METHODS = ("horovod", "bsp", "wfbp", "lazy", "merged", "priority", "auto")
OURS = instructions.OURS
RIVALS = ("horovod", "ddp")
STOCK = ("none", *RIVALS)
_PEAK_STEPS = 3  # after the warm-up


def parse_args():
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="python -m bench.dense", description=__doc__, formatter_class=formatter)
    only = parser.add_mutually_exclusive_group()
    only.add_argument(
        "--memory", action="store_true", help="only peak memory; of alexnet and auto, where nothing else is said"
    )
    only.add_argument(
        "--instructions", action="store_true", help="only instructions of own work; of auto, where nothing else is said"
    )
    parser.add_argument(
        "--models", help="alexnet, mlp, resnet50, transformer or dlrm (default: mlp,transformer,resnet50)"
    )
    parser.add_argument(
        "--methods", help=f"of ours, in the order of each round; lazy:BYTES too (default: {','.join(METHODS)})"
    )
    parser.add_argument(
        "--steps", type=int, default=7, help="timed rounds, one step of each system (default: %(default)s)"
    )
    parser.add_argument("--rows", type=int, default=0, help="samples per rank and step (default: the model's own)")
    parser.add_argument(
        "--scale", type=float, default=1.0, help="shrinks batch, pictures and sequences, no parameters, for smoke runs"
    )
    parser.add_argument("--timeline", action="store_true", help="print where a step's time went")
    parser.add_argument(
        "--peaks",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="peak memory in the tables, for which every system is launched alone, once for each model",
    )
    parser.add_argument(
        "--own-cores", action="store_true", help="each host of the cluster computes on a share of the cores of its own"
    )
    parser.add_argument("--hosts", type=int, default=4, help="of the cluster, one rank each (default: %(default)s)")
    parser.add_argument(
        "--rates", default="unshaped,200mbit", help="of each direction of each link (default: %(default)s)"
    )
    parser.add_argument("--np", type=int, default=2, help="ranks with --local (default: %(default)s)")
    parser.add_argument("--timeout", type=float, default=3600.0, help="seconds of a launch (default: %(default)s)")
    launch.add_common_options(parser)
    args = parser.parse_args()
    if args.worker is None:
        if args.own_cores and (args.local or args.memory or args.instructions):
            parser.error("--own-cores is for the cluster's hosts: not with --local, --memory or --instructions")
        args.models = _names(args.models or ("alexnet" if args.memory else "mlp,transformer,resnet50"))
        args.methods = _names(args.methods or ("auto" if args.memory or args.instructions else ",".join(METHODS)))
        args.rates = ["loopback"] if args.local else _names(args.rates)
        args.system = None
    return args


def _names(text: str) -> list[str]:
    return list(dict.fromkeys(text.split(",")))


def validate(args) -> None:
    """Before anything is launched: names that do not exist."""
    from bench import models
    from bench.cluster import ClusterError
    from bench.cluster.shaping import parse_rate

    for method in args.methods:
        if method not in METHODS and not (method.startswith("lazy:") and method[len("lazy:") :].isdigit()):
            raise SystemExit(f"bench.dense: {method!r} is not a method. Choose from {', '.join(METHODS)}, lazy:BYTES.")
    try:
        for model in args.models:
            models.build(model)
        for rate in () if args.local else args.rates:
            parse_rate(rate)
    except (ValueError, ClusterError) as error:
        raise SystemExit(f"bench.dense: {error}") from None


# ---- Rank


def work(folder: pathlib.Path) -> None:
    """One rank: times all systems by turns, or takes some steps of a single one for its peak memory; rank 0 answers."""
    args = launch.settings_of(folder)
    import poseidon_hvd as hvd
    from bench import systems

    model, rows, loss_of = steps.begin(args)

    def build(name, of):
        if name.startswith(OURS):
            return systems.poseidon(of, "allreduce", name=name, dense=name[len(OURS) :])
        return systems.BUILDERS[name](of)

    if args.system is not None:
        measured: Optional[dict[str, Any]] = {"peaks": _peaks(build(args.system, model), loss_of), "rows": rows}
    else:
        built = [build(name, systems.share_parameters(model)) for name in _systems(args)]
        measured = steps.measure(built, model, loss_of, args, RIVALS)
        if measured is not None:
            settings = {
                key: getattr(args, key)
                for key in ("model", "methods", "local", "own_cores", "steps", "scale", "threads")
            }
            settings.update(rows=rows, hosts=1 if args.local else args.hosts, rate=args.rate)
            slices = {
                system.name: (systems.plan_of(system) or {}).get("dense")
                for system in built
                if system.name.startswith(OURS)
            }
            measured = {"benchmark": "dense", "settings": settings, "slices": slices, **measured}
    if hvd.rank() == 0:
        launch.answer(folder, measured)
    systems.close()


def _peaks(system, loss_of) -> list[int]:
    """Bytes that each rank had resident at most, after a few steps."""
    import poseidon_hvd as hvd
    from bench import systems

    systems.warm_up(system, loss_of)
    for _ in range(_PEAK_STEPS):
        system.run(loss_of, update=True)
    # Not getrusage: its ru_maxrss survives exec, so it may be the launcher's.
    with open("/proc/self/status") as lines:
        peak = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))
    return hvd.allgather_object(peak, name="bench.peaks")


# ---- Launcher


def _systems(args) -> list[str]:
    return [*STOCK, *(OURS + method for method in args.methods)]


def _with(args, **settings) -> argparse.Namespace:
    return argparse.Namespace(**{**vars(args), **settings})


def time_steps(args, model: str, rate: str, peaks: Mapping[str, Sequence[int]]) -> None:
    """One model at one rate: measures, prints and files."""
    args = _with(args, model=model, rate=rate)
    measured = launch.measured_by_ranks("bench.dense", args, own_cores=args.own_cores)
    found = verdicts(measured["samples"])
    measured.update(verdicts=found, peak_bytes=peaks)
    note = (
        "Ours with policy allreduce. allreduces: enqueued by ours, before Horovod fuses any; copied, in place: "
        "MB of a rank's "
        "gradients that were copied into slices or lay there."
    )
    if peaks:
        note += " peak: MB resident, of the largest rank, the system launched alone."
    name = f"dense-{model}-{launch.where(args)}" + ("-own-cores" if args.own_cores else "")
    steps.publish(args, measured, title(measured), name, columns=columns(measured), note=note)
    print(verdict_text(found))


def title(measured: dict[str, Any]) -> str:
    s = measured["settings"]
    network = (
        "loopback, no shaping"
        if s["local"]
        else s["rate"] + (", hosts with cores of their own" if s.get("own_cores") else "")
    )
    size = f"{measured['parameters'] / 1e6:.1f}M parameters in {measured['tensors']} tensors"
    return f"{s['model']}, all dense, {size}, {measured['ranks']} ranks, {s['rows']} rows each, {network}"


def columns(measured: dict[str, Any]) -> dict[str, dict[str, str]]:
    """Header -> system -> cell, as ``steps.publish`` takes them; only for systems that have the figure."""
    counted = {name: counts for name, counts in measured["dense"].items() if counts}
    found = {
        "allreduces": {name: f"{counts['allreduces']:.4g}" for name, counts in counted.items()},
        "MB copied": {name: f"{counts['copied_bytes'] / 1e6:.2f}" for name, counts in counted.items()},
        "MB in place": {name: f"{counts['in_place_bytes'] / 1e6:.2f}" for name, counts in counted.items()},
    }
    if measured["peak_bytes"]:
        found["peak MB"] = {name: f"{max(peaks) / 1e6:.0f}" for name, peaks in measured["peak_bytes"].items()}
    return found


def verdicts(samples: Mapping[str, Sequence[float]]) -> dict[str, dict[str, Any]]:
    """For each of ours: its time over that of the better of Horovod and DDP, and Horovod's over its own.

    Args:
        samples: name of a system -> seconds of each round; ratios are those of a round, and of these the median.
    """
    best = min(RIVALS, key=lambda name: statistics.median(samples[name]))

    def ratio(name, other):
        return float(np.median(np.divide(samples[name], samples[other])))

    return {
        name: {
            "seconds": statistics.median(seconds),
            "best": best,
            "of_best": ratio(name, best),
            "speedup": ratio("horovod", name),
        }
        for name, seconds in samples.items()
        if name.startswith(OURS)
    }


def verdict_text(found: Mapping[str, Mapping[str, Any]]) -> str:
    """Of the default, where it was timed, otherwise of the fastest of ours."""
    name = f"{OURS}auto" if f"{OURS}auto" in found else min(found, key=lambda each: found[each]["seconds"])
    v = found[name]
    return (
        f"verdict: ours / best of (Horovod, DDP) {v['of_best']:.3f}, "
        f"Horovod / ours {v['speedup']:.3f} ({name}; best: {v['best']})"
    )


def measure_peaks(args, model: str) -> dict[str, Any]:
    """Every system alone on loopback: what a rank allocates does not depend on links.

    Returns:
        ``peaks``: system -> bytes that each rank had resident at most; ``rows`` per rank.
    """
    args = _with(args, model=model, np=args.np if args.local else args.hosts, local=True)
    found = {
        name: launch.measured_by_ranks("bench.dense", _with(args, system=name), keep_memory=False)
        for name in _systems(args)
    }
    return {"peaks": {name: each["peaks"] for name, each in found.items()}, "rows": found["none"]["rows"]}


def publish_memory(args, model: str) -> None:
    measured = measure_peaks(args, model)
    peaks = measured["peaks"]
    ranks = len(peaks["none"])
    least = np.mean(peaks["none"])
    rows = [
        (name, *(f"{value / 1e6:.0f}" for value in (max(each), np.mean(each), np.mean(each) - least)))
        for name, each in peaks.items()
    ]
    heading = f"{model}, all dense, {ranks} ranks, {measured['rows']} rows each: MB resident at most"
    _print_table(heading, ("system", "largest rank", "mean", "mean beyond none"), rows)
    settings = {key: getattr(args, key) for key in ("methods", "scale", "threads")}
    settings.update(model=model, rows=measured["rows"], ranks=ranks)
    _file(f"dense-memory-{model}", {"benchmark": "dense-memory", "settings": settings, "peak_bytes": peaks}, args)


def publish_instructions(args) -> None:
    libraries = ["horovod", *(OURS + method for method in args.methods)]
    measured = instructions.measure(libraries, timeout=args.timeout)
    own = measured["own"]
    ratios = {name: own["horovod"] / count for name, count in own.items()}
    rows = []
    for name, counts in measured["instructions_per_step"].items():
        mine = (
            (f"{own[name] / 1e6:.3f}", f"{own[name] / instructions.TENSORS:.0f}", f"{ratios[name]:.2f}")
            if name in own
            else ("-",) * 3
        )
        rows.append((name, *(f"{counts[key] / 1e6:.3f}" for key in ("training_thread", "other_threads")), *mine))
    heading = (
        f"{instructions.TENSORS} tensors of {instructions.ELEMENTS} elements, 1 rank: millions of instructions per step"
    )
    header = ("optimizer", "training thread", "other threads", "own", "own per tensor", "Horovod's own / own")
    _print_table(heading, header, rows)
    print(
        "Own: of the training thread, autograd included, beyond the plain optimizer's. "
        "Others follow the clock: Horovod's polls."
    )
    settings = {
        "methods": args.methods,
        "tensors": instructions.TENSORS,
        "elements": instructions.ELEMENTS,
        "steps": [instructions.SHORT, instructions.LONG],
        "pause_seconds": instructions.PAUSE_SECONDS,
    }
    _file(
        "dense-instructions",
        {"benchmark": "dense-instructions", "settings": settings, **measured, "horovod_over_own": ratios},
        args,
    )


def _print_table(heading: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=heading)
    for column in header:
        table.add_column(column, **({} if column == header[0] else steps.CELL))
    for row in rows:
        table.add_row(*row)
    Console(width=None if sys.stdout.isatty() else 120).print(table)


def _file(name: str, payload: dict[str, Any], args) -> None:
    print(f"written: {results.write(name, payload, args.directory).name}")


def main() -> None:
    args = parse_args()
    if args.worker is not None:
        work(args.worker)
        return
    validate(args)
    if args.instructions:
        publish_instructions(args)
        return
    for model in args.models:
        if args.memory:
            publish_memory(args, model)
            continue
        peaks = measure_peaks(args, model)["peaks"] if args.peaks else {}
        for rate in args.rates:
            time_steps(args, model, rate, peaks)


if __name__ == "__main__":
    main()

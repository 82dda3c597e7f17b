"""Trains real models on synthetic data with several systems in turn and tells what each step costs.

    python -m bench.train --model alexnet --hosts 4 --rate 200mbit --steps 5 --systems none,horovod,ddp,poseidon-bytes
    python -m bench.train --model mlp --local --np 2           # loopback, no shaping: says nothing about bandwidth

Brings up the virtual cluster and runs itself on every host under horovodrun. A step is forward, backward, synchronization and SGD;
its time is that of the slowest rank. Gradients of exact systems are compared to Horovod's before anything is timed. See docs/benchmarks.md.
"""

import argparse
import faulthandler
import json
import os
import pathlib
import subprocess
import sys
import tempfile

import numpy as np

from bench import results

TOLERANCE = 1e-5  # sums of fp32 in another order; 1e-7 on the MLP
ARGUMENTS, MEASURED = "arguments.json", "measured.json"  # from launcher to ranks, and back
REFERENCES = ("none", "horovod", "ddp")
CELL = {"justify": "right"}


def parse_args():
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="python -m bench.train", description=__doc__, formatter_class=formatter)
    parser.add_argument("--model", default="mlp", help="alexnet, mlp, resnet50, transformer or dlrm (default: %(default)s)")
    parser.add_argument("--systems", default="none,horovod,ddp,poseidon-bytes", help="in the order of each round (default: %(default)s)")
    parser.add_argument("--hosts", type=int, default=4, help="of the cluster, one rank each (default: %(default)s)")
    parser.add_argument("--rate", default="200mbit", help="of each direction of each link, or unshaped (default: %(default)s)")
    parser.add_argument("--local", action="store_true", help="ranks on loopback instead of the cluster; bandwidth claims need the cluster")
    parser.add_argument("--np", type=int, default=2, help="ranks with --local (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=7, help="timed rounds, one step of each system (default: %(default)s)")
    parser.add_argument("--rows", type=int, default=0, help="samples per rank and step (default: the model's own)")
    parser.add_argument("--scale", type=float, default=1.0, help="shrinks batch, pictures and sequences, no parameters, for smoke runs")
    parser.add_argument("--threads", type=int, default=1, help="OMP_NUM_THREADS of each rank (default: %(default)s)")
    parser.add_argument("--timeline", action="store_true", help="print where a step's time went")
    parser.add_argument("--result", help="name of the files in --directory (default: train-MODEL-HOSTSxRATE); empty: write none")
    parser.add_argument("--directory", type=pathlib.Path, default=results.RESULTS, help=argparse.SUPPRESS)
    parser.add_argument("--timeout", type=float, default=3600.0, help="seconds, after which all ranks are ended (default: %(default)s)")
    parser.add_argument("--worker", type=pathlib.Path, help=argparse.SUPPRESS)  # a rank; the folder of the launcher
    return parser.parse_args()


# ---- Launcher


def launch(args) -> dict:
    """Runs this module on every rank and returns what rank 0 wrote."""
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / MEASURED
        # As a file: horovodrun takes options that resemble its own for its own, also behind the command.
        (pathlib.Path(folder) / ARGUMENTS).write_text(json.dumps({**vars(args), "directory": None}))
        argv = [sys.executable, "-m", "bench.train", "--worker", folder]
        env = {"OMP_NUM_THREADS": str(args.threads), "PYTHONUNBUFFERED": "1"}
        if args.local:
            returncode = run_local(args, argv, env)
        else:
            from bench.cluster import Cluster, ClusterError

            try:
                with Cluster(hosts=args.hosts, rate=args.rate) as cluster:
                    returncode = cluster.run(argv, timeout=args.timeout, env=env, capture=False).returncode
            except ClusterError as error:
                raise SystemExit(f"bench.train: {error}") from None
        if returncode != 0 or not path.exists():
            raise SystemExit(f"bench.train: the ranks ended with status {returncode}; their output is above.")
        return json.loads(path.read_text())


def run_local(args, argv, env) -> int:
    from bench.cluster.processes import run_bounded

    print("loopback, no shaping: bandwidth claims need the cluster", flush=True)
    command = [str(pathlib.Path(sys.executable).with_name("horovodrun")), "-np", str(args.np), "--gloo", *argv]
    path = os.pathsep.join(filter(None, [str(results.REPOSITORY), os.environ.get("PYTHONPATH")]))
    return run_bounded(command, timeout=args.timeout, env={**os.environ, "PYTHONPATH": path, **env}).returncode


def publish(args, measured: dict) -> None:
    """Prints, draws and files what was measured."""
    from rich.console import Console

    console = Console(width=None if sys.stdout.isatty() else 120)
    console.print(step_table(measured))
    console.print(notes(measured), style="dim", markup=False, highlight=False)
    if args.timeline:
        console.print(timeline_table(measured))
    where = f"{args.np}xlocal" if args.local else f"{args.hosts}x{args.rate}"
    name = f"train-{args.model}-{where}" if args.result is None else args.result
    if name:
        path = results.write(name, measured, args.directory)
        console.print(f"written: {path.name} and {draw(measured, path.with_suffix('.png')).name}")


def notes(measured: dict) -> str:
    errors = ", ".join(f"{name} {error:.0e}" for name, error in measured["gradient_error"].items())
    idle = f"Horovod's threads alone, idle: {measured['idle_cores']:.2f} of {measured['environment']['cores']} cores, in all systems' times."
    sent = "MB sent: of one rank, on its interface; engine: payload by the engine's own count."
    return f"{sent} Gradient against Horovod's: {errors}. CPU: of one rank, all threads. {idle}"


def title(measured: dict) -> str:
    s = measured["settings"]
    network = "loopback, no shaping" if s["local"] else s["rate"]
    return f"{s['model']}, {measured['parameters'] / 1e6:.1f}M parameters, {measured['ranks']} ranks, {s['rows']} rows each, {network}"


def step_table(measured: dict):
    """Seconds per step, how many times faster than the references, bytes, processor time."""
    from rich.table import Table

    table = Table(title=title(measured))
    table.add_column("system")
    references = [name for name in REFERENCES if name in measured["seconds_per_step"]]
    for column in ("s per step", "p10", "p90", *(f"x {name}" for name in references), "MB sent", "engine", "CPU s"):
        table.add_column(column, **CELL)
    for name, timing in measured["seconds_per_step"].items():
        sent, counted = measured["wire_bytes_per_step"][name], measured["engine_bytes_per_step"][name]
        table.add_row(
            f"{name} (lossy)" if name in measured["lossy"] else name,
            *(f"{timing[key]:.3f}" for key in ("median", "p10", "p90")),
            *(f"{measured['speedup'][name][reference]:.2f}" for reference in references),
            *("-" if value is None else f"{value / 1e6:.2f}" for value in (sent, counted)),
            f"{measured['cpu_seconds_per_step'][name]:.2f}",
        )
    return table


def timeline_table(measured: dict):
    """Where a step's time went: the training thread's phases, then the stages of our exchanges."""
    from rich.table import Table

    phases = list(next(iter(measured["phases"].values())))
    stages = next((list(stage) for by_scheme in measured["stages"].values() for stage in by_scheme.values()), [])
    table = Table(title="Where a step went, ms, mean over ranks: training thread; then stages of all exchanges, which overlap")
    table.add_column("system")
    for column in (*phases, *stages):
        table.add_column(column, **CELL)
    for name, seconds in measured["phases"].items():
        table.add_row(name, *(f"{1e3 * seconds[phase]:.1f}" for phase in phases), *("" for _ in stages))
        for scheme, stage in measured["stages"][name].items():
            table.add_row(f"  {scheme}", *("" for _ in phases), *(f"{1e3 * stage[key]:.1f}" for key in stages))
    return table


def draw(measured: dict, path: pathlib.Path) -> pathlib.Path:
    from bench.plots import Panel, bar_panels

    timing = measured["seconds_per_step"]
    faster = {name: speedup["horovod"] for name, speedup in measured["speedup"].items() if "horovod" in speedup}
    panels = [Panel(
        "seconds per step (median; line: p10 to p90)", {name: t["median"] for name, t in timing.items()},
        spread={name: (t["p10"], t["p90"]) for name, t in timing.items()},
        notes={name: f"{timing[name]['median']:.3g} s, {ratio:.2g}x Horovod's speed" for name, ratio in faster.items() if name != "horovod"},
    )]
    if any(measured["wire_bytes_per_step"].values()):
        panels.append(Panel("MB sent by a rank per step", {name: sent / 1e6 for name, sent in measured["wire_bytes_per_step"].items()}))
    environment = measured["environment"]
    footnote = f"{environment['cpu']}, {environment['cores']} cores for all ranks, commit {environment['commit']}"
    return bar_panels(path, title(measured), panels, footnote)


# ---- Rank


def work(folder: pathlib.Path) -> None:
    """One rank: builds, checks, times; rank 0 writes the file."""
    args = argparse.Namespace(**json.loads((folder / ARGUMENTS).read_text()))
    import torch

    import poseidon_hvd as hvd
    from bench import models, systems
    from bench.cluster.counters import read_local

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

    built = [systems.BUILDERS[name](systems.share_parameters(model)) for name in args.systems.split(",")]
    load = os.getloadavg()[0]
    for system in built:
        for _ in range(system.warmup_steps):
            system.run(loss_of, update=True)
    errors = check(built, model, loss_of)

    def after_round(number, samples):
        if hvd.rank() == 0:
            print(f"round {number}/{args.steps}:", ", ".join(f"{name} {s.seconds[-1]:.3f} s" for name, s in samples.items()), flush=True)

    def sent():
        counters = None if args.local else read_local()
        return None if counters is None else counters[0]

    idle = hvd.allgather_object(systems.idle_cpu_share(), name="bench.idle")
    mine = systems.interleave(built, loss_of, args.steps, bytes_sent=sent, after_round=after_round)
    ranks = hvd.allgather_object(mine, name="bench.samples")
    if hvd.rank() == 0:
        settings = {key: getattr(args, key) for key in ("model", "systems", "local", "steps", "scale", "threads")}
        settings.update(rows=rows, hosts=1 if args.local else args.hosts, rate="loopback" if args.local else args.rate)
        tensors = [p.numel() for p in model.parameters()]
        (folder / MEASURED).write_text(json.dumps({
            "benchmark": "train", "environment": {**results.environment(), "load_average_before": load}, "settings": settings,
            "ranks": hvd.size(), "parameters": sum(tensors), "tensors": len(tensors), "gradient_error": errors,
            "idle_cores": sum(idle), "lossy": [system.name for system in built if system.lossy], **figures(ranks),
            "plans": {s.name: s.optimizer.scheme_report().splitlines() for s in built if hasattr(s.optimizer, "scheme_report")},
        }))
    systems.close()


def check(built, model, loss_of) -> dict:
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
    errors = {system.name: systems.gradient_error(system, expected.model) for system in communicating if system is not expected}
    for system in communicating:
        if not system.lossy and not errors.get(system.name, 0.0) <= TOLERANCE:
            raise SystemExit(f"{system.name}: gradient differs from Horovod's by {errors[system.name]:.1e}; nothing is timed.")
    return errors


def figures(ranks) -> dict:
    """From every rank's samples: a step takes as long as its slowest rank, all else is the mean over ranks.

    Args:
        ranks: for each rank, name of a system -> ``systems.Samples``.
    """
    names = list(ranks[0])
    times = {name: np.array([rank[name].seconds for rank in ranks]) for name in names}
    slowest = {name: time.max(axis=0) for name, time in times.items()}

    def mean(values):
        values = list(values)
        return None if None in values else float(np.mean(values))

    def mean_of_stages(name):
        schemes = ranks[0][name].stages
        return {scheme: {stage: mean(rank[name].stages[scheme][stage] for rank in ranks) for stage in stages}
                for scheme, stages in schemes.items()}

    return {
        "seconds_per_step": {name: results.summary(seconds) for name, seconds in slowest.items()},
        "samples": {name: [round(float(second), 6) for second in seconds] for name, seconds in slowest.items()},
        "seconds_over_ranks": {name: {f"p{p}": float(np.percentile(time, p)) for p in (50, 99)} for name, time in times.items()},
        # Step by step, so that numerator and denominator are neighbours in time.
        "speedup": {name: {r: float(np.median(slowest[r] / slowest[name])) for r in REFERENCES if r in slowest} for name in names},
        "wire_bytes_per_step": {name: mean(sent for rank in ranks for sent in rank[name].bytes_sent) for name in names},
        "engine_bytes_per_step": {name: mean(rank[name].engine_bytes for rank in ranks) for name in names},
        "cpu_seconds_per_step": {name: mean(np.mean(rank[name].cpu_seconds) for rank in ranks) for name in names},
        "phases": {name: {phase: mean(np.median(rank[name].phases[phase]) for rank in ranks) for phase in ranks[0][name].phases}
                   for name in names},
        "stages": {name: mean_of_stages(name) for name in names},
    }


def validate(args) -> None:
    """Before anything is launched: names that do not exist."""
    from bench import models, systems

    try:
        models.build(args.model)
    except ValueError as error:
        raise SystemExit(f"bench.train: {error}") from None
    for name in args.systems.split(","):
        if name not in systems.BUILDERS:
            raise SystemExit(f"bench.train: {name!r} is not a system. Choose from {', '.join(systems.BUILDERS)}.")


def main() -> None:
    args = parse_args()
    if args.worker is not None:
        work(args.worker)
        return
    validate(args)
    measured = launch(args)
    measured["environment"]["command"] = results.command()
    publish(args, measured)


if __name__ == "__main__":
    main()

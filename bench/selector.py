"""What a wrong choice of scheme costs: single layers with each scheme forced, and with the policy that chooses.

    python -m bench.selector                                   # 144 cells, 2 to 8 hosts; about an hour
    python -m bench.selector --list                            # which cells, which are left out and why; runs nothing
    python -m bench.selector --local --np 2 --layers 256x256,1024x1024 --cells 6

A cell is a fully connected layer, rows per rank, hosts and a rate. Its regret is the time of a step with the scheme
that the policy chose over that with the better scheme, both forced, so that noise does not count as a choice. For each
number of hosts one cluster is made and one launch of ranks does all of its cells; the links' rate is changed in
between. See docs/benchmarks.md.
"""

import argparse
import dataclasses
import faulthandler
import gc
import json
import os
import pathlib
import sys
import tempfile
from typing import Any, Optional

from bench import cells, launch, regret, results
from bench.cells import MOST_ROUNDS, SCHEMES, Cell

UNSHAPED = "unshaped"
TOLERANCE = 1e-5  # sums of fp32 in another order
POLICY = "policy"  # name of the system that chooses
PLANNED = ("made_at_step", "predicted_step_seconds", "predicted_dense_step_seconds", "exposed_seconds")  # of plan()
_SHORT_SECONDS = 0.2  # what an allreduce may take before it is worth the trouble to warm up on fast links
_MEASURED = "cells.jsonl"  # a line with the environment, then one for each cell, as soon as it is measured


def parse_args():
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="python -m bench.selector", description=__doc__, formatter_class=formatter)
    parser.add_argument(
        "--np", default=",".join(map(str, cells.RANKS)), help="numbers of hosts, one rank each (default: %(default)s)"
    )
    parser.add_argument(
        "--rates", default=",".join(cells.RATES), help="of the links (default: %(default)s; with --local only unshaped)"
    )
    parser.add_argument(
        "--layers",
        default=",".join(f"{m}x{n}" for m, n in cells.LAYERS),
        help="outputs x inputs (default: %(default)s)",
    )
    parser.add_argument(
        "--rows", default=",".join(map(str, cells.ROWS)), help="per rank and step (default: %(default)s)"
    )
    parser.add_argument(
        "--cells", type=int, default=144, help="size of the sample of all combinations (default: %(default)s)"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the sample (default: %(default)s)")
    parser.add_argument("--policy", default="time", help="the one that chooses (default: %(default)s)")
    parser.add_argument(
        "--seconds", type=float, default=8.0, help="for the timed rounds of a cell, at least one (default: %(default)s)"
    )
    parser.add_argument(
        "--limit-seconds", type=float, default=20.0, help="leave out cells with more per step (default: %(default)s)"
    )
    parser.add_argument(
        "--memory-gib",
        type=float,
        default=24.0,
        help="of all ranks; never more than is available (default: %(default)s)",
    )
    parser.add_argument("--list", action="store_true", help="print the cells and the expected duration; run nothing")
    parser.add_argument(
        "--result", default="selector", help="name of the files (default: %(default)s); empty: write none"
    )
    parser.add_argument(
        "--timeout", type=float, default=7200.0, help="seconds for each number of hosts (default: %(default)s)"
    )
    launch.add_common_options(parser)
    args = parser.parse_args()
    if args.worker is None:
        try:
            args.np = [int(each) for each in args.np.split(",")]
            args.rates = [UNSHAPED] if args.local else args.rates.split(",")
            args.layers = [tuple(map(int, layer.split("x"))) for layer in args.layers.split(",")]
            args.rows = [int(each) for each in args.rows.split(",")]
        except ValueError as error:
            parser.error(str(error))
    return args


# ---- Launcher


def choose(args) -> tuple[list[Cell], list[tuple[Cell, str]]]:
    """The sample, and what of the grid was left out before it was drawn, with reasons."""
    cores = len(os.sched_getaffinity(0))
    args.memory_gib = min(args.memory_gib, _available_gib())
    possible, left_out = [], []
    for cell in cells.grid(args.layers, args.rows, args.np, args.rates):
        reason = cells.reason_to_leave_out(
            cell, limit_seconds=args.limit_seconds, memory_bytes=args.memory_gib * 2**30, cores=cores
        )
        if reason is None:
            possible.append(cell)
        else:
            left_out.append((cell, reason))
    return cells.sample(possible, args.cells, args.seed), left_out


def _available_gib() -> float:
    with open("/proc/meminfo") as lines:
        return next(int(line.split()[1]) / 2**20 for line in lines if line.startswith("MemAvailable:"))


def measure_all(args, sample, left_out) -> dict[str, Any]:
    """Launches the ranks for each number of hosts, and files what there is after each of them."""
    keys = (
        "np",
        "rates",
        "layers",
        "rows",
        "cells",
        "seed",
        "policy",
        "seconds",
        "limit_seconds",
        "memory_gib",
        "local",
        "threads",
    )
    measured: dict[str, Any] = {
        "benchmark": "selector",
        "environment": None,
        "settings": {key: getattr(args, key) for key in keys},
        "failures": {},
        "left_out": [{**dataclasses.asdict(cell), "reason": reason} for cell, reason in left_out],
        "asked_for": len(sample),
        "cells": [],
    }
    for ranks in args.np:
        mine = [dataclasses.asdict(cell) for cell in sample if cell.ranks == ranks]
        if not mine:
            continue
        with tempfile.TemporaryDirectory() as name:
            folder = pathlib.Path(name)
            settings = {**vars(args), "cells": mine}
            print(f"{ranks} ranks: {len(mine)} cells", flush=True)
            failure = "interrupted"
            try:
                rate = None if args.local else UNSHAPED
                status = launch.run("bench.selector", settings, folder, ranks=ranks, rate=rate, timeout=args.timeout)
                failure = None if status == 0 else f"the ranks ended with status {status}"
            except SystemExit as error:
                if not isinstance(error.code, str):  # a signal to this process
                    raise
                failure = error.code
            finally:
                _collect(folder, measured)
                if failure is not None:
                    measured["failures"][str(ranks)] = failure
                    print(f"{ranks} ranks: {failure}", file=sys.stderr, flush=True)
                file(args, measured)
    return measured


def _collect(folder: pathlib.Path, measured: dict[str, Any]) -> None:
    path = folder / _MEASURED
    lines = path.read_text().splitlines() if path.exists() else []
    if lines:
        measured["environment"] = measured["environment"] or {**json.loads(lines[0]), "command": results.command()}
        measured["cells"] += [regret.judge(json.loads(line)) for line in lines[1:]]


def file(args, measured) -> list[pathlib.Path]:
    """Writes JSON and picture of what has been measured so far; the paths, none where there is nothing to write."""
    if not measured["cells"] or not args.result:
        return []
    measured["summary"] = regret.summary(measured["cells"], args.policy)
    path = results.write(args.result, measured, args.directory)
    environment = measured["environment"]
    footnote = (
        f"grey: left out; white: not in the sample.\n{environment['cpu']}, {environment['cores']} cores for all ranks, "
        f"commit {environment['commit']}" + (", loopback: no claim about bandwidth" if args.local else "")
    )
    return [path, regret.draw(measured["cells"], measured["left_out"], args.policy, path.with_suffix(".png"), footnote)]


def publish(args, measured) -> None:
    """Prints what was measured."""
    from rich.console import Console

    console = Console(width=None if sys.stdout.isatty() else 140)
    for table in regret.tables(measured["cells"], regret.summary(measured["cells"], args.policy), args.policy):
        console.print(table)
    reasons = [
        (Cell(**{f.name: entry[f.name] for f in dataclasses.fields(Cell)}), entry["reason"])
        for entry in measured["left_out"]
    ]
    console.print(
        f"Measured {len(measured['cells'])} of {measured['asked_for']} cells. {_left_out_text(reasons)}", markup=False
    )
    written = file(args, measured)
    if written:
        console.print(f"written: {' and '.join(path.name for path in written)}")


def _left_out_text(left_out) -> str:
    text = "".join(f"\n  {cell}: {reason}" for cell, reason in left_out)
    return f"Left out, before the sample was drawn: {len(left_out)} of the grid{':' if left_out else ''}{text}"


def print_list(args, sample, left_out) -> None:
    cores = len(os.sched_getaffinity(0))
    for cell in sample:
        print(cell)
    minutes = {
        ranks: sum(c.expected_seconds(args.seconds, cores) for c in sample if c.ranks == ranks) / 60
        for ranks in args.np
    }
    by_ranks = ", ".join(f"{value:.0f} on {ranks}" for ranks, value in minutes.items())
    print(f"{len(sample)} cells, very roughly {sum(minutes.values()):.0f} minutes: {by_ranks} ranks")
    print(_left_out_text(left_out))


# ---- Rank


class Links:
    """The rate of all links, as this launch of ranks has it; all ranks call alike."""

    def __init__(self, folder: pathlib.Path):
        self._folder = folder
        self._rate = UNSHAPED
        self._changes = 0

    def set(self, rate: str) -> None:
        """Between two barriers, so that nothing of a step travels at another rate."""
        import poseidon_hvd as hvd

        if rate == self._rate:
            return
        self._rate = rate
        self._changes += 1
        hvd.barrier()
        if hvd.rank() == 0:
            launch.request_rate(self._folder, self._changes, rate)
        hvd.barrier()


def work(folder: pathlib.Path) -> None:
    """One rank: cell after cell; rank 0 writes a line after each."""
    args = launch.settings_of(folder)
    import torch

    import poseidon_hvd as hvd

    faulthandler.dump_traceback_later(args.timeout, exit=True)
    torch.set_num_threads(args.threads)
    hvd.init()
    links = Links(folder)
    if hvd.rank() == 0:
        _append(folder, {**results.environment(), "load_average_before": os.getloadavg()[0]})
    for number, fields in enumerate(args.cells, 1):
        cell = Cell(**fields)
        record = measure(cell, args, links)
        gc.collect()  # optimizers and their hooks are cycles; the next cell needs the memory
        if hvd.rank() == 0:
            _append(folder, record)
            took = ", ".join(f"{scheme} {seconds:.3f} s" for scheme, seconds in record["seconds"].items())
            print(f"{number}/{len(args.cells)}  {cell}: {took}, {args.policy} took {record['chosen']}", flush=True)


def _append(folder, record) -> None:
    with open(folder / _MEASURED, "a") as lines:
        lines.write(json.dumps(record) + "\n")


def measure(cell: Cell, args, links: Links) -> dict[str, Any]:
    """One cell, on every rank.

    Raises:
        SystemExit: gradients differ between schemes, or the policy made no plan.
    """
    import torch

    import poseidon_hvd as hvd
    from bench import systems

    torch.manual_seed(0)
    layer = torch.nn.Linear(cell.inputs, cell.outputs)
    torch.manual_seed(1 + hvd.rank())
    x = torch.randn(
        cell.rows, cell.inputs, requires_grad=True
    )  # so backward computes an input gradient, as inside of a network
    d = torch.randn(cell.rows, cell.outputs) / cell.rows

    def loss_of(forward):
        x.grad = None
        return (forward(x) * d).sum()

    # Forced schemes need no network to learn from: their first steps, which are dense, go over fast links.
    links.set(cell.rate if cell.network_seconds("allreduce") < _SHORT_SECONDS else UNSHAPED)
    forced = [
        systems.poseidon(systems.share_parameters(layer), scheme, name=scheme, dense="lazy") for scheme in SCHEMES
    ]
    for system in forced:
        systems.warm_up(system, loss_of)
    links.set(cell.rate)
    chooser = systems.poseidon(systems.share_parameters(layer), args.policy, name=POLICY)
    warmup = systems.warm_up(chooser, loss_of)
    built = [*forced, chooser]
    error = max(
        hvd.allgather_object(max(systems.gradient_error(s, forced[0].model) for s in built[1:]), name="bench.error")
    )
    if not error <= TOLERANCE:
        raise SystemExit(f"{cell}: gradients differ by {error:.1e} from that of an allreduce; nothing is timed.")

    samples = timed(built, loss_of, args.seconds)
    plan = systems.plan_of(chooser)
    if plan is None:
        raise SystemExit(f"{cell}: policy {args.policy} made no plan in {warmup} steps.")
    weight = next(tensor for tensor in plan["tensors"] if tensor["name"] == "weight")
    timing = {name: results.summary(seconds) for name, seconds in samples.items()}
    return {
        **dataclasses.asdict(cell),
        "seconds": {scheme: timing[scheme]["median"] for scheme in SCHEMES},
        "chosen": weight["scheme"],
        "reason": weight["reason"],
        "policy_seconds": timing[POLICY]["median"],
        "timing": timing,
        "gradient_error": error,
        "predicted_seconds": {scheme: weight["costs"].get(scheme, {}).get("seconds") for scheme in SCHEMES},
        "warmup_steps": warmup,
        "network": _lines(plan.get("network")),
        **{key: plan.get(key) for key in PLANNED},
    }


def _lines(network: Optional[dict[str, Any]]) -> Optional[dict[str, Any]]:
    """What the plan knew of the network, without the points that its lines were drawn through."""
    if network is None:
        return None
    return {
        key: {k: v for k, v in part.items() if k != "points"} if isinstance(part, dict) else part
        for key, part in network.items()
    }


def timed(built, loss_of, budget: float) -> dict[str, list[float]]:
    """Seconds of the slowest rank in each round; as many rounds as fit the budget, by the first of them, but at
    least one.
    """
    import numpy as np

    import poseidon_hvd as hvd
    from bench import systems

    first = systems.interleave(built, loss_of, 1)
    round_seconds = max(hvd.allgather_object(sum(sample.seconds[0] for sample in first.values()), name="bench.round"))
    rounds = int(min(MOST_ROUNDS, max(1, budget / round_seconds)))
    more = systems.interleave(built, loss_of, rounds - 1) if rounds > 1 else {}
    mine = {name: sample.seconds + (more[name].seconds if more else []) for name, sample in first.items()}
    ranks = hvd.allgather_object(mine, name="bench.samples")
    return {name: [round(float(s), 6) for s in np.max([rank[name] for rank in ranks], axis=0)] for name in mine}


def main() -> None:
    args = parse_args()
    if args.worker is not None:
        work(args.worker)
        return
    sample, left_out = choose(args)
    if args.list:
        print_list(args, sample, left_out)
        return
    if not sample:
        raise SystemExit(f"bench.selector: no cell to measure. {_left_out_text(left_out)}")
    measured = measure_all(args, sample, left_out)
    if measured["cells"]:
        publish(args, measured)
    if measured["failures"]:
        raise SystemExit(f"bench.selector: incomplete. {measured['failures']}")


if __name__ == "__main__":
    main()

"""Instructions of a distributed optimizer's own work in a step of many small tensors, on one rank, counted by
valgrind's callgrind.

    python -m bench.dense --instructions                                # counts, compares and files
    python -m bench.instructions --library horovod --steps 3            # the program that is counted, by itself

Processors of virtual machines often have no counters, and time says little about microseconds among busy threads; a
count repeats. Two runs with different numbers of steps: their difference is free of start-up. The same steps with the
plain optimizer are subtracted. Counted is the training thread: it calls forward, autograd (which runs on the calling
thread for CPU tensors), every gradient's hook and ``step()``. Other threads, our engine's among them, are reported
beside: Horovod's polls, so that count follows the clock and is no part of any ratio.
"""

import argparse
import gc
import json
import os
import pathlib
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import Any

from bench import results

__all__ = ["PLAIN", "measure"]

PLAIN = "none"
OURS = "dense-"
TENSORS, ELEMENTS = 500, 16
# Steps of the two runs. Between them no plan is made: those of ours are looked at again in steps 3, 8, 18 and 38.
SHORT, LONG = 20, 36
PAUSE_SECONDS = 1.0
_TRAINING_THREAD = 1  # valgrind numbers threads from 1, the main one
_TOTALS = re.compile(r"^totals: (\d+)", re.MULTILINE)


# ---- Launcher


def measure(libraries: Sequence[str], *, timeout: float) -> dict[str, Any]:
    """Counts the steps of each library.

    Args:
        libraries: names of systems: ``horovod``, ``dense-METHOD``; the plain optimizer is always counted.
        timeout: seconds of each run.

    Returns:
        ``instructions_per_step``: library -> ``training_thread`` and ``other_threads``; ``own``: wrapper ->
            instructions per step of the
        training thread beyond the plain optimizer's.

    Raises:
        SystemExit: there is no valgrind, or a run fails; the message has its output.
    """
    counted = {}
    for library in (PLAIN, *libraries):
        short, long = (_count(library, steps, timeout) for steps in (SHORT, LONG))
        per_step = {key: (long[key] - short[key]) / (LONG - SHORT) for key in short}
        counted[library] = per_step
        print(f"{library}: {per_step['training_thread'] / 1e6:.2f} million instructions per step", flush=True)
    own = {library: counted[library]["training_thread"] - counted[PLAIN]["training_thread"] for library in libraries}
    return {"instructions_per_step": counted, "own": own}


def _count(library: str, steps: int, timeout: float) -> dict[str, int]:
    """Of one run, from the start of its process to its end."""
    from bench.cluster import ClusterError
    from bench.cluster.processes import run_bounded

    valgrind = shutil.which("valgrind")
    if valgrind is None:
        raise SystemExit("bench.dense: instructions are counted by valgrind, which is not on PATH.")
    with tempfile.TemporaryDirectory() as name:
        # Threads take turns under valgrind; without fairness one that spins would hold up those it waits for.
        argv = [
            valgrind,
            "--tool=callgrind",
            "--separate-threads=yes",
            "--fair-sched=try",
            f"--callgrind-out-file={name}/count",
            sys.executable,
            "-m",
            "bench.instructions",
            "--library",
            library,
            "--steps",
            str(steps),
        ]
        path = os.pathsep.join(filter(None, [str(results.REPOSITORY), os.environ.get("PYTHONPATH")]))
        env = {**os.environ, "PYTHONPATH": path, "PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1"}
        try:
            done = run_bounded(argv, timeout=timeout, env=env, capture=True)
        except ClusterError as error:
            raise SystemExit(f"bench.dense: {error}") from None
        threads = _threads(pathlib.Path(name))
        if done.returncode != 0 or _TRAINING_THREAD not in threads:
            raise SystemExit(
                f"bench.dense: {' '.join(argv)} ended with status {done.returncode}:\n{done.stdout[-4000:]}"
            )
    training = threads.pop(_TRAINING_THREAD)
    return {"training_thread": training, "other_threads": sum(threads.values())}


def _threads(folder: pathlib.Path) -> dict[int, int]:
    """Thread -> instructions, from callgrind's files ``count-01``, ``count-02``, ..."""
    found = {}
    for path in folder.glob("count-*"):
        totals = _TOTALS.search(path.read_text())
        if totals is not None:
            found[int(path.name.rpartition("-")[2])] = int(totals[1])
    return found


# ---- What is counted


def work(args) -> dict[str, Any]:
    """Steps of forward, backward and SGD over small tensors; the learning rate is 0.

    Raises:
        SystemExit: the wrapper exchanges nothing, or allreduces outlast the pause, so that waiting would be counted.
    """
    import horovod.torch
    import torch

    import poseidon_hvd as hvd
    from bench import systems

    gc.disable()  # it would strike in some steps and not in others
    torch.set_num_threads(1)
    hvd.init()
    os.environ["HOROVOD_ELASTIC"] = "1"  # both wrappers leave a single rank alone, unless its job may grow
    model = torch.nn.ParameterList(torch.randn(ELEMENTS) for _ in range(args.tensors))
    if args.library.startswith(OURS):
        optimizer = systems.poseidon(model, "allreduce", dense=args.library[len(OURS) :]).optimizer
    else:
        optimizer = systems.BUILDERS[args.library](model).optimizer
    parameters = list(model)
    hooked = 0
    for number in range(args.steps):
        optimizer.zero_grad()
        torch.stack([(p * p).sum() for p in parameters]).sum().backward()
        # Until everything is reduced: Horovod waits for a tensor by asking again and again, ours by sleeping.
        time.sleep(args.pause)
        if number == 0:
            hooked = len(getattr(optimizer, "_handles", ()))
            if args.library != PLAIN and hooked != args.tensors:
                raise SystemExit(
                    f"{args.library}: {hooked} of {args.tensors} gradients are exchanged on one rank; "
                    "nothing is counted."
                )
        last = number == SHORT - 1 and args.library == "horovod"
        if last and not all(horovod.torch.poll(handle) for handle, _ in optimizer._handles.values()):
            raise SystemExit(
                f"horovod: allreduces go on {args.pause:g} s after backward; waiting for them would be counted."
            )
        optimizer.step()
    return {"library": args.library, "steps": args.steps, "tensors": args.tensors, "exchanged": hooked}


def main() -> None:
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        prog="python -m bench.instructions", description=__doc__, formatter_class=formatter
    )
    parser.add_argument("--library", default=PLAIN, help="none, horovod or dense-METHOD (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=SHORT, help="to take (default: %(default)s)")
    parser.add_argument("--tensors", type=int, default=TENSORS, help=f"of {ELEMENTS} elements (default: %(default)s)")
    parser.add_argument(
        "--pause", type=float, default=PAUSE_SECONDS, help="seconds between backward and step (default: %(default)s)"
    )
    print(json.dumps(work(parser.parse_args())))


if __name__ == "__main__":
    main()

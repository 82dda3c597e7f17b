"""From a bench's command line to its ranks, on the virtual cluster or on loopback, and back.

A bench starts itself: ``run`` executes its module with ``--worker FOLDER`` on every rank. All ranks see the folder: the
settings lie there, rank 0 leaves its answer there, and through it ranks have the links' rate changed while they run.
"""

import argparse
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time
from typing import Any, Optional

from bench import results

__all__ = [
    "add_common_options",
    "add_options",
    "answer",
    "measured_by_ranks",
    "request_rate",
    "run",
    "settings_of",
    "where",
]

_SETTINGS, _ANSWER = "settings.json", "answer.json"
_RATE_WANTED, _RATE_SET = "rate.wanted", "rate.set"
_POLL_SECONDS = 0.05
_RATE_SECONDS = 60.0
# Else the memory that one system's step returns to the kernel is what the next one's faults in again: up to a tenth of
# its step.
_KEPT_MEMORY = {"MALLOC_TRIM_THRESHOLD_": str(1 << 34), "MALLOC_MMAP_THRESHOLD_": str(32 << 20)}


def add_options(parser: argparse.ArgumentParser) -> None:
    """What every bench of this kind can be told: where to run, within what bounds, and where its files go."""
    parser.add_argument("--hosts", type=int, default=4, help="of the cluster, one rank each (default: %(default)s)")
    parser.add_argument(
        "--rate", default="200mbit", help="of each direction of each link, or unshaped (default: %(default)s)"
    )
    parser.add_argument("--np", type=int, default=2, help="ranks with --local (default: %(default)s)")
    parser.add_argument(
        "--timeout", type=float, default=3600.0, help="seconds, after which all ranks are ended (default: %(default)s)"
    )
    add_common_options(parser)


def add_common_options(parser: argparse.ArgumentParser) -> None:
    """Those of ``add_options`` that also fit a bench with several clusters."""
    parser.add_argument(
        "--local",
        action="store_true",
        help="ranks on loopback instead of the cluster; bandwidth claims need the cluster",
    )
    parser.add_argument("--threads", type=int, default=1, help="OMP_NUM_THREADS of each rank (default: %(default)s)")
    parser.add_argument("--directory", type=pathlib.Path, default=results.RESULTS, help=argparse.SUPPRESS)
    parser.add_argument("--worker", type=pathlib.Path, help=argparse.SUPPRESS)  # a rank; the folder of the launcher


def where(args: argparse.Namespace) -> str:
    """The part of a result's name that tells where it was measured."""
    return f"{args.np}xlocal" if args.local else f"{args.hosts}x{args.rate}"


# ---- Launcher


def measured_by_ranks(
    module: str, args: argparse.Namespace, *, keep_memory: bool = True, own_cores: bool = False
) -> dict[str, Any]:
    """Runs the module on every rank, as ``add_options`` says, and returns rank 0's answer.

    Args:
        module: such as ``bench.train``.
        args: the bench's own.
        keep_memory: as for ``run``.
        own_cores: as for ``run``.

    Raises:
        SystemExit: there is none; the message says why.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        ranks = args.np if args.local else args.hosts
        status = run(
            module,
            vars(args),
            folder,
            ranks=ranks,
            rate=None if args.local else args.rate,
            timeout=args.timeout,
            keep_memory=keep_memory,
            own_cores=own_cores,
        )
        if status != 0 or not (folder / _ANSWER).exists():
            raise SystemExit(f"{module}: the ranks ended with status {status}; their output is above.")
        return json.loads((folder / _ANSWER).read_text())


def run(
    module: str,
    settings: dict[str, Any],
    folder: pathlib.Path,
    *,
    ranks: int,
    rate: Optional[str],
    timeout: float,
    keep_memory: bool = True,
    own_cores: bool = False,
) -> int:
    """Runs the module with ``--worker`` on every rank, waits for its end and returns its exit status.

    Args:
        module: such as ``bench.train``.
        settings: for ``settings_of`` in the ranks; ``threads`` is OMP_NUM_THREADS.
        folder: for what launcher and ranks tell each other.
        ranks: number of ranks, one a host.
        rate: of the cluster's links, until the ranks ask for another; None: on loopback.
        timeout: seconds, after which all ranks are ended.
        keep_memory: ranks keep what they free, so that systems which take turns in one process do not pay for each
            other's memory.
        own_cores: as for ``Cluster``.

    Raises:
        SystemExit: there is no cluster to be had, or the ranks outlived ``timeout``.
    """
    from bench.cluster import ClusterError

    # As a file: horovodrun takes options that resemble its own for its own, also behind the command.
    _replace(folder / _SETTINGS, json.dumps(settings, default=str))
    argv = [sys.executable, "-m", module, "--worker", str(folder)]
    env = {
        **os.environ,
        "OMP_NUM_THREADS": str(settings["threads"]),
        "PYTHONUNBUFFERED": "1",
        **(_KEPT_MEMORY if keep_memory else {}),
    }
    try:
        if rate is None:
            return _run_local(argv, env, ranks, timeout)
        return _run_on_cluster(argv, env, ranks, rate, own_cores, timeout, folder)
    except ClusterError as error:
        raise SystemExit(f"{module}: {error}") from None


def _run_local(argv, env, ranks, timeout) -> int:
    from bench.cluster.processes import run_bounded

    print("loopback, no shaping: bandwidth claims need the cluster", flush=True)
    command = [str(pathlib.Path(sys.executable).with_name("horovodrun")), "-np", str(ranks), "--gloo", *argv]
    path = os.pathsep.join(filter(None, [str(results.REPOSITORY), env.get("PYTHONPATH")]))
    return run_bounded(command, timeout=timeout, env={**env, "PYTHONPATH": path}).returncode


def _run_on_cluster(argv, env, hosts, rate, own_cores, timeout, folder) -> int:
    from bench.cluster import Cluster

    with Cluster(hosts=hosts, rate=rate, own_cores=own_cores) as cluster:
        # The ranks are another process's, so that this one can shape the links meanwhile; the cluster's end ends them
        # in any case.
        command = [
            sys.executable,
            "-m",
            "bench.cluster",
            "run",
            "--name",
            cluster.name,
            "--timeout",
            f"{timeout:g}",
            "--",
            *argv,
        ]
        with subprocess.Popen(command, cwd=results.REPOSITORY, env=env, stdin=subprocess.DEVNULL) as ranks:
            try:
                while ranks.poll() is None:
                    _serve_rate(folder, cluster)
                    time.sleep(_POLL_SECONDS)
            finally:
                if ranks.poll() is None:
                    ranks.terminate()
        return ranks.returncode


def _serve_rate(folder, cluster) -> None:
    wanted, done = _read(folder / _RATE_WANTED), _read(folder / _RATE_SET)
    if wanted != done:
        cluster.set_rate(wanted.split()[1])
        _replace(folder / _RATE_SET, wanted)


# ---- Rank


def settings_of(folder: pathlib.Path) -> argparse.Namespace:
    """What the launcher was told."""
    return argparse.Namespace(**json.loads((folder / _SETTINGS).read_text()))


def answer(folder: pathlib.Path, payload: dict[str, Any]) -> None:
    """Rank 0: what ``measured_by_ranks`` returns in the launcher."""
    _replace(folder / _ANSWER, json.dumps(payload))


def request_rate(folder: pathlib.Path, number: int, rate: str) -> None:
    """Rank 0 on the cluster: has the rate of all links changed and returns when they have it.

    Args:
        folder: of the launcher.
        number: of this request, from 1; no two are alike.
        rate: as for ``Cluster``.

    Raises:
        TimeoutError: the launcher does not answer.
    """
    wanted = f"{number} {rate}"
    _replace(folder / _RATE_WANTED, wanted)
    deadline = time.monotonic() + _RATE_SECONDS
    while _read(folder / _RATE_SET) != wanted:
        if time.monotonic() > deadline:
            raise TimeoutError(f"the launcher did not set the links to {rate} within {_RATE_SECONDS:g} s")
        time.sleep(_POLL_SECONDS / 5)


def _read(path: pathlib.Path) -> str:
    try:
        return path.read_text()
    except FileNotFoundError:
        return ""


def _replace(path: pathlib.Path, text: str) -> None:
    """In one move, so that nobody reads a half."""
    temporary = path.with_name(f"{path.name}.new")
    temporary.write_text(text)
    os.replace(temporary, path)

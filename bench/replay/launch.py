"""Starts the ranks of a replay, on the virtual cluster or on loopback, and shapes the links once they are warm."""

import json
import os
import pathlib
import subprocess
import sys
import tempfile
import threading
from typing import Any, Optional

from bench.cluster import Cluster
from bench.cluster.processes import run_bounded
from bench.replay.schedule import Scale

__all__ = ["measure"]

_REPOSITORY = pathlib.Path(__file__).resolve().parents[2]


def measure(spec: dict[str, Any], *, hosts: int, bits: Optional[int], local: bool, timeout: float) -> dict[str, Any]:
    """Runs the workers and returns what rank 0 found.

    Args:
        spec: for the workers: network, size, dilation, systems, rounds, steps, timeline.
        hosts: one rank on each; with ``local`` the number of ranks.
        bits: of the model's links, bits per second; None: unshaped.
        local: on loopback, without any shaping.
        timeout: seconds.
    """
    with tempfile.TemporaryDirectory(prefix="replay-") as name:
        folder = pathlib.Path(name)
        (folder / "spec.json").write_text(json.dumps(spec))
        argv = [sys.executable, "-m", "bench.replay.worker", str(folder)]
        env = {"OMP_NUM_THREADS": "1", **Scale(spec["size"], spec["dilation"]).environment()}
        if spec["timeline"]:
            env["HOROVOD_TIMELINE"] = "DYNAMIC"
        if local:
            (folder / "shaped").touch()
            code, output = _run_locally(argv, hosts, env, timeout)
        else:
            code, output = _run_on_cluster(argv, hosts, env, timeout, folder, bits)
        result = folder / "result.json"
        if code != 0 or not result.exists():
            raise SystemExit(f"the ranks ended with exit code {code}:\n{output[:8000]}")
        return json.loads(result.read_text())


def _run_on_cluster(argv, hosts, env, timeout, folder, bits):
    with Cluster(hosts=hosts) as cluster:
        done = threading.Event()
        shaper = threading.Thread(
            target=_shape_when_warm, args=(cluster.name, bits, folder, done), name="replay-shaper"
        )
        shaper.start()
        try:
            ended = cluster.run(argv, timeout=timeout, env={**env, "GLOO_SOCKET_IFNAME": "eth0"})
        finally:
            done.set()
            shaper.join()
    return ended.returncode, ended.stdout


def _shape_when_warm(cluster_name: str, bits: Optional[int], folder: pathlib.Path, done: threading.Event) -> None:
    # By a process of its own: a Cluster is not thread-safe, and ours is busy running the ranks.
    while not (folder / "warm").exists():
        if done.wait(0.05):
            return
    if bits is not None:
        subprocess.run(
            [sys.executable, "-m", "bench.cluster", "rate", f"{bits}bit", "--name", cluster_name],
            cwd=_REPOSITORY,
            check=True,
        )
    (folder / "shaped").touch()


def _run_locally(argv, ranks, env, timeout):
    launcher = pathlib.Path(sys.executable).with_name("horovodrun")
    path = os.pathsep.join([str(launcher.parent), os.environ.get("PATH", "")])
    environment = {**os.environ, **env, "PATH": path, "PYTHONPATH": str(_REPOSITORY)}
    # Asked to end, horovodrun ends its ranks.
    ended = run_bounded([str(launcher), "-np", str(ranks), *argv], timeout=timeout, env=environment, capture=True)
    return ended.returncode, ended.stdout

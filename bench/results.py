"""Where figures come from and where they go: environment, JSON files, percentiles."""

import json
import pathlib
import platform
import subprocess
import sys
from typing import Any, Dict, Optional, Sequence

import numpy as np

RESULTS = pathlib.Path(__file__).parent / "results"


def environment() -> Dict[str, Any]:
    """Commit, versions, processor and command: what one needs to judge or repeat a figure."""
    import horovod
    import torch

    import poseidon_hvd

    cpu = next((line.split(":", 1)[1].strip() for line in open("/proc/cpuinfo") if line.startswith("model name")), platform.machine())
    return {
        "commit": _git("rev-parse", "--short", "HEAD"),
        "uncommitted_changes": bool(_git("status", "--porcelain", "--untracked-files=no", "--", ".", ":!bench/results")),
        "poseidon_hvd": poseidon_hvd.__version__,
        "horovod": horovod.__version__,
        "torch": torch.__version__,
        "torch_threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "cpu": cpu,
        "cores": len(_affinity()),
        "command": " ".join([pathlib.Path(sys.executable).name, *sys.argv]),
    }


def summary(seconds: Sequence[float]) -> Dict[str, float]:
    """Median, 10th and 90th percentile, and how many."""
    values = np.asarray(seconds, dtype=float)
    return {"median": float(np.median(values)), "p10": float(np.percentile(values, 10)), "p90": float(np.percentile(values, 90)),
            "count": int(values.size)}


def write(name: str, payload: Dict[str, Any], directory: Optional[pathlib.Path] = None) -> pathlib.Path:
    """Writes ``<name>.json`` with the environment beside the payload and returns its path."""
    directory = directory or RESULTS
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"{name}.json"
    path.write_text(json.dumps({"environment": environment(), **payload}, indent=2) + "\n")
    return path


def _git(*arguments: str) -> str:
    root = pathlib.Path(__file__).parent
    done = subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True, check=False)
    return done.stdout.strip()


def _affinity():
    import os

    return os.sched_getaffinity(0)

"""Where figures come from and where they go: environment, JSON files, percentiles.

Keys that files of several benches share, and ``bench.compare`` reads: ``environment``; ``settings``;
``seconds_per_step``, name of a system -> ``summary``; and, where single steps were kept, ``samples``, name of a system
-> seconds.
"""

import hashlib
import json
import os
import pathlib
import platform
import subprocess
import sys
from collections.abc import Sequence
from typing import Any, Optional

import numpy as np

REPOSITORY = pathlib.Path(__file__).resolve().parent.parent
RESULTS = REPOSITORY / "bench" / "results"


def environment() -> dict[str, Any]:
    """Commit, versions, processor and command: what one needs to judge or repeat a figure."""
    import horovod
    import torch

    import poseidon_hvd

    processors = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
    cpu = next(
        (line.split(":", 1)[1].strip() for line in processors if line.startswith("model name")), platform.machine()
    )
    return {
        "commit": _git("rev-parse", "--short", "HEAD"),
        # Of what decides a figure; others may be at work on tests or documents.
        "uncommitted_changes": bool(
            _git("status", "--porcelain", "--untracked-files=no", "--", "bench/*.py", "poseidon_hvd", "csrc")
        ),
        "poseidon_hvd": poseidon_hvd.__version__,
        "extension_sha1": hashlib.sha1(pathlib.Path(poseidon_hvd._native._C.__file__).read_bytes()).hexdigest()[:12],
        "horovod": horovod.__version__,
        "torch": torch.__version__,
        "torch_threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "cpu": cpu,
        "cores": len(os.sched_getaffinity(0)),
        "command": command(),
    }


def command() -> str:
    """The command line of this process, as one types it in the repository's root."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    path = pathlib.Path(sys.argv[0]).resolve()
    program = (
        ["-m", spec.name]
        if spec is not None
        else [str(path.relative_to(REPOSITORY)) if path.is_relative_to(REPOSITORY) else path.name]
    )
    return " ".join(["python", *program, *sys.argv[1:]])


def summary(seconds: Sequence[float]) -> dict[str, float]:
    """Median, 10th and 90th percentile, and how many."""
    values = np.asarray(seconds, dtype=float)
    return {
        "median": float(np.median(values)),
        "p10": float(np.percentile(values, 10)),
        "p90": float(np.percentile(values, 90)),
        "count": int(values.size),
    }


def write(name: str, payload: dict[str, Any], directory: Optional[pathlib.Path] = None) -> pathlib.Path:
    """Writes ``<name>.json`` with the environment beside the payload and returns its path.

    A payload with an ``environment`` of its own, taken in a rank for example, keeps it.
    """
    directory = directory or RESULTS
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"{name}.json"
    path.write_text(
        json.dumps({"environment": payload.get("environment") or environment(), **payload}, indent=2) + "\n"
    )
    return path


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=REPOSITORY, capture_output=True, text=True, check=False)
    return done.stdout.strip()

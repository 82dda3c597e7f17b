"""Builds and loads ``_local_world``, the extension for ranks as threads: ``python -m harness.native`` builds it.

It hands C++ objects to ``poseidon_hvd._C``, so both must come from one build: it is built in the folder that made the
``_C`` in use.
"""

import fcntl
import filecmp
import functools
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

from poseidon_hvd import _C  # the package loads torch, Horovod and the extension in the right order

ROOT = Path(__file__).resolve().parents[2]
# A build folder elsewhere than in build/.
_FOLDER_VARIABLE = "POSEIDON_BUILD_FOLDER"
_BUILD_SECONDS = 900


class NotBuilt(AssertionError):
    """A failure, never a skip: most tests of what travels between ranks need the extension."""


def _folders() -> list[Path]:
    given = os.environ.get(_FOLDER_VARIABLE)
    return [Path(given)] if given else sorted(cache.parent for cache in ROOT.glob("build/*/CMakeCache.txt"))


def _same_build(folder: Path) -> bool:
    built = folder / Path(_C.__file__).name
    return built.exists() and filecmp.cmp(built, _C.__file__, shallow=False)


def _cmake(folder: Path) -> str:
    lines = (folder / "CMakeCache.txt").read_text().splitlines()
    return next(line.partition("=")[2] for line in lines if line.startswith("CMAKE_COMMAND:"))


def build() -> Path:
    """The extension's file, made or brought up to date where it must be."""
    folders = _folders()
    folder = next(filter(_same_build, folders), None)
    if folder is None:
        where = ", ".join(map(str, folders)) or f"{ROOT / 'build'}, which has no build"
        raise NotBuilt(
            f"{_C.__file__} is not what was last built in {where}. Run `make build`, or name its build "
            f"folder in {_FOLDER_VARIABLE}."
        )
    with open(folder / ".local_world.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        command = [_cmake(folder), "--build", str(folder), "--target", "_local_world"]
        built = subprocess.run(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=_BUILD_SECONDS
        )
    if built.returncode != 0:
        raise NotBuilt(f"_local_world was not built in {folder}:\n{built.stdout[-5000:]}")
    if not _same_build(folder):
        raise NotBuilt(f"The sources have changed since {_C.__file__} was built. Run `make build`.")
    return folder / Path(_C.__file__).name.replace("_C", "_local_world", 1)


@functools.cache
def local_world():
    """The loaded module."""
    spec = importlib.util.spec_from_file_location("_local_world", build())
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    sys.stdout.write(f"{build()}\n")

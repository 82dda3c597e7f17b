"""Runs a script under the real ``horovodrun``, with a time limit that nothing survives.

``horovodrun`` gives every rank a session of its own, so a process group is not enough to find them: every process of a
launch inherits a unique environment variable, and that is what we look for.
"""

import contextlib
import dataclasses
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Optional

import psutil

TESTS = Path(__file__).resolve().parent.parent
_MARK = "POSEIDON_TEST_LAUNCH"
START_SECONDS = 180.0


class LauncherMissing(AssertionError):
    """``horovodrun`` is not there. A failure, never a skip: these tests are the proof that the package works."""


@dataclasses.dataclass
class Launched:
    """What a launch left behind.

    Attributes:
        returncode: of ``horovodrun``; None if it had to be killed.
        output: stdout and stderr of all ranks.
        seconds: from start to end.
        ended: when ``horovodrun`` ended, as ``time.time()``.
        orphans: command lines of processes that were alive after ``horovodrun`` had ended by itself; they were killed.
    """

    returncode: Optional[int]
    output: str
    seconds: float
    ended: float
    orphans: list[str]

    @property
    def timed_out(self) -> bool:
        return self.returncode is None

    def expect_success(self) -> "Launched":
        assert self.returncode == 0, f"{self}"
        assert not self.orphans, f"left behind: {self.orphans}"
        return self

    def __str__(self) -> str:
        state = "killed at its time limit" if self.timed_out else f"exit code {self.returncode}"
        return f"launch: {state} after {self.seconds:.0f} s\n{self.output[-20000:]}"


def horovodrun() -> str:
    beside = Path(sys.executable).parent / "horovodrun"
    found = str(beside) if beside.exists() else shutil.which("horovodrun")
    if found is None:
        raise LauncherMissing(
            f"horovodrun is neither beside {sys.executable} nor on PATH; multi-process tests need it."
        )
    return found


def _package_folder() -> str:
    """Where this process imports poseidon_hvd from, so that the ranks test the same copy."""
    spec = importlib.util.find_spec("poseidon_hvd")
    assert spec is not None and spec.origin is not None, "poseidon_hvd is not installed"
    return str(Path(spec.origin).parent.parent)


def environment(extra: Mapping[str, str] = {}) -> dict[str, str]:
    """Of a rank: what the tests depend on is set, and nothing of the caller's that would change results is left."""
    env = {key: value for key, value in os.environ.items() if not key.startswith(("HOROVOD_", "POSEIDON_"))}
    env["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), env.get("PATH", "")])
    env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(TESTS), _package_folder(), env.get("PYTHONPATH", "")]))
    env.update(OMP_NUM_THREADS="1", PYTHONUNBUFFERED="1", PYTHONFAULTHANDLER="1")
    env.update(extra)
    return env


def _alive(mark: str) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(_MARK) == mark and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.Error:
            continue  # ended meanwhile, or not ours
    return found


def _kill(processes: Sequence[psutil.Process]) -> None:
    for process in processes:
        with contextlib.suppress(psutil.Error):
            process.kill()
    psutil.wait_procs(processes, timeout=10)


def launch(
    ranks: int,
    arguments: Sequence[str],
    *,
    seconds: float,
    env: Mapping[str, str] = {},
    options: Sequence[str] = (),
    after: Optional[str] = None,
) -> Launched:
    """``horovodrun -np ranks options... python arguments...`` on loopback; after ``seconds`` everything is killed."""
    return run(
        [horovodrun(), "-np", str(ranks), *options, sys.executable, *arguments], seconds=seconds, env=env, after=after
    )


def _wait(process: "subprocess.Popen[str]", seconds: float, output: int, after: Optional[str]) -> int:
    """Raises ``subprocess.TimeoutExpired`` when the process outlives ``seconds``, which count from when ``after`` is
    in the output.
    """
    if after is not None:
        begin = time.monotonic()
        while process.poll() is None and after.encode() not in os.pread(output, os.fstat(output).st_size, 0):
            if time.monotonic() > begin + START_SECONDS:
                raise subprocess.TimeoutExpired(process.args, START_SECONDS)
            time.sleep(0.2)
    return process.wait(timeout=seconds)


def run(
    command: Sequence[str], *, seconds: float, env: Mapping[str, str] = {}, after: Optional[str] = None
) -> Launched:
    """A program that starts ranks; after ``seconds`` it is killed with all that it has started.

    With ``after`` the seconds count from when that text is in the output: how fast this machine starts ranks does not
    matter then.
    """
    mark = uuid.uuid4().hex
    begin = time.monotonic()
    with tempfile.TemporaryFile("w+", errors="replace") as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**environment(env), _MARK: mark},
            start_new_session=True,
        )
        returncode: Optional[int] = None
        orphans: list[str] = []
        try:
            returncode = _wait(process, seconds, output.fileno(), after)
            ended = time.time()
            left = _alive(mark)
            if left:  # those that are just ending are none
                _, left = psutil.wait_procs(left, timeout=5)
            for orphan in left:
                with contextlib.suppress(psutil.Error):
                    orphans.append(" ".join(orphan.cmdline()))
        except subprocess.TimeoutExpired:
            ended = time.time()
        finally:
            _kill(_alive(mark))
            process.wait(timeout=10)
        output.seek(0)
        text = output.read()
    return Launched(returncode, text, time.monotonic() - begin, ended, orphans)

"""Processes inside namespaces: how they are started, found, bounded in time and ended.

Signals go through pidfds: between looking a process up and signalling it, its number cannot pass to another process.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import IO

from bench.cluster.errors import ClusterError, RunTimeout
from bench.cluster.layout import NETNS_RUN, Layout

__all__ = ["carries", "end_all", "inside", "pids_inside", "run_bounded", "start_time"]

_TERM_SECONDS = 3.0
_KILL_SECONDS = 5.0


def inside(layout: Layout, host: str, argv: Sequence[str]) -> list[str]:
    """The command that runs ``argv`` in a host's namespace, under its name, with its /etc files, and on its cores if it
    has its own.

    Every link of the chain replaces the one before, so the process started is in the end ``argv`` itself.
    """
    rename = 'hostname "$0" && exec "$@"'
    command = ["ip", "netns", "exec", layout.namespace(host), "unshare", "--uts", "sh", "-c", rename, host, *argv]
    cores = layout.cores_of(host)
    return ["taskset", "-c", ",".join(map(str, cores)), *command] if cores else command


def pids_inside(namespaces: Iterable[str]) -> list[int]:
    """Processes whose network namespace is one of these."""
    own = _identity("/proc/self/ns/net")
    wanted = {_identity(NETNS_RUN / namespace) for namespace in namespaces} - {own, None}
    if not wanted:
        return []
    return [int(pid) for pid in os.listdir("/proc") if pid.isdigit() and _identity(f"/proc/{pid}/ns/net") in wanted]


def carries(tag: str) -> Callable[[int], bool]:
    """A predicate: was the process started with ``tag`` ("NAME=value") in its environment?"""
    entry = tag.encode()

    def check(pid: int) -> bool:
        try:
            with open(f"/proc/{pid}/environ", "rb") as environ:
                return entry in environ.read().split(b"\0")
        except OSError:
            return False

    return check


def end_all(namespaces: Iterable[str], only: Callable[[int], bool] = lambda pid: True) -> None:
    """Ends the processes in these namespaces: asks first, then kills, until none is left (within seconds)."""
    names = list(namespaces)
    for sig, seconds in ((signal.SIGTERM, _TERM_SECONDS), (signal.SIGKILL, _KILL_SECONDS)):
        deadline = time.monotonic() + seconds
        # Again and again: a process may have forked after it was listed.
        while (pids := [pid for pid in pids_inside(names) if only(pid)]) and time.monotonic() < deadline:
            _signal_and_wait(pids, names, sig, deadline)
        if not pids:
            return
    raise ClusterError(f"processes {pids} do not end; cleaning up again may help once they do")


def run_bounded(
    argv: Sequence[str],
    *,
    timeout: float,
    env: Mapping[str, str],
    cwd: str | os.PathLike[str] | None = None,
    stdin: int | IO[bytes] | None = subprocess.DEVNULL,
    capture: bool = False,
) -> subprocess.CompletedProcess[str]:
    """Runs a command in a session of its own and ends its process group when time is up or this process is interrupted.

    Args:
        argv: the command.
        timeout: seconds.
        env: its whole environment.
        cwd: its working directory.
        stdin: as for ``subprocess.Popen``.
        capture: keep its output (both streams in ``stdout``) instead of passing it on.

    Raises:
        RunTimeout: time is up; the message ends with the last lines of the output that was kept.
    """
    with subprocess.Popen(
        argv,
        env=dict(env),
        cwd=cwd,
        stdin=stdin,
        stdout=subprocess.PIPE if capture else None,
        stderr=subprocess.STDOUT if capture else None,
        text=True,
        errors="replace",
        start_new_session=True,
    ) as process:
        try:
            output, _ = process.communicate(timeout=timeout)
        except BaseException as error:
            tail = _end_group(process)
            if isinstance(error, subprocess.TimeoutExpired):
                raise RunTimeout(f"ended after {timeout:g} s: {' '.join(argv)}\n{tail[-2000:]}".rstrip()) from None
            raise
    return subprocess.CompletedProcess(list(argv), process.returncode, output, None)


def start_time(pid: int) -> int | None:
    """Start of a process in clock ticks since boot, which tells it from a later one of the same number; None if it
    has ended.
    """
    try:
        with open(f"/proc/{pid}/stat") as stat:
            fields = stat.read().rpartition(")")[2].split()  # the command, in brackets, may hold spaces
    except OSError:
        return None
    return None if fields[0] in "ZX" else int(fields[19])


def _end_group(process: subprocess.Popen[str]) -> str:
    """Ends a child's group and returns what it had written.

    Only while the child has not been waited for: so long its number, and the group's, cannot pass to others.
    """
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGTERM)
        _wait_readable([os.pidfd_open(process.pid)], time.monotonic() + _TERM_SECONDS)
        os.killpg(process.pid, signal.SIGKILL)
    with contextlib.suppress(subprocess.TimeoutExpired):  # a process that left the group may hold the pipe open
        return process.communicate(timeout=_KILL_SECONDS)[0] or ""
    return ""


def _signal_and_wait(pids: list[int], namespaces: list[str], sig: signal.Signals, deadline: float) -> None:
    descriptors = []
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            descriptors.append((pid, os.pidfd_open(pid)))
    still_inside = set(pids_inside(namespaces))  # looked up again, now that the numbers are pinned
    signalled = []
    for pid, descriptor in descriptors:
        if pid not in still_inside:
            os.close(descriptor)
            continue
        signalled.append(descriptor)
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(descriptor, sig)
    _wait_readable(signalled, deadline)


def _wait_readable(descriptors: list[int], deadline: float) -> None:
    """Waits until each process has ended, and closes the descriptors."""
    poll = select.poll()
    for descriptor in descriptors:
        poll.register(descriptor, select.POLLIN)
    waiting = set(descriptors)
    while waiting and (remaining := deadline - time.monotonic()) > 0:
        for descriptor, _ in poll.poll(remaining * 1000):
            poll.unregister(descriptor)
            waiting.discard(descriptor)
    for descriptor in descriptors:
        os.close(descriptor)


def _identity(path: str | os.PathLike[str]) -> tuple[int, int] | None:
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_dev, status.st_ino

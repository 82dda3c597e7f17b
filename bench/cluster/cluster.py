"""The cluster as a Python object."""

from __future__ import annotations

import atexit
import dataclasses
import os
import secrets
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from bench.cluster import horovodrun, network, processes, requirements, shaping, signals, sshd, state, teardown
from bench.cluster.errors import ClusterError
from bench.cluster.layout import Layout

__all__ = ["Cluster"]

_TAG = "POSEIDON_CLUSTER_RUN"
_START_SECONDS = 30.0
_REPOSITORY = Path(__file__).resolve().parents[2]


class Cluster:
    """N hosts on this machine, each in namespaces of its own, joined by links of one rate.

    ``with Cluster(hosts=4, rate="200mbit") as cluster:`` makes it and takes it down, also on an exception, SIGINT,
    SIGTERM, SIGHUP or exit. After SIGKILL the next ``Cluster`` or ``python -m bench.cluster down`` cleans up. Not
    thread-safe.

    Args:
        hosts: number of hosts, named host0, host1, ...
        rate: of each direction of each link: "200mbit", "1gbit", or "unshaped".
        name: to reach it from other processes; by default one of its own.
        own_cores: each host computes on its own share of the machine's cores, as many as every other host.

    Raises:
        ClusterError: the cores cannot be shared out evenly.
    """

    def __init__(
        self, *, hosts: int, rate: str = shaping.UNSHAPED, name: str | None = None, own_cores: bool = False
    ) -> None:
        cores = tuple(sorted(os.sched_getaffinity(0))) if own_cores else ()
        self._layout = Layout(name if name is not None else f"p{os.getpid()}-{secrets.token_hex(3)}", hosts, cores)
        self._rate = shaping.parse_rate(rate)
        self._token = secrets.token_hex(8)
        self._owner_pid: int | None = None
        self._daemons: list[subprocess.Popen[bytes]] = []
        self._saved_handlers: dict[Any, Any] = {}

    @classmethod
    def attach(cls, name: str) -> Cluster:
        """A cluster that is already up; this object uses it and never takes it down."""
        found = state.load(name)
        if found is None or not found.usable:
            known = ", ".join(sorted(teardown.known())) or "none"
            raise ClusterError(f"no cluster {name!r} is up (known: {known}): python -m bench.cluster up --name {name}")
        cluster = cls(hosts=found.hosts, rate=found.rate, name=name)
        cluster._layout = found.layout
        cluster._token = found.token
        return cluster

    @property
    def name(self) -> str:
        return self._layout.name

    @property
    def hosts(self) -> list[str]:
        return self._layout.host_names

    @property
    def rate(self) -> str:
        return shaping.format_rate(self._rate)

    def address(self, host: str) -> str:
        return self._layout.address(host)

    def __enter__(self) -> Cluster:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def start(self) -> None:
        """Makes the cluster; when it returns every host accepts logins. On an error nothing is left.

        Raises:
            ClusterError: something is missing on this machine, or a cluster of this name is up.
        """
        self._saved_handlers = signals.unwind_on_exit_signals()
        try:
            with signals.deferred():
                self._bring_up()
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """Takes the cluster down if this object made it.

        Idempotent and bounded in time; a signal meanwhile takes effect afterwards.
        """
        try:
            with signals.deferred():
                if self._owner_pid == os.getpid():  # a fork inherits this object, not the cluster
                    self._tear_down()
                self._release()
        finally:
            self._restore_signals()

    def detach(self) -> None:
        """Leaves the cluster up when this process ends."""
        self._save(ready=True, owner_pid=None)
        for daemon in self._daemons:
            daemon.returncode = 0  # not ours to wait for any more
        self._release()
        self._restore_signals()

    def set_rate(self, rate: str) -> None:
        """Changes the rate of every link, both directions, while traffic flows."""
        self._rate = shaping.parse_rate(rate)
        network.set_rate(self._layout, self._rate)
        found = state.load(self.name)
        if found is not None and found.token == self._token:
            state.save(dataclasses.replace(found, rate=self.rate))

    def cut(self, host: str) -> None:
        """Pulls the host's cable: frames are lost in both directions until ``restore``."""
        network.set_link(self._layout, host, up=False)

    def restore(self, host: str) -> None:
        """Puts the cable back."""
        network.set_link(self._layout, host, up=True)

    def shaped_rates(self) -> dict[str, tuple[int | None, int | None]]:
        """Bits per second of each link as the kernel has them: {host: (sending, receiving)}."""
        return network.shaped_rates(self._layout)

    def byte_counters(self) -> dict[str, tuple[int, int]]:
        """{host: (sent, received)} bytes of each host's interface since the cluster came up.

        See docs/cluster.md on headers.
        """
        return network.byte_counters(self._layout)

    def popen(self, host: str, argv: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
        """Starts a command on a host, with ``subprocess.Popen``'s options. ``stop`` ends it at the latest."""
        return subprocess.Popen(processes.inside(self._layout, host, argv), **options)

    def exec(
        self,
        host: str,
        argv: Sequence[str],
        *,
        timeout: float = 60.0,
        env: Mapping[str, str] | None = None,
        cwd: str | os.PathLike[str] | None = None,
        stdin: int | IO[bytes] | None = subprocess.DEVNULL,
        capture: bool = True,
    ) -> subprocess.CompletedProcess[str]:
        """Runs a command on a host and waits for it.

        Args:
            host: "host0", ...
            argv: the command.
            timeout: seconds, after which it is ended with all its descendants on any host.
            env: variables beside those of this process.
            cwd: working directory.
            stdin: as for ``subprocess.Popen``.
            capture: keep its output (both streams in ``stdout``) instead of passing it on.

        Raises:
            RunTimeout: it outlived ``timeout``.
        """
        run_id = secrets.token_hex(8)
        command = processes.inside(self._layout, host, argv)
        environment = {**os.environ, **(env or {}), _TAG: run_id}
        try:
            return processes.run_bounded(
                command, timeout=timeout, env=environment, cwd=cwd, stdin=stdin, capture=capture
            )
        finally:
            # A rank started through ssh survives its ssh; horovodrun passes the environment on, which tells it.
            processes.end_all(map(self._layout.namespace, self.hosts), processes.carries(f"{_TAG}={run_id}"))

    def run(
        self,
        argv: Sequence[str],
        *,
        np: int | None = None,
        timeout: float = 600.0,
        env: Mapping[str, str] | None = None,
        cwd: str | os.PathLike[str] | None = None,
        capture: bool = True,
        horovod_options: Sequence[str] = (),
    ) -> subprocess.CompletedProcess[str]:
        """Runs a training command with an unmodified horovodrun, one rank a host, launched from host0.

        This Python's directory comes first in PATH, and the repository in PYTHONPATH so that ranks can import
        ``bench``.

        Args:
            argv: the training command, such as ["python", "train.py"].
            np: number of ranks, on the first hosts; by default one on every host.
            timeout: seconds, after which every rank is ended.
            env: variables beside those of this process.
            cwd: working directory of all ranks.
            capture: keep the output of all ranks in ``stdout`` instead of passing it on.
            horovod_options: more options of horovodrun.

        Raises:
            RunTimeout: it outlived ``timeout``.
        """
        command = horovodrun.command(
            self._layout, argv, np=len(self.hosts) if np is None else np, options=horovod_options
        )
        environment = {**os.environ, **(env or {})}
        environment["PATH"] = _prepend(str(Path(sys.executable).parent), environment.get("PATH"))
        environment["PYTHONPATH"] = _prepend(str(_REPOSITORY), environment.get("PYTHONPATH"))
        return self.exec(self.hosts[0], command, timeout=timeout, env=environment, cwd=cwd, capture=capture)

    def _bring_up(self) -> None:
        requirements.require()
        self._claim()
        network.create(self._layout)
        network.set_rate(self._layout, self._rate)
        sshd.write_files(self._layout)
        deadline = time.monotonic() + _START_SECONDS
        for host in self.hosts:
            self._daemons.append(sshd.start_daemon(self._layout, host))
        for host, daemon in zip(self.hosts, self._daemons):
            sshd.wait_listening(self._layout, host, daemon, deadline)
        self._save(ready=True, owner_pid=os.getpid())

    def _tear_down(self) -> None:
        with state.locked():
            found = state.load(self.name)
            # Someone may have taken it down and made another of the same name.
            if found is None or found.token == self._token:
                teardown.remove_cluster(self.name)
        for daemon in self._daemons:
            daemon.wait()

    def _claim(self) -> None:
        """Makes the name ours, after cleaning what dead processes left."""
        with state.locked():
            teardown.remove_orphans()
            found = state.load(self.name)
            if found is not None and (found.usable or found.owner_alive):
                holder = "it stands by itself" if found.owner_pid is None else f"process {found.owner_pid} holds it"
                raise ClusterError(
                    f"cluster {self.name!r} is up ({holder}): python -m bench.cluster down "
                    f"--name {self.name}, or another --name"
                )
            teardown.remove_cluster(self.name)
            self._owner_pid = os.getpid()
            atexit.register(self.stop)
            self._layout.run_dir.mkdir(mode=0o700)
            self._save(ready=False, owner_pid=os.getpid())

    def _save(self, *, ready: bool, owner_pid: int | None) -> None:
        owner_start = None if owner_pid is None else processes.start_time(owner_pid)
        state.save(
            state.State(
                self.name, len(self.hosts), self.rate, self._token, ready, owner_pid, owner_start, self._layout.cores
            )
        )

    def _release(self) -> None:
        self._owner_pid = None
        self._daemons = []
        atexit.unregister(self.stop)

    def _restore_signals(self) -> None:
        saved, self._saved_handlers = self._saved_handlers, {}
        signals.restore(saved)


def _prepend(entry: str, path: str | None) -> str:
    return f"{entry}{os.pathsep}{path}" if path else entry

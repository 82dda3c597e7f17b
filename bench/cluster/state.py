"""What a cluster leaves on disk so that another process can find it, use it, or clean up after a crash."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields

from bench.cluster.layout import RUN_ROOT, Layout
from bench.cluster.processes import start_time

__all__ = ["State", "all_names", "load", "locked", "save"]

_FILE = "state.json"


@dataclass(frozen=True)
class State:
    """One cluster.

    Attributes:
        name: of the cluster.
        hosts: number of hosts.
        rate: as text.
        token: drawn when it was made; tells it from a later cluster of the same name.
        ready: everything was up at the time of writing.
        owner_pid: the process that will take it down, None once it stands by itself.
        owner_start: that process's start time.
        cores: as for ``Layout``.
    """

    name: str
    hosts: int
    rate: str
    token: str
    ready: bool
    owner_pid: int | None
    owner_start: int | None
    cores: tuple[int, ...] = ()

    @property
    def layout(self) -> Layout:
        return Layout(self.name, self.hosts, tuple(self.cores))

    @property
    def owner_alive(self) -> bool:
        return (
            self.owner_pid is not None
            and self.owner_start is not None
            and start_time(self.owner_pid) == self.owner_start
        )

    @property
    def usable(self) -> bool:
        return self.ready and (self.owner_pid is None or self.owner_alive)


def save(state: State) -> None:
    """Replaces the state file in one move; the run directory exists."""
    run = state.layout.run_dir
    temporary = run / f"{_FILE}.new"
    # A checkout that does not know a field would take the cluster for a left-over.
    told = {name: value for name, value in asdict(state).items() if name != "cores" or value}
    temporary.write_text(json.dumps(told, indent=2) + "\n")
    os.replace(temporary, run / _FILE)


def load(name: str) -> State | None:
    """The state of a cluster, None if there is none or the file is damaged (then the cluster counts as left over)."""
    try:
        found = json.loads((RUN_ROOT / name / _FILE).read_text())
        return State(**{field.name: found[field.name] for field in fields(State) if field.name in found})
    except (OSError, ValueError, TypeError):
        return None


def all_names() -> list[str]:
    """Clusters with a run directory."""
    return sorted(path.name for path in RUN_ROOT.iterdir() if path.is_dir()) if RUN_ROOT.is_dir() else []


@contextlib.contextmanager
def locked() -> Iterator[None]:
    """Holds the machine's one lock on making and removing clusters; not reentrant.

    The kernel drops it when its holder dies.
    """
    RUN_ROOT.mkdir(mode=0o700, parents=True, exist_ok=True)
    lock = os.open(RUN_ROOT, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)

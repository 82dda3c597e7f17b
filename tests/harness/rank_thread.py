"""One rank of one run of a ``World``: its thread, and what its optimizers ask for."""

import ctypes
import itertools
import sys
import threading
import traceback
from collections import defaultdict
from collections.abc import Iterator
from typing import Any, Callable, Optional

from poseidon_hvd import _runtime

from .local_horovod import LocalHorovod
from .meeting import Broken
from .ranks import DEFAULT_SEED, Rank
from .seeding import own_generator

# Kinds of ends that are no exceptions of the rank's own.
STOPPED = "stopped"
STUCK = "stuck"


class RankWorld(_runtime.World):
    """In place of the process's."""

    def __init__(self, world, rank: int, horovod: LocalHorovod) -> None:
        self._world, self._rank, self._horovod = world, rank, horovod
        self._run = world.runs
        self._tags: dict[int, Iterator[int]] = defaultdict(itertools.count)

    def size(self) -> int:
        return self._world.size

    def process_set(self, given):
        return self._horovod.rank_set(given)

    def engine(self):
        return self._world.native.engine(self._rank)

    def session_tag(self, process_set: int) -> str:
        return f"{self._run}.{next(self._tags[process_set])}"

    def watch(self, optimizer) -> None:
        pass  # Horovod is not shut down under it


class RankThread:
    """Starts as a thread does.

    Attributes, once it has ended:
        result: what ``main`` returned.
        error: traceback of the exception that it raised; None without one.
        kind: name of the exception's type, or ``STOPPED`` or ``STUCK``.
    """

    def __init__(self, rank: Rank, world: RankWorld, main: Callable[[Rank], Any], ended: Callable[[int], None]) -> None:
        self.rank = rank.rank
        self.result: Any = None
        self.error: Optional[str] = None
        self.kind: Optional[str] = None
        self.stopped = False  # the run has been broken off; set by it
        self._given: Any = (rank, world, main)
        self._ended = ended
        # Daemon: one that cannot be ended does not keep the process from ending.
        self._thread = threading.Thread(target=self._run, name=f"rank-{self.rank}", daemon=True)
        self.start, self.join, self.is_alive = self._thread.start, self._thread.join, self._thread.is_alive

    def _run(self) -> None:
        rank, world, main = self._given
        self._given = None
        try:
            own_generator(DEFAULT_SEED)
            with _runtime.use_world(world):
                self.result = main(rank)
        except BaseException as error:  # SystemExit, KeyboardInterrupt: also a failure
            self.kind = STOPPED if self.stopped or isinstance(error, Broken) else type(error).__name__
            self.error = traceback.format_exc()
        finally:
            self._ended(self.rank)

    def stack(self) -> str:
        frame = sys._current_frames().get(self._thread.ident)
        return "".join(traceback.format_stack(frame)) if frame else "no Python frame\n"

    def interrupt(self) -> None:
        """Reaches it when it runs Python code again."""
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(self._thread.ident), ctypes.py_object(Broken))

    def note_stuck(self, stack: str) -> None:
        still = " and cannot be ended: it is still running" if self.is_alive() else ""
        self.kind, self.error = STUCK, f"did not come back{still}. It was here:\n{stack}"

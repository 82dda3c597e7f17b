"""What optimizers ask of the ranks around them, and what happens when Horovod is shut down and initialized again."""

import atexit
import collections
import contextvars
import gc
import itertools
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Callable, Optional

from horovod.torch.mpi_ops import ProcessSet

from ._native import _C, horovod_torch
from .config import stall_warning_seconds

if TYPE_CHECKING:
    from .optimizer import _DistributedOptimizer

_engine: Optional["_C.Engine"] = None
_optimizers: "weakref.WeakSet[_DistributedOptimizer]" = weakref.WeakSet()
_created: Iterator[int] = itertools.count()
_sessions: collections.defaultdict[int, Iterator[int]] = collections.defaultdict(itertools.count)


class World:
    """The ranks that an optimizer works with: the processes that Horovod has started.

    Tests put others in its place, in which ranks are threads of one process.
    """

    def size(self) -> int:
        """The number of ranks. Raises ValueError before ``init``."""
        size: int = horovod_torch.size()
        return size

    def process_set(self, given: ProcessSet) -> ProcessSet:
        """Maps the process set that the user gave to this world's."""
        return given

    def engine(self) -> "_C.Engine":
        """The engine of this process.

        It starts at the first distributed optimizer, so its exit handler runs before that of ``hvd.init``.
        """
        global _engine
        if _engine is None:
            _engine = _C.Engine(stall_warning_seconds=stall_warning_seconds(), rank=horovod_torch.rank())
            atexit.register(_engine.stop)
        return _engine

    def session_tag(self, process_set: int) -> str:
        """The part of wire names that tells sessions apart: their number within the process set since ``init``.

        It does not depend on the model, because ranks whose models differ must meet to find that out. So ranks must
        wrap optimizers in the same order.
        """
        return str(next(_sessions[process_set]))

    def watch(self, optimizer: "_DistributedOptimizer") -> None:
        """Closes the optimizer's session when Horovod shuts down and opens a new one after the next ``init``."""
        optimizer._creation = next(_created)
        _optimizers.add(optimizer)


_processes = World()
_current: "contextvars.ContextVar[Optional[World]]" = contextvars.ContextVar("poseidon_hvd_world", default=None)


def current_world() -> World:
    """The world of the calling thread."""
    return _current.get() or _processes


@contextmanager
def use_world(world: World) -> Iterator[None]:
    """Optimizers that the calling thread makes inside belong to ``world`` for their whole life."""
    token = _current.set(world)
    try:
        yield
    finally:
        _current.reset(token)


def _close_all() -> None:
    for optimizer in list(_optimizers):
        optimizer._close_session()
    _sessions.clear()


def _reopen_all() -> None:
    if _engine is not None:
        _engine.forget_failures()
    gc.collect()  # optimizers that nobody holds any more have no counterpart on a rank that has just joined
    for optimizer in sorted(_optimizers, key=lambda each: each._creation):
        optimizer._reopen_session()


def _follow_horovod_restarts() -> None:
    # Elastic training calls functions that were bound before we were imported; all of them end in these two entry
    # points.
    library = horovod_torch.mpi_ops._basics.MPI_LIB_CTYPES
    for name, after in (("horovod_shutdown", _close_all), ("horovod_init", _reopen_all)):
        original = getattr(library, name)

        def call(*args: Any, _original: Any = original, _after: Callable[[], None] = after) -> Any:
            result = _original(*args)
            _after()
            return result

        for attribute in ("argtypes", "restype", "errcheck"):
            if hasattr(original, attribute):
                setattr(call, attribute, getattr(original, attribute))
        setattr(library, name, call)


def _follow_joins() -> None:
    # All ranks call join() and leave it together, perhaps after different numbers of steps. Later plans are made at
    # steps counted from here.
    library = horovod_torch.mpi_ops.mpi_lib
    original = library.horovod_torch_join

    def horovod_torch_join(*args: Any) -> Any:
        for optimizer in list(_optimizers):
            optimizer._note_join()
        return original(*args)

    library.horovod_torch_join = horovod_torch_join


def _follow_waits() -> None:
    # A rank that waits in a collective of the script's own, after a backward() that left gradients out which others
    # have, would wait for ranks that wait for those gradients in their backward().
    library = horovod_torch.mpi_ops.mpi_lib
    original = library.horovod_torch_wait_and_clear

    def horovod_torch_wait_and_clear(*args: Any) -> Any:
        for optimizer in list(_optimizers):
            optimizer._note_wait()
        return original(*args)

    library.horovod_torch_wait_and_clear = horovod_torch_wait_and_clear


_follow_horovod_restarts()
_follow_joins()
_follow_waits()

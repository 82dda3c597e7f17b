"""The one engine of this process, and what happens to optimizers when Horovod is shut down and initialized again (elastic)."""

import atexit
import collections
import gc
import itertools
import weakref
from typing import DefaultDict, Iterator, Optional

from ._native import _C, horovod_torch
from .config import stall_warning_seconds

_engine: Optional["_C.Engine"] = None
_optimizers: "weakref.WeakSet" = weakref.WeakSet()
_created: Iterator[int] = itertools.count()
_sessions: DefaultDict[int, Iterator[int]] = collections.defaultdict(itertools.count)


def engine() -> "_C.Engine":
    """Started at the first distributed optimizer, so that its exit handler runs before the one that ``hvd.init`` registered."""
    global _engine
    if _engine is None:
        _engine = _C.Engine(stall_warning_seconds=stall_warning_seconds(), rank=horovod_torch.rank())
        atexit.register(_engine.stop)
    return _engine


def session_tag(process_set: int) -> str:
    """The part of wire names that tells sessions apart: their number within the process set since ``init``.

    It does not depend on the model: ranks whose models differ must still meet, or they could not find that out. So ranks must wrap
    optimizers in the same order.
    """
    return str(next(_sessions[process_set]))


def watch(optimizer) -> None:
    """Closes the optimizer's session when Horovod shuts down and opens a new one after the next ``init``."""
    optimizer._creation = next(_created)
    _optimizers.add(optimizer)


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
    # Elastic training calls functions that were bound before we were imported; all of them end in these two entry points.
    library = horovod_torch.mpi_ops._basics.MPI_LIB_CTYPES
    for name, after in (("horovod_shutdown", _close_all), ("horovod_init", _reopen_all)):
        original = getattr(library, name)

        def call(*args, _original=original, _after=after):
            result = _original(*args)
            _after()
            return result

        for attribute in ("argtypes", "restype", "errcheck"):
            if hasattr(original, attribute):
                setattr(call, attribute, getattr(original, attribute))
        setattr(library, name, call)


def _follow_joins() -> None:
    # All ranks call join() and leave it together, perhaps after different numbers of steps. Later plans are made at steps counted from here.
    library = horovod_torch.mpi_ops.mpi_lib
    original = library.horovod_torch_join

    def horovod_torch_join(*args):
        for optimizer in list(_optimizers):
            optimizer._note_join()
        return original(*args)

    library.horovod_torch_join = horovod_torch_join


_follow_horovod_restarts()
_follow_joins()

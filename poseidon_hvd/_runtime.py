"""The one engine of this process, and what happens to optimizers when Horovod is shut down and initialized again (elastic)."""

import atexit
import weakref
from typing import Optional

from ._native import _C, horovod_torch
from .config import stall_warning_seconds

_engine: Optional["_C.Engine"] = None
_optimizers: "weakref.WeakSet" = weakref.WeakSet()
_tags: "weakref.WeakValueDictionary" = weakref.WeakValueDictionary()


def engine() -> "_C.Engine":
    """Started at the first distributed optimizer, so that its exit handler runs before the one that ``hvd.init`` registered."""
    global _engine
    if _engine is None:
        _engine = _C.Engine(stall_warning_seconds=stall_warning_seconds(), rank=horovod_torch.rank())
        atexit.register(_engine.stop)
    return _engine


def claim_tag(base: str, owner: object) -> str:
    """A tag for wire names that no other live owner has. Equal on all ranks that create and drop their optimizers alike."""
    number = 0
    while (tag := f"{base}.{number}" if number else base) in _tags:
        number += 1
    _tags[tag] = owner
    return tag


def watch(optimizer) -> None:
    """Closes the optimizer's session when Horovod shuts down and opens a new one after the next ``init``."""
    _optimizers.add(optimizer)


def _follow_horovod_restarts() -> None:
    # Elastic training calls functions that were bound before we were imported; all of them end in these two entry points.
    library = horovod_torch.mpi_ops._basics.MPI_LIB_CTYPES
    for name, after in (("horovod_shutdown", "_close_session"), ("horovod_init", "_reopen_session")):
        original = getattr(library, name)

        def call(*args, _original=original, _after=after):
            result = _original(*args)
            for optimizer in list(_optimizers):
                getattr(optimizer, _after)()
            return result

        for attribute in ("argtypes", "restype", "errcheck"):
            if hasattr(original, attribute):
                setattr(call, attribute, getattr(original, attribute))
        setattr(library, name, call)


_follow_horovod_restarts()

"""What a signal that ends the process may interrupt, and how the process then ends."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

__all__ = ["deferred", "restore", "unwind_on_exit_signals"]

# Those that by default end a process without running its exit handlers. SIGINT already arrives as KeyboardInterrupt.
_EXIT_SIGNALS = (signal.SIGTERM, signal.SIGHUP)

_Handlers = dict[signal.Signals, Any]  # what signal.getsignal returned


@contextmanager
def deferred() -> Iterator[None]:
    """Holds SIGINT, SIGTERM and SIGHUP back; the first that came is delivered at the end.

    An exception raised from a handler is lost where Python has nowhere to raise it (a fork hook, a finalizer), and can
    leave half a namespace behind anywhere else. So work that must be whole runs in here; it has to be bounded in time.
    Python runs handlers in the main thread only: in another thread this does nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    arrived: list[int] = []
    saved = _install((signal.SIGINT, *_EXIT_SIGNALS), lambda number, _: arrived.append(number))
    try:
        yield
    finally:
        restore(saved)
        if arrived:
            signal.raise_signal(arrived[0])


def unwind_on_exit_signals() -> _Handlers:
    """Makes SIGTERM and SIGHUP raise SystemExit where they would kill this process. Returns what ``restore`` needs."""
    if threading.current_thread() is not threading.main_thread():
        return {}
    owner = os.getpid()

    def unwind(number: int, frame: FrameType | None) -> None:
        if os.getpid() != owner:  # a forked child must not unwind its copy of the owner's stack
            os._exit(128 + number)
        raise SystemExit(128 + number)

    return _install([sig for sig in _EXIT_SIGNALS if signal.getsignal(sig) is signal.SIG_DFL], unwind)


def restore(handlers: _Handlers) -> None:
    """Puts handlers back, in the main thread; elsewhere there are none to put back."""
    for sig, handler in handlers.items():
        signal.signal(sig, handler)


def _install(signals: Iterable[signal.Signals], handler: Callable[[int, FrameType | None], None]) -> _Handlers:
    # None: installed by C code, which cannot be put back from here. Ignored: stays so.
    kept = [sig for sig in signals if signal.getsignal(sig) not in (None, signal.SIG_IGN)]
    return {sig: signal.signal(sig, handler) for sig in kept}

"""``warnings`` by thread: what one rank ignores or records, others still see. Python's filters are the process's."""

import re
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Optional

_own = threading.local()


def _frames() -> list["_Frame"]:
    if not hasattr(_own, "frames"):
        _own.frames = []
    return _own.frames


class _Frame:
    """One ``catch_warnings`` block of one thread."""

    def __init__(
        self,
        *,
        record: bool = False,
        module: Any = None,
        action: Optional[str] = None,
        category: type = Warning,
        lineno: int = 0,
        append: bool = False,
    ) -> None:
        self.recorded: Optional[list[warnings.WarningMessage]] = [] if record else None
        self._filters: list[tuple[str, Optional[re.Pattern], type]] = []
        if action is not None:
            self.add(action, None, category, append)

    def __enter__(self) -> Optional[list[warnings.WarningMessage]]:
        _frames().append(self)
        return self.recorded

    def __exit__(self, *_: Any) -> None:
        _frames().remove(self)

    def add(self, action: str, message: Optional["re.Pattern"], category: type, append: bool) -> None:
        self._filters.insert(len(self._filters) if append else 0, (action, message, category))

    def clear(self) -> None:
        self._filters.clear()

    def action(self, warning: warnings.WarningMessage) -> Optional[str]:
        for action, message, category in self._filters:
            if issubclass(warning.category, category) and (message is None or message.match(str(warning.message))):
                return action
        return None


def _show(original, warning: warnings.WarningMessage) -> None:
    action = next(filter(None, (frame.action(warning) for frame in reversed(_frames()))), "default")
    if action == "ignore":
        return
    if action == "error":
        raise warning.message if isinstance(warning.message, Warning) else warning.category(warning.message)
    recorder = next((frame.recorded for frame in reversed(_frames()) if frame.recorded is not None), None)
    if recorder is not None:
        recorder.append(warning)
    else:
        original(warning)


@contextmanager
def warnings_by_thread() -> Iterator[None]:
    """Inside, ``catch_warnings`` and the functions that add filters act on the calling thread alone.

    Every warning of every call counts, as after ``simplefilter("always")``. Filters outside of ``catch_warnings`` have
    no effect.
    """

    def simplefilter(action, category=Warning, lineno=0, append=False):
        if _frames():
            _frames()[-1].add(action, None, category, append)

    def filterwarnings(action, message="", category=Warning, module="", lineno=0, append=False):
        if _frames():
            _frames()[-1].add(action, re.compile(message, re.I) if message else None, category, append)

    def resetwarnings():
        if _frames():
            _frames()[-1].clear()

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        show = warnings._showwarnmsg
        replaced = {
            "catch_warnings": _Frame,
            "simplefilter": simplefilter,
            "filterwarnings": filterwarnings,
            "resetwarnings": resetwarnings,
            "_showwarnmsg": lambda warning: _show(show, warning),
        }
        originals = {name: getattr(warnings, name) for name in replaced}
        try:
            for name, value in replaced.items():
                setattr(warnings, name, value)
            yield
        finally:
            for name, value in originals.items():
                setattr(warnings, name, value)

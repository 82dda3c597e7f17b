"""Where the ranks of a run bring values and take everyone's: a barrier that breaks instead of waiting for ever."""

import threading
from collections.abc import Sequence
from typing import Any, Optional


class Broken(Exception):
    """The others will not come, because the run has been broken off."""


class Parted(Exception):
    """The others will not come, because one of them has come to its end."""


class Meeting:
    """Of some ranks. They come in any order, as often as they like, all of them each time."""

    def __init__(self, ranks: Sequence[int]) -> None:
        self._ranks = tuple(ranks)
        self._changed = threading.Condition()
        self._values: dict[int, Any] = {}
        self._everyones: list[Any] = []
        self._count = 0
        self._broken: Optional[str] = None
        self._gone: set[int] = set()

    def exchange(self, rank: int, value: Any = None) -> list[Any]:
        """Everyone's value, in the order of ranks. The values are shared: nobody may change them."""
        with self._changed:
            self._values[rank] = value
            self._check()
            if len(self._values) == len(self._ranks):
                # Nobody completes the next one before all have left this one.
                self._everyones = [self._values[each] for each in self._ranks]
                self._values = {}
                self._count += 1
                self._changed.notify_all()
                return self._everyones
            count = self._count
            while self._count == count:
                self._check()
                self._changed.wait()
            return self._everyones

    def waiting(self) -> list[int]:
        """Ranks that are here."""
        with self._changed:
            return sorted(self._values)

    def leave(self, rank: int) -> None:
        """The rank will not come any more. It is an error to wait for it."""
        with self._changed:
            self._gone.add(rank)
            self._changed.notify_all()

    def break_up(self, reason: str) -> None:
        """Everybody here, and everybody who comes, gets ``Broken``."""
        with self._changed:
            self._broken = self._broken or reason
            self._changed.notify_all()

    def _check(self) -> None:
        if self._broken is not None:
            raise Broken(self._broken)
        gone = self._gone.intersection(self._ranks)
        if gone:
            raise Parted(f"ranks {sorted(self._values)} wait for ranks {sorted(gone)}, which have ended")

"""Ranks as threads of one process: the product's wrapper, sessions and engines over a transport between threads.

    def main(rank):
        torch.manual_seed(7)
        model = torch.nn.Linear(12, 5)
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
        model(rank.random(0, 8, 12).float()).sum().backward()
        optimizer.step()
        rank.assert_same_everywhere(model.parameters(), "parameters")

    with World(4) as world:
        world.run(main)

Milliseconds instead of the seconds that ``horovodrun`` takes. Random numbers and warnings are each rank's own; what
else a process has, such as its environment, is shared and must not be changed (``one_process``). Horovod is not
initialized: ``rank.horovod`` has its constants and some collectives (``local_horovod``).
"""

import os
import threading
import time
from collections.abc import Sequence
from typing import Any, Callable, NoReturn, Optional

import torch
from horovod.torch.mpi_ops import Average, Max, Min, Product, Sum

from .local_horovod import LocalHorovod
from .meeting import Meeting
from .native import local_world
from .one_process import ranks_in_one_process
from .rank_thread import STOPPED, RankThread, RankWorld
from .ranks import SUBSET, Rank

# For the other ranks to end by themselves after one has failed: their own exceptions say more than "stopped".
GRACE_SECONDS = 0.5
# For a rank to end after its collectives have failed.
_END_SECONDS = 2.0
# How long a rank may wait for an operation of a rank that has ended.
_PARTED_SECONDS = 3.0
_REDUCTIONS = {Average: torch.mean, Sum: torch.sum, Min: torch.amin, Max: torch.amax, Product: torch.prod}


class RanksFailed(AssertionError):
    """One or more ranks of a run raised an exception or did not come to their end. The message has all of them.

    Attributes:
        errors: rank -> its exception's traceback; of a rank that was stuck, where.
        kinds: rank -> name of the exception's type; ``STOPPED`` where it only followed from another rank's; or
            ``STUCK``.
    """

    def __init__(self, text: str, errors: dict[int, str], kinds: dict[int, str]) -> None:
        super().__init__(text)
        self.errors, self.kinds = errors, kinds


class ThreadRank(Rank):
    """A rank that is a thread. What the harness itself exchanges does not pass through the transport under test."""

    horovod: LocalHorovod
    is_thread = True

    def gather(self, tensor: torch.Tensor) -> torch.Tensor:
        return torch.cat(self.horovod.exchange(tensor.detach()))

    def reduce(self, tensor: torch.Tensor, op=None, process_set=None) -> torch.Tensor:
        everyones = torch.stack(self.horovod.exchange(tensor.detach(), process_set))
        return _REDUCTIONS[Average if op is None else op](everyones, dim=0)


class World:
    """Some ranks in this process. One run at a time; several runs one after another, until one fails.

    Args:
        size: how many ranks.
        max_delay: seconds; each operation waits a random time of at most so long before it is executed.
        seed: of these times.
        measured: how dense gradients are put together is measured, as by default. It takes most of a second in each
            optimizer's first step; without it ``dense`` is ``"lazy"`` where nothing else is said.
    """

    def __init__(self, size: int, *, max_delay: float = 0.0, seed: int = 1, measured: bool = False) -> None:
        self.size = size
        self.runs = 0
        self.native = local_world().World(size=size, max_delay_seconds=max_delay, seed=seed)
        self._environment = {} if measured or "POSEIDON_DENSE" in os.environ else {"POSEIDON_DENSE": "lazy"}
        self._broken: Optional[str] = None
        self._changed = threading.Condition()
        self._process_sets: dict[Sequence[int], int] = {tuple(range(size)): 0}

    def __enter__(self) -> "World":
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def close(self) -> None:
        """Ends the threads of transport and engines. What is still in flight fails."""
        self._broken = self._broken or "the world has been closed"
        self.native.stop()

    def fail_next(self, name: str = "", *, message: str = "injected failure", rank: Optional[int] = None) -> None:
        """The next operation of that wire name (default: any) fails as if Horovod had, on one rank or (default) on all.

        On all, no data are moved. On one, the others get theirs.
        """
        self.native.fail_next(name, message, local_world().ALL_RANKS if rank is None else rank)

    def executed(self) -> list[dict[str, Any]]:
        """Operations in the order of execution: name, kind, dtype, bytes (by member), process_set, ok."""
        return self.native.log()

    def process_set_id(self, ranks: Sequence[int]) -> int:
        """The same for the same ranks, and known to all of them."""
        key = tuple(sorted(ranks))
        with self._changed:
            if key not in self._process_sets:
                self._process_sets[key] = self.native.add_process_set(list(key))
            return self._process_sets[key]

    def run(self, main: Callable[[Rank], Any], *, seconds: float = 60.0) -> list[Any]:
        """``main(rank)`` on every rank. Returns their results, in the order of ranks.

        Raises:
            RanksFailed: a rank raised an exception, the ranks parted, or they were not done after ``seconds``.
            AssertionError: ranks changed what they share.
        """
        assert self._broken is None, f"the world cannot be used any more: {self._broken}"
        self.runs += 1
        return _Run(self, main).result(seconds)

    def break_up(self, reason: str) -> None:
        """By the run that has failed: the ranks' collectives fail, and there is no other run."""
        self._broken = reason
        self.native.stop()


class _Run:
    """One ``World.run``."""

    def __init__(self, world: World, main: Callable[[Rank], Any]) -> None:
        self._world = world
        self._changed = threading.Condition()
        self._ended: list[int] = []
        self._meetings: dict[Sequence[int], Meeting] = {}
        self._threads = []
        for number in range(world.size):
            horovod = LocalHorovod(world, number, self._meeting_of)
            subset = horovod.ProcessSet(SUBSET) if world.size > max(SUBSET) else None
            rank = ThreadRank(horovod, number, world.size, subset)
            self._threads.append(RankThread(rank, RankWorld(world, number, horovod), main, self._end))

    def result(self, seconds: float) -> list[Any]:
        with ranks_in_one_process(self._world._environment):
            for each in self._threads:
                each.start()
            reason = self._watch(time.monotonic() + seconds, seconds)
            if reason is not None:
                self._stop(reason)
        self._join(self._threads, GRACE_SECONDS)
        if reason is not None:
            self._raise()
        return [each.result for each in self._threads]

    def _end(self, rank: int) -> None:
        with self._changed:
            self._ended.append(rank)
            for meeting in self._meetings.values():
                self._leave(meeting, rank)
            self._changed.notify_all()

    def _leave(self, meeting: Meeting, rank: int) -> None:
        thread = self._threads[rank]
        if thread.error is None:
            meeting.leave(rank)
        else:
            meeting.break_up(f"rank {rank} raised {thread.kind}")

    def _meeting_of(self, ranks: Sequence[int]) -> Meeting:
        with self._changed:
            meeting = self._meetings.setdefault(tuple(ranks), Meeting(ranks))
            for rank in self._ended:
                self._leave(meeting, rank)
            return meeting

    def _watch(self, deadline: float, seconds: float) -> Optional[str]:
        """Waits for the end. Returns why the run must be broken off, if it must."""
        parted_at = deadline
        with self._changed:
            while True:
                failed = [self._threads[rank] for rank in self._ended if self._threads[rank].error is not None]
                if failed:
                    return f"rank {failed[0].rank} raised {failed[0].kind}"
                if len(self._ended) == self._world.size:
                    return None
                now = time.monotonic()
                if now >= deadline:
                    return f"not done after {seconds:g} s"
                if now >= parted_at:
                    return f"ranks {sorted(self._ended)} ended and the others wait for them"
                if not self._ended:
                    self._changed.wait(deadline - now)
                    continue
                # Not at once: a rank may end with operations in flight that it has not waited for.
                parted = any(set(missing).intersection(self._ended) for _, missing in self._world.native.waiting())
                parted_at = min(parted_at, now + _PARTED_SECONDS) if parted else deadline
                self._changed.wait(min(deadline - now, 0.1))

    def _stop(self, reason: str) -> None:
        """Brings every rank to its end: it finds out by itself, or its collectives fail, or it gets an exception."""
        late = not any(each.error for each in self._threads)
        alive = [each for each in self._threads if each.is_alive()]
        stuck = {each: each.stack() for each in alive} if late else {}
        with self._changed:
            for meeting in self._meetings.values():
                meeting.break_up(reason)
        if not late:
            self._join(alive, GRACE_SECONDS)
        for each in alive:
            each.stopped = True
        self._world.break_up(f"in run {self._world.runs} {reason}{self._waits()}")
        self._join(alive, _END_SECONDS)
        for each in alive:
            if each.is_alive():
                stuck.setdefault(each, each.stack())
                each.interrupt()
        self._join(alive, 1.0)
        for each, stack in stuck.items():
            each.note_stuck(stack)

    def _waits(self) -> str:
        waiting = self._world.native.waiting()
        texts = [f"{' and '.join(names[:2])} not sent by ranks {missing}" for names, missing in waiting[:8]]
        more = f"; and {len(waiting) - 8} more" if len(waiting) > 8 else ""
        return f". Operations that ranks were waiting for: {'; '.join(texts)}{more}" if texts else ""

    @staticmethod
    def _join(threads: Sequence[RankThread], seconds: float) -> None:
        deadline = time.monotonic() + seconds
        for each in threads:
            each.join(max(0.0, deadline - time.monotonic()))

    def _raise(self) -> NoReturn:
        failed = [each for each in self._threads if each.error is not None]
        errors, kinds = {each.rank: each.error for each in failed}, {each.rank: each.kind for each in failed}
        parts = []
        for each in self._threads:
            if each.error is None:
                parts.append(f"---- rank {each.rank} came to its end")
            elif each.kind == STOPPED:
                parts.append(f"---- rank {each.rank} was stopped in a wait: {each.error.strip().splitlines()[-1]}")
            else:
                parts.append(f"---- rank {each.rank}\n{each.error}")
        raise RanksFailed("\n".join([str(self._world._broken), *parts]), errors, kinds)

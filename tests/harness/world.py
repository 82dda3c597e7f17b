"""Ranks as threads of one process: the wrapper, sessions and engines of the product over a transport between threads.

    def main(rank):
        torch.manual_seed(7)
        model = torch.nn.Linear(12, 5)
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters(), policy="sfb")
        model(rank.random(0, 8, 12).float()).sum().backward()
        optimizer.step()
        rank.assert_same_everywhere(model.parameters(), "parameters")

    with World(4) as world:
        world.run(main)

Milliseconds instead of the seconds that ``horovodrun`` takes. Random numbers (``seeding``) and warnings (``thread_warnings``) are each
rank's own; everything else that a process has, such as its environment, is shared. Horovod is not initialized; ``rank.horovod`` has its
constants and the collectives that ``local_horovod`` makes.
"""

import ctypes
import gc
import itertools
import os
import sys
import threading
import time
import traceback
from collections import defaultdict
from contextlib import ExitStack, contextmanager
from typing import Any, Callable, Dict, Iterator, List, NoReturn, Optional, Sequence
from unittest import mock

import torch

from horovod.torch.mpi_ops import Average, Max, Min, Product, Sum
from poseidon_hvd import _runtime

from .local_horovod import LocalHorovod, RankSet
from .meeting import Broken, Meeting
from .native import local_world
from .ranks import DEFAULT_SEED, SUBSET, Rank
from .seeding import own_generator, random_by_thread
from .thread_warnings import warnings_by_thread

# For the other ranks to end by themselves after one has failed: their own exceptions say more than "stopped".
GRACE_SECONDS = 0.5
# For a rank to end after its collectives have failed.
_END_SECONDS = 5.0
# How long a rank may wait for an operation of a rank that has ended.
_PARTED_SECONDS = 5.0


class RanksFailed(AssertionError):
    """One or more ranks of a run raised an exception or did not come to their end. The message has all of them.

    Attributes:
        errors: rank -> its exception's traceback; of a rank that was stuck, where.
        kinds: rank -> name of the exception's type, "stopped" where it only followed from another rank's, or "stuck".
    """

    def __init__(self, text: str, errors: Dict[int, str], kinds: Dict[int, str]) -> None:
        super().__init__(text)
        self.errors, self.kinds = errors, kinds


@contextmanager
def _process_state_kept() -> Iterator[None]:
    """One thread for each rank's products. A change of what belongs to the process would reach all ranks, and later runs."""
    def state() -> Dict[str, Any]:
        return {"anomaly mode": torch.is_anomaly_enabled(), "default dtype": torch.get_default_dtype(), "threads": torch.get_num_threads(),
                "deterministic algorithms": torch.are_deterministic_algorithms_enabled(), "environment": dict(os.environ)}

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    before = state()
    try:
        yield
    finally:
        after = state()
        torch.set_num_threads(threads)
    changed = [name for name in before if before[name] != after[name]]
    assert not changed, f"ranks that are threads changed the process's {', '.join(changed)}: that needs real ranks, @case(real=...)"


@contextmanager
def _garbage_collected_when_asked() -> Iterator[None]:
    """Else one rank's thread would end another's sessions, and ``gc.collect()`` does nothing while another thread is in it.

    What was there before is left out: looking at all of PyTorch takes longer than a case.
    """
    lock = threading.Lock()
    collect = gc.collect

    def collect_alone(*arguments):
        with lock:
            return collect(*arguments)

    enabled = gc.isenabled()
    gc.disable()
    gc.freeze()
    try:
        with mock.patch.object(gc, "collect", collect_alone):
            yield
    finally:
        gc.unfreeze()
        if enabled:
            gc.enable()


class _RankWorld(_runtime.World):
    """What the optimizers of one rank ask."""

    def __init__(self, world: "World", rank: int, horovod: LocalHorovod) -> None:
        self._world, self._rank, self._horovod = world, rank, horovod
        self._tags: Dict[int, Iterator[int]] = defaultdict(itertools.count)

    def size(self) -> int:
        return self._world.size

    def process_set(self, given):
        return self._horovod.rank_set(given)

    def engine(self):
        return self._world.native.engine(self._rank)

    def session_tag(self, process_set: int) -> str:
        return f"{self._world.runs}.{next(self._tags[process_set])}"

    def watch(self, optimizer) -> None:
        pass  # nothing is shut down under it

    def sparse_allreduce_async(self, tensor, *, name, op, process_set):
        return self._horovod.sparse_allreduce_async(tensor, name=name, op=op, process_set=process_set)


class _Thread:
    """One rank of one run."""

    def __init__(self, rank: Rank, world: _RankWorld, main: Callable[[Rank], Any], ended: Callable[[int], None]) -> None:
        self.rank, self._world, self._main, self._ended = rank.rank, world, main, ended
        self._rank: Optional[Rank] = rank
        self.result: Any = None
        self.error: Optional[str] = None
        self.kind: Optional[str] = None
        self.after_stop = False
        self.stopped = False  # the run has been broken off; set by it
        self.thread = threading.Thread(target=self._run, name=f"rank-{rank.rank}", daemon=True)

    def _run(self) -> None:
        try:
            own_generator(DEFAULT_SEED)
            with _runtime.use_world(self._world):
                self.result = self._main(self._rank)
        except BaseException as error:  # SystemExit, KeyboardInterrupt: also a failure
            self.after_stop = self.stopped or isinstance(error, Broken)
            self.kind = type(error).__name__
            self.error = traceback.format_exc()
        finally:
            self._rank = self._main = self._world = None  # with it go models and sessions
            self._ended(self.rank)

    def stack(self) -> str:
        frame = sys._current_frames().get(self.thread.ident)
        return "".join(traceback.format_stack(frame)) if frame else "no Python frame\n"

    def interrupt(self) -> None:
        """Reaches it when it runs Python code again."""
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(self.thread.ident), ctypes.py_object(Broken))


class World:
    """Some ranks in this process. One run at a time; several runs one after another, until one fails.

    Args:
        size: how many ranks.
        max_delay: seconds; each operation waits a random time of at most so long before it is executed.
        seed: of these times.
        measured: how dense gradients are put together is measured, as by default. It takes most of a second in each optimizer's first step;
            without it ``dense`` is ``"lazy"`` where nothing else is said.
    """

    def __init__(self, size: int, *, max_delay: float = 0.0, seed: int = 1, measured: bool = False) -> None:
        self.size = size
        self._environment = {} if measured or "POSEIDON_DENSE" in os.environ else {"POSEIDON_DENSE": "lazy"}
        self.runs = 0
        self.native = local_world().World(size=size, max_delay_seconds=max_delay, seed=seed)
        self._broken: Optional[str] = None
        self._changed = threading.Condition()
        self._process_sets: Dict[Sequence[int], int] = {tuple(range(size)): 0}

    def __enter__(self) -> "World":
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def close(self) -> None:
        """Ends the threads of transport and engines. What is still in flight fails."""
        self._broken = self._broken or "the world has been closed"
        self.native.stop()

    def fail_next(self, name: str = "", *, message: str = "injected failure", rank: Optional[int] = None) -> None:
        """The next operation of that wire name (default: of any) fails as if Horovod had, on one rank or (default) on all.

        On all, no data are moved. On one, the others get theirs.
        """
        self.native.fail_next(name, message, local_world().ALL_RANKS if rank is None else rank)

    def executed(self) -> List[Dict[str, Any]]:
        """Operations in the order of execution: ``name``, ``kind``, ``dtype``, ``bytes`` by member, ``process_set``, ``ok``."""
        return self.native.log()

    def process_set_id(self, ranks: Sequence[int]) -> int:
        """The same for the same ranks, and known to all of them."""
        key = tuple(sorted(ranks))
        with self._changed:
            if key not in self._process_sets:
                self._process_sets[key] = self.native.add_process_set(list(key))
            return self._process_sets[key]

    def run(self, main: Callable[[Rank], Any], *, seconds: float = 60.0) -> List[Any]:
        """``main(rank)`` on every rank. Returns their results, in the order of ranks.

        Raises:
            RanksFailed: a rank raised an exception, the ranks parted, or they were not done after ``seconds``.
        """
        assert self._broken is None, f"the world cannot be used any more: {self._broken}"
        self.runs += 1
        meetings: Dict[Sequence[int], Meeting] = {}
        ended: List[int] = []

        def end(rank: int) -> None:
            with self._changed:
                ended.append(rank)
                self._changed.notify_all()
            for meeting in list(meetings.values()):
                meeting.leave(rank)

        def meeting_of(ranks: Sequence[int]) -> Meeting:
            with self._changed:
                meeting = meetings.setdefault(tuple(ranks), Meeting(ranks))
                for rank in ended:
                    meeting.leave(rank)
                return meeting

        threads = []
        for rank in range(self.size):
            horovod = LocalHorovod(self, rank, meeting_of)
            subset = horovod.ProcessSet(SUBSET) if self.size > max(SUBSET) else None
            threads.append(_Thread(ThreadRank(horovod, rank, self.size, subset), _RankWorld(self, rank, horovod), main, end))
        with ExitStack() as stack:
            stack.enter_context(_process_state_kept())
            stack.enter_context(_garbage_collected_when_asked())
            stack.enter_context(mock.patch.dict(os.environ, self._environment))
            stack.enter_context(random_by_thread())
            stack.enter_context(warnings_by_thread())
            for each in threads:
                each.thread.start()
            reason = self._watch(threads, ended, time.monotonic() + seconds, seconds)
            if reason is not None:
                self._stop(threads, meetings, reason)
        for each in threads:
            if each.error is None and not each.thread.is_alive():
                each.thread.join()
        if reason is not None:
            self._raise(threads, reason)
        return [each.result for each in threads]

    def _watch(self, threads: Sequence[_Thread], ended: Sequence[int], deadline: float, seconds: float) -> Optional[str]:
        """Waits for the end. Returns why the run must be broken off, if it must."""
        parted_at = deadline
        with self._changed:
            while len(ended) < self.size:
                failed = next((threads[rank] for rank in ended if threads[rank].error is not None), None)
                if failed is not None:
                    return f"rank {failed.rank} raised {failed.kind}"
                now = time.monotonic()
                if now >= deadline:
                    return f"not done after {seconds:g} s"
                if now >= parted_at:
                    return f"ranks {sorted(ended)} ended and the others wait for them"
                # Not at once: a rank may end with operations in flight that it has not waited for.
                parts = any(set(missing).intersection(ended) for _, missing in self.native.waiting()) if ended else False
                parted_at = min(parted_at, now + _PARTED_SECONDS) if parts else deadline
                self._changed.wait(min(deadline - now, 0.1) if ended else deadline - now)
            failed = next((each for each in threads if each.error is not None), None)
        return f"rank {failed.rank} raised {failed.kind}" if failed is not None else None

    def _stop(self, threads: Sequence[_Thread], meetings: Dict[Sequence[int], Meeting], reason: str) -> None:
        """Brings every rank to its end, first by letting it find out, then by failing its collectives, then by an exception."""
        self._broken = f"in run {self.runs} {reason}"
        late = not any(each.error for each in threads)
        alive = [each for each in threads if each.thread.is_alive()]
        stuck = {each.rank: each.stack() for each in alive} if late else {}
        waits = self._waits()
        for meeting in list(meetings.values()):
            meeting.break_up(reason)
        if not late:
            self._join(alive, GRACE_SECONDS)
        for each in alive:
            each.stopped = True
        self.native.stop()
        self._join(alive, _END_SECONDS)
        for each in alive:
            if each.thread.is_alive():
                stuck.setdefault(each.rank, each.stack())
                each.interrupt()
        self._join(alive, 1.0)
        for each in alive:
            if each.rank in stuck:
                still = " and cannot be ended: it is still running" if each.thread.is_alive() else ""
                each.kind, each.error = "stuck", f"did not come back{still}. It was here:\n{stuck[each.rank]}"
        if waits and (late or any(each.kind == "stopped" or each.after_stop for each in threads)):
            self._broken += f". Operations that ranks were waiting for: {waits}"

    def _waits(self) -> str:
        waiting = self.native.waiting()
        texts = [f"{' and '.join(names[:2])} not sent by ranks {missing}" for names, missing in waiting[:8]]
        return "; ".join(texts) + (f"; and {len(waiting) - 8} more" if len(waiting) > 8 else "")

    @staticmethod
    def _join(threads: Sequence[_Thread], seconds: float) -> None:
        deadline = time.monotonic() + seconds
        for each in threads:
            each.thread.join(max(0.0, deadline - time.monotonic()))

    def _raise(self, threads: Sequence[_Thread], reason: str) -> NoReturn:
        parts, errors, kinds = [], {}, {}
        for each in threads:
            if each.error is None:
                parts.append(f"---- rank {each.rank} came to its end")
                continue
            errors[each.rank] = each.error
            kinds[each.rank] = "stopped" if each.after_stop and each.kind != "stuck" else each.kind
            if kinds[each.rank] == "stopped":
                parts.append(f"---- rank {each.rank} was stopped in a wait: {each.error.strip().splitlines()[-1]}")
            else:
                parts.append(f"---- rank {each.rank}\n{each.error}")
        raise RanksFailed(f"{self._broken}\n" + "\n".join(parts), errors, kinds)


class ThreadRank(Rank):
    """A rank that is a thread. What the harness itself exchanges does not pass through the transport under test."""

    horovod: LocalHorovod
    is_thread = True

    def gather(self, tensor: torch.Tensor) -> torch.Tensor:
        return torch.cat(self.horovod.exchange(tensor.detach()))

    def reduce(self, tensor: torch.Tensor, op=None, process_set=None) -> torch.Tensor:
        everyones = torch.stack(self.horovod.exchange(tensor.detach(), process_set))
        reductions = {Average: torch.mean, Sum: torch.sum, Min: torch.amin, Max: torch.amax, Product: torch.prod}
        return reductions[Average if op is None else op](everyones, dim=0)

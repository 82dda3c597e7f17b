"""Named cases: functions that every rank runs, as a thread of one process or as a process of its own."""

import dataclasses
import importlib
from collections.abc import Sequence
from typing import Callable, Optional, Union

MODULES = (
    "linear",
    "extra",
    "passes",
    "unused",
    "graphs",
    "precision",
    "half_wire",
    "sparse",
    "embedding",
    "embedding_sparse",
    "embedding_extra",
    "tricks",
    "lifecycle",
    "training",
    "planning",
    "dense",
    "joining",
    "reduction_hooks",
    "weighing",
    "compatibility",
    "bounds",
    "reduced",
    "walks",
)
# Numbers of ranks that are threads; fewer where cases measure or train for long.
_THREADS = (2, 3, 4, 8)
_FEWER_THREADS = {
    **dict.fromkeys(("dense", "planning", "tricks", "training", "lifecycle"), (2, 4)),
    **dict.fromkeys(("precision", "graphs"), (2, 3, 4)),
}
# For ``@case(**BOTH)``: some of each kind of message and reduction are measured against plain Horovod too, over its
# real transport.
BOTH = {"real": "measured against plain Horovod", "threads": True}
# For ``real``. These come last, because Horovod numbers unnamed operations on each rank by itself, and after them the
# numbers differ.
JOIN = "hvd.join()"
PROCESS_SET = "a process set"


@dataclasses.dataclass(frozen=True)
class Case:
    name: str
    run: Callable[["object"], None]
    threads: Sequence[int]  # on so many ranks that are threads
    ranks: Sequence[int]  # on so many real ones
    real: Optional[str]  # why
    measured: bool
    seconds: float  # after which a rank that is still in it is stuck


_registered: dict[str, dict[str, Case]] = {}


def case(
    function=None,
    *,
    real: Optional[str] = None,
    threads: Union[None, bool, Sequence[int]] = None,
    ranks: Sequence[int] = (2, 4),
    measured: bool = False,
    seconds: float = 60,
):
    """Registers a test function. It gets the ``harness.ranks.Rank`` that it runs on.

    Args:
        real: why it needs real ranks. Without a reason it runs on threads alone.
        threads: on so many ranks that are threads; True: on as many as others of the module. Default: True, but none
            with ``real``.
        ranks: numbers of real ranks.
        measured: see ``harness.world.World``.
        seconds: how long it may take.
    """

    def register(function):
        module = function.__module__.rpartition(".")[2]
        cases = _registered.setdefault(module, {})
        assert function.__name__ not in cases, f"two cases are called {module}.{function.__name__}"
        numbers = threads
        if threads is None or threads is True:
            numbers = () if real and threads is None else _FEWER_THREADS.get(module, _THREADS)
        cases[function.__name__] = Case(
            name=function.__name__,
            run=function,
            threads=tuple(numbers),
            ranks=tuple(ranks) if real else (),
            real=real,
            measured=measured,
            seconds=seconds,
        )
        return function

    return register if function is None else register(function)


def cases_of(module: str) -> dict[str, Case]:
    importlib.import_module(f"cases.{module}")
    return _registered[module]


def find(key: str) -> Case:
    """``"module.name"``."""
    module, _, name = key.partition(".")
    return cases_of(module)[name]


def selection(kind: str) -> list[tuple[int, str]]:
    """Number of ranks and ``"module.name"`` of everything that runs on ``"threads"`` or on (real) ``"ranks"``."""
    everything = [(f"{module}.{name}", found) for module in MODULES for name, found in cases_of(module).items()]
    everything.sort(key=lambda entry: entry[1].real in (JOIN, PROCESS_SET))
    numbers = sorted({number for _, found in everything for number in getattr(found, kind)})
    return [(number, key) for number in numbers for key, found in everything if number in getattr(found, kind)]

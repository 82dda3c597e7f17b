"""Named cases: functions that every rank of a launch runs, in the same order."""

import dataclasses
import importlib
from typing import Callable, Dict, Sequence

MODULES = ("linear", "extra", "passes", "unused", "graphs", "precision", "sparse", "embedding", "embedding_sparse", "embedding_extra",
           "tricks", "lifecycle", "training", "planning", "dense", "joining", "reduction_hooks", "weighing", "compatibility", "bounds")


@dataclasses.dataclass(frozen=True)
class Case:
    name: str
    ranks: Sequence[int]
    seconds: float  # after which a rank that is still in it is stuck
    run: Callable[["object"], None]


_registered: Dict[str, Dict[str, Case]] = {}


def case(function=None, *, ranks: Sequence[int] = (2, 4), seconds: float = 60):
    """Registers a test function. It gets the ``harness.ranks.Rank`` that it runs on."""

    def register(function):
        module = function.__module__.rpartition(".")[2]
        cases = _registered.setdefault(module, {})
        assert function.__name__ not in cases, f"two cases are called {module}.{function.__name__}"
        cases[function.__name__] = Case(function.__name__, tuple(ranks), seconds, function)
        return function

    return register if function is None else register(function)


def cases_of(module: str) -> Dict[str, Case]:
    importlib.import_module(f"cases.{module}")
    return _registered[module]

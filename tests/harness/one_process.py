"""What ranks that are threads must share, kept apart or kept as it is: see also ``seeding`` and ``thread_warnings``."""

import gc
import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch

from .seeding import random_by_thread
from .thread_warnings import warnings_by_thread


@contextmanager
def ranks_in_one_process(environment: Mapping[str, str]) -> Iterator[None]:
    """For the time that ranks run. ``environment``: additional variables."""
    with ExitStack() as stack:
        stack.enter_context(_added(environment))
        stack.enter_context(_state_kept())
        stack.enter_context(_garbage_collected_when_asked())
        stack.enter_context(random_by_thread())
        stack.enter_context(warnings_by_thread())
        yield


@contextmanager
def _added(environment: Mapping[str, str]) -> Iterator[None]:
    """Leaves alone what others set meanwhile, as libraries do when they are first used."""
    before = {name: os.environ.get(name) for name in environment}
    os.environ.update(environment)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


def _state() -> dict[str, Any]:
    ours = ("POSEIDON_", "HOROVOD_")
    return {
        "anomaly mode": torch.is_anomaly_enabled(),
        "default dtype": torch.get_default_dtype(),
        "deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
        "environment": {name: value for name, value in os.environ.items() if name.startswith(ours)},
        "number of threads": torch.get_num_threads(),
    }


@contextmanager
def _state_kept() -> Iterator[None]:
    """Refuses changes, which would reach all ranks and later runs. Products have one thread on each rank."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    before = _state()
    try:
        yield
    finally:
        after = _state()
        torch.set_num_threads(threads)
    changed = [name for name in before if before[name] != after[name]]
    assert not changed, (
        f"ranks that are threads changed the process's {', '.join(changed)}, which all of them share. "
        "That needs real ranks: @case(real=...)"
    )


@contextmanager
def _garbage_collected_when_asked() -> Iterator[None]:
    """Else one rank would end another's sessions, and ``gc.collect()`` does nothing while another thread is in it.

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

"""PyTorch's random state, of which a process has one."""

import threading
from contextlib import contextmanager
from typing import Iterator

import torch

_lock = threading.RLock()
_manual_seed = torch.manual_seed


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Inside, what is drawn follows the seed, whatever other ranks draw. No rank may wait for another inside."""
    with _lock:
        _manual_seed(seed)
        yield


def refuse_unlocked_seed(seed: int) -> None:
    """In place of ``torch.manual_seed`` while ranks are threads: the draws after it would be mixed with those of other ranks."""
    raise AssertionError(f"torch.manual_seed({seed}) on a rank that is a thread. Draw inside `with harness.seeding.seeded({seed}):`.")

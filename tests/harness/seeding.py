"""Random numbers by thread: what a rank draws does not depend on others. PyTorch's generator belongs to the process."""

import functools
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Callable, Optional
from unittest import mock

import torch

# Of functions that take a generator.
_METHODS = (
    "bernoulli_",
    "cauchy_",
    "exponential_",
    "geometric_",
    "log_normal_",
    "multinomial",
    "normal_",
    "random_",
    "uniform_",
)
_FUNCTIONS = ("bernoulli", "multinomial", "normal", "rand", "randint", "randn", "randperm")
# Of functions that always take the default one.
_NN_FUNCTIONS = (
    "alpha_dropout",
    "dropout",
    "dropout1d",
    "dropout2d",
    "dropout3d",
    "feature_alpha_dropout",
    "gumbel_softmax",
    "rrelu",
)
_LIKE = ("rand_like", "randint_like", "randn_like")

_own = threading.local()
_default_lock = threading.Lock()


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Inside, what this thread draws follows the seed; afterwards it goes on as before."""
    state = torch.get_rng_state()
    torch.manual_seed(seed)
    try:
        yield
    finally:
        torch.set_rng_state(state)


def own_generator(seed: int) -> None:
    """From now on this thread draws from a generator of its own, inside ``random_by_thread``."""
    _own.generator = torch.Generator().manual_seed(seed)


def _generator() -> Optional[torch.Generator]:
    return getattr(_own, "generator", None)


def _given(function: Callable) -> Callable:
    @functools.wraps(function)
    def call(*arguments: Any, **options: Any) -> Any:
        if _generator() is not None and options.get("generator") is None:
            options["generator"] = _generator()
        return function(*arguments, **options)

    return call


def _lent(function: Callable) -> Callable:
    @functools.wraps(function)
    def call(*arguments: Any, **options: Any) -> Any:
        own, default = _generator(), torch.default_generator
        if own is None:
            return function(*arguments, **options)
        with _default_lock:
            state = default.get_state()
            default.set_state(own.get_state())
            try:
                return function(*arguments, **options)
            finally:
                own.set_state(default.get_state())
                default.set_state(state)

    return call


def _of_generator(name: str, original: Callable) -> Callable:
    @functools.wraps(original)
    def call(*arguments: Any) -> Any:
        return original(*arguments) if _generator() is None else getattr(_generator(), name)(*arguments)

    return call


@contextmanager
def random_by_thread() -> Iterator[None]:
    """Threads that called ``own_generator`` use it wherever PyTorch's Python functions would use the default one.

    Raises:
        AssertionError: at the end, if something drew from the default generator nevertheless.
    """
    before = torch.default_generator.get_state()
    with ExitStack() as stack:

        def replace(where, name, wrapper):
            stack.enter_context(mock.patch.object(where, name, wrapper(getattr(where, name))))

        for name in _METHODS:
            replace(torch.Tensor, name, _given)
        for name in _FUNCTIONS:
            replace(torch, name, _given)
        for name in _NN_FUNCTIONS:
            replace(torch.nn.functional, name, _lent)
        for name in _LIKE:
            replace(torch, name, _lent)
        for where in (torch, torch.random):
            replace(where, "manual_seed", lambda original: _of_generator("manual_seed", original))
            replace(where, "get_rng_state", lambda original: _of_generator("get_state", original))
            replace(where, "set_rng_state", lambda original: _of_generator("set_state", original))
        yield
    assert torch.equal(torch.default_generator.get_state(), before), (
        "a rank that is a thread drew random numbers from PyTorch's default generator, which all ranks share. "
        "Draw with "
        "a generator, or add the function that drew to harness/seeding.py."
    )

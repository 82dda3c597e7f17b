"""Hooks of the user's own that see gradients before and after they are reduced."""

import dataclasses
import fnmatch
import weakref
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from typing import Callable, Optional

import torch

__all__ = ["Hook", "HookHandle", "Hooks"]

Function = Callable[[str, torch.Tensor], None]


@dataclasses.dataclass(frozen=True, eq=False)
class Hook:
    before: Optional[Function]
    after: Optional[Function]
    patterns: tuple[str, ...]

    def matches(self, name: str) -> bool:
        return any(fnmatch.fnmatch(name, pattern) for pattern in self.patterns)


class HookHandle:
    """What ``register_reduction_hook()`` returns."""

    def __init__(self, optimizer, hook: Hook) -> None:
        self._optimizer = weakref.ref(optimizer)
        self._hook = hook

    def remove(self) -> None:
        """Takes the hook out of service, on all ranks alike. A second call does nothing.

        Raises:
            RuntimeError: the hook looks before reduction, and gradients are being reduced.
        """
        optimizer = self._optimizer()
        if optimizer is not None:
            optimizer._remove_reduction_hook(self._hook)


class Hooks:
    """Those of one optimizer, and the parameters that they match."""

    def __init__(self) -> None:
        self._registered: list[Hook] = []
        self.resolve([])

    def resolve(self, names: Sequence[str]) -> None:
        """``names`` of the parameters, in the order in which they are called."""
        self._names = list(names)
        self._before: dict[int, list[Function]] = {}
        self._after: dict[int, list[Function]] = {}
        for index, name in enumerate(self._names):
            matching = [hook for hook in self._registered if hook.matches(name)]
            before = [hook.before for hook in matching if hook.before is not None]
            after = [hook.after for hook in matching if hook.after is not None]
            if before:
                self._before[index] = before
            if after:
                self._after[index] = after

    def add(self, hook: Hook) -> None:
        self._registered.append(hook)
        self.resolve(self._names)

    def remove(self, hook: Hook) -> None:
        self._registered.remove(hook)
        self.resolve(self._names)

    def __contains__(self, hook: Hook) -> bool:
        return hook in self._registered

    @property
    def names_before(self) -> list[str]:
        return [self._names[index] for index in self._before]

    @property
    def hooked(self) -> list[bool]:
        """By parameter; empty where no hook looks before reduction."""
        return [index in self._before for index in range(len(self._names))] if self._before else []

    @property
    def any_after(self) -> bool:
        return bool(self._after)

    def caller(self) -> Optional[Callable[[int, torch.Tensor], None]]:
        """For the session, which must not keep the optimizer alive, as a hook may."""
        if not self._before:
            return None
        reference = weakref.ref(self)

        def call(index, grad):
            hooks = reference()
            if hooks is not None:
                hooks.before(index, grad)

        return call

    def before(self, index: int, grad: torch.Tensor) -> None:
        for function in self._before.get(index, ()):
            _call(function, "before", self._names[index], grad)

    def before_all(self, params: Sequence[torch.Tensor]) -> None:
        """With one rank, where nothing is sent."""
        for index in self._before:
            if params[index].grad is not None:
                self.before(index, params[index].grad)

    def after_all(self, params: Sequence[torch.Tensor], without: AbstractSet[int]) -> None:
        """``without``: parameters that have had their turn, or will have it."""
        for index, functions in list(self._after.items()):
            grad = params[index].grad
            if grad is None or index in without:
                continue
            for function in functions:
                _call(function, "after", self._names[index], grad)


def _call(function: Function, when: str, name: str, grad: torch.Tensor) -> None:
    try:
        with torch.no_grad():
            result = function(name, grad)
    except Exception as error:
        raise RuntimeError(
            f"the hook {when} reduction failed on the gradient of {name}: {type(error).__name__}: {error}"
        ) from error
    if result is not None:
        raise TypeError(
            f"the hook {when} reduction returned a {type(result).__name__} for {name}. Change gradients in place, return None."
        )

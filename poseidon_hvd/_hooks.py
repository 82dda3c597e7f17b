"""The user's own hooks, which see gradients before and after they are reduced."""

import dataclasses
import fnmatch
import weakref
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from typing import TYPE_CHECKING, Any, Callable, Optional, Union

import torch

from ._parameters import all_parameters

if TYPE_CHECKING:
    from .optimizer import _DistributedOptimizer

__all__ = ["Hook", "HookHandle", "Hooks", "register_reduction_hook", "remove_reduction_hook"]

Function = Callable[[str, torch.Tensor], Any]


@dataclasses.dataclass(frozen=True, eq=False)
class Hook:
    before: Optional[Function]
    after: Optional[Function]
    patterns: tuple[str, ...]

    def matches(self, name: str) -> bool:
        return any(fnmatch.fnmatch(name, pattern) for pattern in self.patterns)


class HookHandle:
    """The value of ``register_reduction_hook()``."""

    def __init__(self, optimizer: "_DistributedOptimizer", hook: Hook) -> None:
        self._optimizer = weakref.ref(optimizer)
        self._hook = hook

    def remove(self) -> None:
        """Removes the hook. All ranks do so alike. A second call does nothing.

        Raises:
            RuntimeError: it is a hook before reduction, and gradients are being reduced.
        """
        optimizer = self._optimizer()
        if optimizer is not None:
            optimizer._remove_reduction_hook(self._hook)


class Hooks:
    """The hooks of one optimizer, and the parameters that they match."""

    def __init__(self) -> None:
        self._registered: list[Hook] = []
        self.resolve([])

    def resolve(self, names: Sequence[str]) -> None:
        """Finds the hooks of each parameter. Hooks are called in the order of ``names``."""
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
        """By parameter: a hook looks before reduction. Empty where no hook does."""
        return [index in self._before for index in range(len(self._names))] if self._before else []

    @property
    def any_after(self) -> bool:
        return bool(self._after)

    def caller(self) -> Optional[Callable[[int, torch.Tensor], None]]:
        """For the session. It must not keep the optimizer alive, and a hook may do so."""
        if not self._before:
            return None
        reference = weakref.ref(self)

        def call(index: int, grad: torch.Tensor) -> None:
            hooks = reference()
            if hooks is not None:
                hooks.before(index, grad)

        return call

    def before(self, index: int, grad: torch.Tensor) -> None:
        for function in self._before.get(index, ()):
            _call(function, "before", self._names[index], grad)

    def before_all(self, params: Sequence[torch.Tensor]) -> None:
        """For one rank, where nothing is sent."""
        for index in self._before:
            grad = params[index].grad
            if grad is not None:
                self.before(index, grad)

    def after_all(self, params: Sequence[torch.Tensor], without: AbstractSet[int]) -> None:
        """Calls the hooks after reduction, except those of the parameters in ``without``."""
        for index, functions in list(self._after.items()):
            grad = params[index].grad
            if grad is None or index in without:
                continue
            for function in functions:
                _call(function, "after", self._names[index], grad)


def register_reduction_hook(
    optimizer: "_DistributedOptimizer",
    before: Optional[Callable[[str, torch.Tensor], None]] = None,
    after: Optional[Callable[[str, torch.Tensor], None]] = None,
    parameters: Union[str, Sequence[str]] = "*",
) -> HookHandle:
    """Registers functions that see gradients around their reduction and may change them in place.

    A parameter with a hook ``before`` is sent whole, never as factors or rows, because the local gradient of a factored
    layer is not computed. The next step after registering or removing such a hook observes again, and a new plan is
    made. Both functions run without gradient recording and return None. Several hooks run in the order in which they
    were registered. All ranks register the same ``before``, before the first step or between the same two steps. With
    one rank hooks run too.

    Args:
        before: called as ``before(name, grad)`` with this rank's local gradient, of all passes of the step, just before
            it is sent: on autograd's threads, or in ``synchronize()`` after fewer passes. It is not called where there
            is no gradient. A sparse gradient is sparse.
        after: called as ``after(name, grad)`` with the reduced gradient, at the end of ``backward()`` or in
            ``synchronize()``, where it is reduced, in the order of names.
        parameters: a pattern of names (``fnmatch``), or several; it covers parameters that are added later.

    Returns:
        A handle. Its ``remove()`` removes the hook.

    Raises:
        ValueError: no function is given, or a pattern matches no parameter.
        RuntimeError: ``before`` is registered while gradients are being reduced. An exception in a hook becomes a
            RuntimeError of ``backward()`` or ``synchronize()`` that names the parameter.
    """
    if before is None and after is None:
        raise ValueError("register_reduction_hook() needs a function: before, after or both.")
    patterns = (parameters,) if isinstance(parameters, str) else tuple(parameters)
    names = [optimizer._parameter_names[p] for p in all_parameters(optimizer)]
    unknown = [pattern for pattern in patterns if not fnmatch.filter(names, pattern)]
    if unknown or not patterns:
        shown = ", ".join(sorted(names)[:8]) + (", ..." if len(names) > 8 else "")
        raise ValueError(
            f"register_reduction_hook: parameters={unknown or patterns!r} matches none of this optimizer's: {shown}."
        )
    hook = Hook(before, after, patterns)
    _change_hooks(optimizer, optimizer._hooks.add, hook)
    return HookHandle(optimizer, hook)


def remove_reduction_hook(optimizer: "_DistributedOptimizer", hook: Hook) -> None:
    if hook in optimizer._hooks:
        _change_hooks(optimizer, optimizer._hooks.remove, hook)


def _change_hooks(optimizer: "_DistributedOptimizer", change: Callable[[Hook], None], hook: Hook) -> None:
    if hook.before is not None and optimizer._handles:
        raise RuntimeError(
            "A hook before reduction was registered or removed while gradients are being reduced. Do it after step()."
        )
    change(hook)
    if hook.after is not None and optimizer._session is not None:
        optimizer._session.set_hooks_after(optimizer._hooks.any_after)
    if hook.before is not None:
        # Before the first step under its old number: ranks that register differently must meet, or they could not
        # find that out. A plan is there on all ranks or on none; of steps a rank that joined early has done fewer.
        unused = optimizer._session is not None and optimizer._session.plan() is None
        optimizer._open_session(tag=optimizer._tag if unused else None)


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
            f"the hook {when} reduction returned a {type(result).__name__} for {name}. "
            "Change gradients in place, return None."
        )

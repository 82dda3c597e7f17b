"""What a program does, one class for each kind of action. ``play`` does it on one rank, under test or in the reference.

Whether an action is allowed at a point of a program is told in ``rules``, nowhere else.
"""

import dataclasses
from contextlib import contextmanager
from typing import Any, Callable, Optional

import torch
from torch import Tensor

from .machine import Machine, Points
from .models import TrapSprung
from .text import Short

Ranks = Optional[tuple[int, ...]]  # None: all


@dataclasses.dataclass(frozen=True, repr=False)
class Action(Short):
    def play(self, machine: Machine) -> Points:
        self.do(machine)
        yield from ()

    def do(self, machine: Machine) -> None:
        raise NotImplementedError


def _is_one_of(machine: Machine, ranks: Ranks) -> bool:
    return ranks is None or machine.rank in ranks


# ---- Gradients

ZEROS = ("optimizer", "optimizer, zeros", "model", "model, zeros", "loop", "mul_")


@dataclasses.dataclass(frozen=True, repr=False)
class Zero(Action):
    how: str = "optimizer"

    def do(self, machine):
        if self.how.startswith("optimizer"):
            machine.optimizer.zero_grad(set_to_none=self.how == "optimizer")
        elif self.how.startswith("model"):
            machine.net.zero_grad(set_to_none=self.how == "model")
        for p in machine.params.values():
            if self.how == "loop":
                p.grad = None
            elif self.how == "mul_" and p.grad is not None:
                p.grad.mul_(0)


# Of a gradient that need not exist, of one that must, and of one that must exist and be dense.
ALWAYS = ("assigned", "assigned zeros", "none")
EXISTING = ("scaled", "mul_", "cloned", "zero_")
EXISTING_DENSE = ("add_", "data =", "data.add_", "numpy", "one element")


@dataclasses.dataclass(frozen=True, repr=False)
class Change(Action):
    """Of one parameter's ``.grad``."""

    param: str
    how: str
    ranks: Ranks = None

    def do(self, machine):
        if not _is_one_of(machine, self.ranks):
            return
        p = machine.params[self.param]
        grad = p.grad
        with torch.no_grad():
            added = _pattern(p) * (0.1 * (machine.rank + 1) if self.ranks is not None else 0.1)
            if self.how == "assigned":
                p.grad = added
            elif self.how == "assigned zeros":
                p.grad = torch.zeros_like(p)
            elif self.how == "none":
                p.grad = None
            elif self.how == "scaled":
                p.grad = grad * 0.5
            elif self.how == "mul_":
                grad.mul_(0.5)
            elif self.how == "cloned":
                p.grad = grad.clone()
            elif self.how == "zero_":
                grad.zero_()
            elif self.how == "add_":
                grad.add_(added)
            elif self.how == "data =":
                p.grad.data = grad * 0.5 + added
            elif self.how == "data.add_":
                p.grad.data.add_(added)
            elif self.how == "numpy":
                view = grad.numpy()
                view *= 0.5
            elif self.how == "one element":
                grad.data.view(-1)[-1:].add_(0.25)
            else:
                raise AssertionError(self.how)


def _pattern(p: Tensor) -> Tensor:
    """Numbers that differ from element to element, and that float32 can hold."""
    return ((torch.arange(p.numel()) % 7 - 2) / 8).view(p.shape).to(p.dtype)


@dataclasses.dataclass(frozen=True, repr=False)
class Clip(Action):
    norm: float = 0.125

    def do(self, machine):
        torch.nn.utils.clip_grad_norm_(list(machine.params.values()), self.norm)


# ---- Forward and backward


@dataclasses.dataclass(frozen=True, repr=False)
class Forward(Action):
    """``rows``: of each rank. ``swapped``: a parameter whose ``.data`` is another during it."""

    rows: tuple[int, ...]
    swapped: Optional[str] = None

    def do(self, machine):
        with _swapped(machine, self.swapped):
            machine.terms = machine.forward(self.rows[machine.rank])
        machine.forwards += 1


@contextmanager
def _swapped(machine: Machine, name: Optional[str]):
    if name is None:
        yield
        return
    p = machine.params[name]
    kept = p.data
    p.data = p.data * 1.5
    yield
    p.data = kept


@dataclasses.dataclass(frozen=True, repr=False)
class Backward(Action):
    """Of the last forward. ``how``:

    "once"; "asked before": ``autograd.grad`` of all parameters first; "input asked before": of the layers' outputs
    only, as saliency maps; "retained": the graph is walked twice; "by terms": two losses, one after the other; "in
    halves": ``inputs=`` every other parameter, then the others; "half": only the first of these; "by hand":
    ``autograd.grad``, and its result becomes ``.grad``.
    """

    how: str = "once"

    def play(self, machine):
        terms, machine.terms = machine.terms, []
        loss = sum(terms)
        names = machine.trainable()
        wanted = [machine.params[name] for name in names]
        if self.how in ("once", "retained", "asked before"):
            if self.how == "asked before":
                machine.seen += [
                    g for g in torch.autograd.grad(loss, wanted, retain_graph=True, allow_unused=True) if g is not None
                ]
            if self.how == "retained":
                machine.backward(loss, retain_graph=True)
            machine.backward(loss)
        elif self.how == "by terms":
            machine.backward(terms[0], retain_graph=True)
            machine.backward(terms[1])
        elif self.how in ("in halves", "half"):
            machine.backward(loss, inputs=wanted[::2], retain_graph=True)
            if self.how == "in halves" and wanted[1::2]:
                machine.backward(loss, inputs=wanted[1::2])
        elif self.how == "by hand":
            for p, grad in zip(wanted, torch.autograd.grad(loss, wanted, allow_unused=True)):
                if grad is not None:
                    p.grad = grad
        else:
            raise AssertionError(self.how)
        yield from machine.after_backward()


@dataclasses.dataclass(frozen=True, repr=False)
class FailedBackward(Action):
    """A forward whose backward fails after ``trap`` parts of the model, counted from the end. ``then``: what those
    ranks do.

    "repeat": forward and backward again; "skip": nothing. The other ranks' backward does not fail.
    """

    rows: tuple[int, ...]
    trap: int = 0
    ranks: Ranks = None
    then: str = "repeat"

    def play(self, machine):
        rows = self.rows[machine.rank]
        again = True
        if _is_one_of(machine, self.ranks):
            try:
                machine.backward(sum(machine.forward(rows, trap=self.trap)))
            except TrapSprung:
                pass
            else:
                raise AssertionError("the trap was not sprung")
            again = self.then == "repeat"
        if again:
            machine.backward(sum(machine.forward(rows)))
        machine.forwards += 1
        yield from machine.after_backward()


@dataclasses.dataclass(frozen=True, repr=False)
class Evaluate(Action):
    """A forward that no backward follows."""

    grad: bool = False

    def do(self, machine):
        with torch.set_grad_enabled(self.grad):
            machine.forward(2)


# ---- Parameters


@dataclasses.dataclass(frozen=True, repr=False)
class Freeze(Action):
    param: str
    frozen: bool = True

    def do(self, machine):
        machine.params[self.param].requires_grad_(not self.frozen)


@dataclasses.dataclass(frozen=True, repr=False)
class Weigh(Action):
    """A parameter is changed. ``how``: "mul_" or "data.mul_", which PyTorch does not notice."""

    param: str
    how: str = "mul_"

    def do(self, machine):
        p = machine.params[self.param]
        if self.how == "mul_":
            with torch.no_grad():
                p.mul_(0.75)
        else:
            p.data.mul_(0.75)


@dataclasses.dataclass(frozen=True, repr=False)
class Convert(Action):
    """The model becomes float64, in which the reference is already."""

    def do(self, machine):
        machine.net.double()


# ---- Hooks

TENSOR_HOOKS = ("tensor", "post accumulate", "post accumulate, replaced", "accumulator pre", "accumulator post")
MODULE_HOOKS = ("full backward", "full backward pre", "backward")
OUTPUT_HOOKS = ("output", "output retained", "grad_fn", "grad_fn pre")


def _half(grads: Any) -> tuple[Optional[Tensor], ...]:
    return tuple(None if g is None else g * 0.5 for g in grads)


def _halve_grad(p: Tensor) -> None:
    p.grad.mul_(0.5)


@dataclasses.dataclass(frozen=True, repr=False)
class Hook(Action):
    """Halves what passes, but for "accumulator post" and "output retained", which look.

    ``on``: a parameter, or the number of a layer.
    """

    kind: str
    on: Any
    number: int = 0

    def do(self, machine):
        register = (
            self._on_output
            if self.kind in OUTPUT_HOOKS
            else self._on_module
            if self.kind in MODULE_HOOKS
            else self._on_tensor
        )
        machine.handles[self.number] = register(machine)
        machine.hooks[self.number] = self

    def _on_tensor(self, machine):
        p = machine.params[self.on]
        if self.kind == "tensor":
            return p.register_hook(lambda grad: grad * 0.5)
        if self.kind == "post accumulate":
            return p.register_post_accumulate_grad_hook(_halve_grad)
        if self.kind == "post accumulate, replaced":
            return p.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", p.grad * 0.5))
        node = p.view_as(p).grad_fn.next_functions[0][0]
        machine.nodes.append(node)
        if self.kind == "accumulator pre":
            return node.register_prehook(_half)
        return node.register_hook(lambda *_: self._count(machine))

    def _on_module(self, machine):
        module = machine.net.layers[self.on].linear
        if self.kind == "full backward":
            return module.register_full_backward_hook(lambda _, inputs, outputs: _half(inputs))
        if self.kind == "full backward pre":
            return module.register_full_backward_pre_hook(lambda _, outputs: _half(outputs))
        return module.register_backward_hook(lambda _, inputs, outputs: _half(inputs))

    def _on_output(self, machine):
        functions = machine.on_output.setdefault(self.on, [])
        function = self._watch
        functions.append(function)
        return _Removal(lambda: functions.remove(function))

    def _watch(self, y: Tensor) -> None:
        if not y.requires_grad:
            return
        if self.kind == "output":
            y.register_hook(lambda grad: grad * 0.5)
        elif self.kind == "output retained":
            y.retain_grad()
        elif self.kind == "grad_fn":
            y.grad_fn.register_hook(lambda inputs, outputs: _half(inputs))
        else:
            y.grad_fn.register_prehook(_half)

    def _count(self, machine: Machine) -> None:
        machine.counted[self.number] = machine.counted.get(self.number, 0) + 1


class _Removal:
    def __init__(self, remove: Callable[[], None]) -> None:
        self.remove = remove


@dataclasses.dataclass(frozen=True, repr=False)
class Unhook(Action):
    number: int = 0

    def do(self, machine):
        machine.handles.pop(self.number).remove()
        del machine.hooks[self.number]


# ---- Ends of steps


@dataclasses.dataclass(frozen=True, repr=False)
class Synchronize(Action):
    def play(self, machine):
        yield from machine.synchronize()


@dataclasses.dataclass(frozen=True, repr=False)
class Step(Action):
    """``skip``: inside ``skip_synchronize()``."""

    skip: bool = False

    def play(self, machine):
        yield from machine.step(skip=self.skip)


@dataclasses.dataclass(frozen=True, repr=False)
class StepWithClosure(Action):
    rows: tuple[int, ...]

    def play(self, machine):
        def closure():
            machine.optimizer.zero_grad()
            loss = sum(machine.forward(self.rows[machine.rank]))
            machine.backward(loss)
            machine.forwards += 1
            return loss

        yield from machine.step(closure=closure)


@dataclasses.dataclass(frozen=True, repr=False)
class EndStep(Action):
    """Later data and uses of layers are those of the next step."""

    def do(self, machine):
        machine.terms = []
        machine.step_index += 1
        machine.forwards = 0


@dataclasses.dataclass(frozen=True, repr=False)
class Compare(Action):
    """Put in by the reference where all ranks must agree with it."""

    where: str = ""

    def do(self, machine):
        machine.look(self.where)

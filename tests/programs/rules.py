"""What a program may do, and what is to come of it: the one place that knows.

The rule under test is: *what autograd would have put into .grad is what is reduced; what backward() returns is the mean
over ranks; what the user does afterwards acts on that as in one process; replicas stay bitwise equal.* ``judge`` says
for each action at its point of the program

- ``RUNS``: the numbers must be those of the reference;
- ``Refused``: an error of a certain kind must end the program there, on certain ranks (or may, ``must=False``: else the
    numbers must be right);
- ``Left``: the action is left out of the program, because PyTorch or Horovod's contract leaves open what it means. With
    the reason.
"""

import dataclasses
import re
from typing import Callable, Optional, Union

import torch

from . import actions as a
from .machine import ReferenceRank
from .models import IN_PLACE, NOT_EMPTY, frozen_parameters, not_saved, sparse_parameters
from .program import Program


@dataclasses.dataclass(frozen=True)
class Runs:
    pass


@dataclasses.dataclass(frozen=True)
class Left:
    reason: str


@dataclasses.dataclass(frozen=True)
class Refused:
    """``index``: of the action that must fail; of one that may, the first that may."""

    kind: type[BaseException]
    pattern: str
    ranks: tuple[int, ...]
    must: bool = True
    index: int = -1

    def covers(self, rank: int, error: BaseException) -> bool:
        return rank in self.ranks and isinstance(error, self.kind) and re.search(self.pattern, str(error)) is not None


RUNS = Runs()
Verdict = Union[Runs, Left, Refused]

# What the product does not do, by the name under which rules look around it: its reason. Nothing so far.
EXCLUDED: dict[str, str] = {}


class State:
    """Where a step is: how many passes have reached each parameter on each rank, and what has been reduced."""

    def __init__(self, program: Program, ranks: list[ReferenceRank]) -> None:
        self.program, self.ranks = program, ranks
        self.passes = program.settings.passes
        # That have wanted a gradient when gradients were synchronized, or when the optimizer was wrapped.
        self.active = set(ranks[0].trainable())
        self.planned = False  # before, ranks know what they have told each other when the first gradient was complete
        self.settled = set(ranks[0].trainable())  # and all ranks have completed them in backward in every step so far
        self.reduced = False  # backward() has reduced this step's gradients
        self.left_to_step: set[str] = set()  # perhaps not these
        self.synchronized = False  # synchronize() has, and step() has not been called since
        self.sparse = sparse_parameters(program.model)

    def count(self, rank: int, name: str) -> int:
        return self.ranks[rank].arrived[name]

    def touched(self, rank: int) -> bool:
        return any(self.ranks[rank].arrived.values())

    def any_touched(self) -> bool:
        return any(self.touched(rank) for rank in range(len(self.ranks)))

    def complete(self) -> bool:
        """Every gradient that is wanted is complete on every rank."""
        return all(rank.arrived[name] == self.passes for rank in self.ranks for name in rank.trainable())

    def perhaps_reduced(self) -> bool:
        """backward() may have reduced what ranks know of each other that all complete it; a new plan may have told
        them that.
        """
        known = self.known() & set(self.ranks[0].trainable())
        return (
            self.program.settings.reduce_in == "backward"
            and not self.reduced
            and self.any_touched()
            and all(rank.arrived[name] == self.passes for rank in self.ranks for name in known)
        )

    def uneven(self) -> bool:
        """A gradient is complete on some ranks, and not on others."""
        return not self.reduced and any(
            len({rank.arrived[name] >= self.passes for rank in self.ranks}) > 1 for name in self.ranks[0].params
        )

    def in_flight(self, name: str) -> bool:
        """Complete on some rank, and not reduced."""
        return not self.reduced and any(rank.arrived[name] >= self.passes for rank in self.ranks)

    def grads(self, name: str) -> list[Optional[torch.Tensor]]:
        return [rank.params[name].grad for rank in self.ranks]

    def hook_kinds(self, on=None) -> list[str]:
        return [hook.kind for hook in self.ranks[0].hooks.values() if on is None or hook.on == on]

    def note_unfrozen(self, name: str) -> None:
        if name not in self.active:
            self.settled.add(name)

    def reduced_in_backward(self) -> bool:
        """When all that is wanted is complete on all ranks, and ranks know that of each other."""
        wanted = set(self.ranks[0].trainable())
        return self.complete() and wanted <= self.known()

    def note_reduced(self) -> None:
        """In backward(). What is frozen is reduced there or in step(), as the plan in force has it."""
        self.reduced = True
        self.left_to_step = self.active - set(self.ranks[0].trainable())

    def removed(self) -> list[str]:
        """What backward() has reduced and the user has taken away."""
        if not self.reduced:
            return []
        return [
            name for name in sorted(self.active - self.left_to_step) if any(grad is None for grad in self.grads(name))
        ]

    def known(self) -> set[str]:
        """Of which all ranks know that all complete them in backward."""
        if self.planned:
            return self.settled
        met = [rank.met for rank in self.ranks]
        return set() if None in met else set.intersection(*met) - (self.sparse if "sparse" in EXCLUDED else set())

    def restart(self) -> None:
        """The next gradients are those of a new step."""
        self.reduced = False
        for rank in self.ranks:
            rank.arrived = dict.fromkeys(rank.arrived, 0)

    def note_end_of_step(self) -> None:
        if not (self.reduced and self.planned):  # else all that is wanted was complete
            self.settled = {
                name for name in self.settled if all(rank.arrived[name] >= self.passes for rank in self.ranks)
            }
        self.planned = True


def admit(program: Program) -> Program:
    """The program as it may begin."""
    settings = program.settings
    if "passes" in EXCLUDED and settings.policy != "allreduce":
        settings = dataclasses.replace(settings, passes=1)
    before: list[a.Action] = []
    frozen = set(frozen_parameters(program.model))
    for action in program.before:
        if not _may_come_before(program, action, frozen):
            continue
        before.append(action)
        if isinstance(action, a.Freeze):
            (frozen.add if action.frozen else frozen.discard)(action.param)
    return dataclasses.replace(program, settings=settings, before=tuple(before))


def _may_come_before(program: Program, action: a.Action, frozen: set[str]) -> bool:
    """``frozen``: parameters that want no gradient when the action comes; PyTorch takes no hooks for them."""
    if isinstance(action, a.Hook):
        return (
            action.kind in a.TENSOR_HOOKS
            and action.on not in frozen
            and not (action.kind.startswith("post") and action.on in sparse_parameters(program.model))
        )
    return isinstance(action, a.Freeze) and not _is_head(program, action.param)


def _is_head(program: Program, name: str) -> bool:
    return name.startswith("head") or (name == "front.weight" and program.model.tied_head)


Rule = Callable[[State, a.Action], Verdict]
_RULES: dict[type[a.Action], Rule] = {}


def judge(state: State, action: a.Action) -> Verdict:
    """Before the action."""
    return _RULES.get(type(action), lambda *_: RUNS)(state, action)


def _rule(*kinds: type[a.Action]):
    def register(rule: Rule) -> Rule:
        _RULES.update((kind, rule) for kind in kinds)
        return rule

    return register


def _all_ranks(state: State) -> tuple[int, ...]:
    return tuple(range(len(state.ranks)))


IN_FLIGHT = Left("a gradient is on its way: as in Horovod, what is done to it before synchronize() is a race")
SOME_RANKS = Left(
    "replicas would differ, as the program asks: what is done to reduced gradients must be done on all ranks"
)
FROZEN = Left("what is frozen may be reduced in backward() or in step(), so it may have a gradient here or not")
NOTHING_THERE = Left("there is no gradient on some rank, or a sparse one, for which the operation does not exist")


UNEVEN = Left("some ranks may wait in backward() for what others send in synchronize(), so synchronize() must be next")


# ---- Gradients


@_rule(a.Zero)
def _zero(state, action):
    if state.uneven():
        return UNEVEN
    open_on = tuple(rank for rank in _all_ranks(state) if state.touched(rank))
    if action.how.startswith("optimizer"):
        if open_on and not state.reduced:
            return Refused(
                AssertionError,
                r"zero_grad\(\) was called after loss.backward\(\) but before",
                open_on,
                must=not state.perhaps_reduced(),
            )
        return RUNS
    if any(state.in_flight(name) for name in state.ranks[0].params):
        return IN_FLIGHT
    return RUNS


@_rule(a.Change)
def _change(state, action):
    if state.reduced and action.param in state.left_to_step:
        return FROZEN
    grads = state.grads(action.param)
    if action.how not in a.ALWAYS and any(grad is None for grad in grads):
        return NOTHING_THERE
    if state.sparse & {action.param} and action.how not in ("none", "scaled", "mul_", "cloned"):
        return NOTHING_THERE
    if (state.reduced or state.synchronized) and action.ranks is not None:
        return SOME_RANKS
    if state.in_flight(action.param):
        return IN_FLIGHT
    changed = _all_ranks(state) if action.ranks is None else action.ranks
    between = tuple(rank for rank in changed if state.count(rank, action.param) > 0 and not state.reduced)
    if between:
        # A factored layer's gradient is not in .grad between passes.
        return Refused(RuntimeError, r"was modified between two backward passes of one step", between, must=False)
    return RUNS


@_rule(a.Clip)
def _clip(state, action):
    if state.sparse:
        return Left("PyTorch has no norm of sparse gradients")
    if state.reduced and state.left_to_step:
        return FROZEN
    if state.any_touched() and not state.reduced:
        return IN_FLIGHT
    if not (state.reduced or state.synchronized):
        return Left("the gradients of another step, or none")
    return RUNS


# ---- Forward and backward


def _rows_fit(state, rows):
    return all(rows) or not any(layer.kind in NOT_EMPTY for layer in state.program.model.layers)


NO_ROWS = Left("PyTorch refuses batches without rows in one of the layers")


@_rule(a.Forward)
def _forward(state, action):
    return RUNS if _rows_fit(state, action.rows) else NO_ROWS


def _reentrant(state):
    return any(layer.kind == "reentrant" for layer in state.program.model.layers)


def _before_backward(state) -> Optional[Verdict]:
    """Gradients that backward() has reduced, and neither step() nor the optimizer's zero_grad() since."""
    if state.uneven():
        return UNEVEN
    if not state.reduced:
        return None
    if state.removed():
        return None  # cleared: a new step, see reference
    return Refused(
        AssertionError, r"Gradients were computed more than backward_passes_per_step times", _all_ranks(state)
    )


@_rule(a.Backward)
def _backward(state, action):
    if not state.ranks[0].terms:
        return Left("there is no graph")
    if _reentrant(state) and action.how not in ("once", "retained", "by terms"):
        return Left("reentrant checkpointing allows neither autograd.grad nor backward(inputs=)")
    if action.how == "by hand":
        if state.reduced or state.synchronized:
            return SOME_RANKS
        if any(state.in_flight(name) for name in state.ranks[0].params):
            return IN_FLIGHT
        between = tuple(rank for rank in _all_ranks(state) if state.touched(rank))
        if between:
            return Refused(RuntimeError, r"was modified between two backward passes of one step", between, must=False)
        return RUNS
    return _before_backward(state) or RUNS


@_rule(a.FailedBackward)
def _failed_backward(state, action):
    if not _rows_fit(state, action.rows):
        return NO_ROWS
    if state.reduced:
        return Left("covered by Backward")
    if state.uneven():
        return UNEVEN
    return RUNS


TOO_MANY = (AssertionError, r"Gradients were computed more than backward_passes_per_step times")


def after_backward(state: State) -> Optional[Refused]:
    """More passes than announced show in backward itself."""
    ranks = tuple(
        r for r, rank in enumerate(state.ranks) if any(count > state.passes for count in rank.arrived.values())
    )
    return Refused(*TOO_MANY, ranks) if ranks else None


# ---- Parameters


@_rule(a.Freeze)
def _freeze(state, action):
    if state.any_touched() or state.ranks[0].terms:
        return Left("in the middle of a step")
    name = action.param
    if action.frozen and _is_head(state.program, name):
        return Left("something must be left to learn")
    if not action.frozen and not state.ranks[0].params[name].is_leaf:
        return Left("no parameter")
    return RUNS


@_rule(a.Weigh)
def _weigh(state, action):
    if action.how == "mul_" and state.ranks[0].terms and action.param not in not_saved(state.program.model):
        return Left("PyTorch refuses a change in place of what backward needs")
    return RUNS


@_rule(a.Convert)
def _convert(state, action):
    if state.any_touched() or state.ranks[0].terms or state.synchronized:
        return Left("in the middle of a step")
    if state.program.settings.optimizer == "adam":
        return Left("Adam's state keeps its type")
    if any("accumulator" in kind for kind in state.hook_kinds()):
        return Left("PyTorch makes new gradient accumulators, without their hooks")
    if state.program.settings.policy == "allreduce":
        return Left("without captured layers only optimizer.zero_grad() and step() notice new gradient accumulators")
    return RUNS


# ---- Hooks


@_rule(a.Hook)
def _hook(state, action):
    if action.number in state.ranks[0].handles:
        return Left("the number is taken")
    return _hook_of(state, action) if action.kind in a.TENSOR_HOOKS else _hook_of_layer(state, action)


def _between_forward_and_backward(state):
    checkpoints = any(
        layer.kind in ("checkpointed", "checkpointed twice", "reentrant") for layer in state.program.model.layers
    )
    return "recomputed" in EXCLUDED and checkpoints and bool(state.ranks[0].terms)


def _hook_of(state, action):
    if _between_forward_and_backward(state):
        return Left(EXCLUDED["recomputed"])
    p = state.ranks[0].params[action.on]
    if not p.requires_grad:
        return Left("PyTorch takes no hooks for tensors that need no gradient")
    if action.kind.startswith("post accumulate") and state.sparse & {action.on}:
        return Left("scaling a sparse gradient in a hook is Change's business")
    return RUNS


def _hook_of_layer(state, action):
    layers = state.program.model.layers
    if action.on >= len(layers):
        return Left("no such layer")
    if action.kind in a.MODULE_HOOKS:
        if not hasattr(state.ranks[0].net.layers[action.on], "linear"):
            return Left("no module to hook")
        if any(layer.kind in IN_PLACE for layer in layers):
            return Left("full backward hooks do not go with outputs that are changed in place")
        full = state.ranks[0].net.layers[action.on].linear._is_full_backward_hook  # None: had neither yet
        if full is not None and full == (action.kind == "backward"):
            return Left("PyTorch refuses regular and full backward hooks on one module")
    return RUNS


@_rule(a.Unhook)
def _unhook(state, action):
    if action.number not in state.ranks[0].handles:
        return Left("there is no such hook")
    return Left(EXCLUDED["recomputed"]) if _between_forward_and_backward(state) else RUNS


# ---- Ends of steps


@_rule(a.Synchronize, a.Step)
def _synchronize(state, action):
    if isinstance(action, a.Step) and action.skip:
        if not (state.synchronized or state.reduced):
            return Left("gradients that were not reduced: replicas would differ, as the program asks")
        return FROZEN if state.reduced and state.left_to_step else RUNS
    if state.removed():
        return Refused(RuntimeError, r"The gradient of .* was removed \(\.grad = None\)", _all_ranks(state))
    return RUNS


@_rule(a.StepWithClosure)
def _closure(state, action):
    if not _rows_fit(state, action.rows):
        return NO_ROWS
    if state.any_touched() and not state.reduced:
        return IN_FLIGHT
    if state.passes != 1:
        return Left("the closure is one pass")
    if state.uneven():
        return UNEVEN
    return _synchronize(state, action)

"""What must come of a program: it is run once per rank with PyTorch alone, in float64, in turn, and gradients are
averaged where ``Session`` does.

While it runs, ``rules`` judges each action; those that mean nothing at their point are left out. So a reference gives
the program that is to be run, the numbers at the points of comparison that it has put in, and the error that must end
it, if one must.
"""

import dataclasses
from typing import Optional

import torch

from . import actions as a
from .machine import Look, ReferenceRank
from .program import Program
from .rules import Left, Refused, State, admit, after_backward, judge


@dataclasses.dataclass
class Expected:
    """``looks``, ``seen``, ``counted``: by rank.

    ``refusals``: errors that may end the program; the last one must, if ``must_end``.
    """

    program: Program
    looks: list[list[Look]]
    seen: list[list[torch.Tensor]]
    counted: list[dict[int, int]]
    refusals: list[Refused]
    must_end: bool
    left: dict[str, int]


class Reference:
    def __init__(self, program: Program) -> None:
        self.program = admit(program)
        self.settings = self.program.settings
        self.ranks = [ReferenceRank(self.program, rank) for rank in range(program.ranks)]
        self.state = State(self.program, self.ranks)
        self.kept: list[a.Action] = []
        self.refusals: list[Refused] = []
        self.left: dict[str, int] = {}
        self._look: Optional[str] = None

    def run(self) -> Expected:
        must_end = False
        for action in self.program.actions:
            if isinstance(action, a.EndStep) and self.state.any_touched() and not self.state.reduced:
                must_end = self._judge_and_play(
                    a.Step()
                )  # else the next zero_grad() is refused, or ranks wait for ever
            must_end = must_end or self._judge_and_play(action)
            if must_end:
                break
        program = dataclasses.replace(self.program, actions=tuple(self.kept))
        return Expected(
            program,
            [rank.looks for rank in self.ranks],
            [rank.seen for rank in self.ranks],
            [rank.counted for rank in self.ranks],
            self.refusals,
            must_end,
            self.left,
        )

    def _judge_and_play(self, action: a.Action) -> bool:
        """True: the program must end here."""
        verdict = judge(self.state, action)
        if isinstance(verdict, Left):
            self.left[verdict.reason] = self.left.get(verdict.reason, 0) + 1
            return False
        self.kept.append(action)
        if isinstance(verdict, Refused):
            self._refuse(verdict)
            if verdict.must:
                return True
        late = self._play(action)
        if late is not None:
            self._refuse(late)
        return late is not None

    def _refuse(self, verdict: Refused) -> None:
        self.refusals.append(dataclasses.replace(verdict, index=len(self.kept) - 1))

    def _play(self, action: a.Action) -> Optional[Refused]:
        """On all ranks, in step with each other. Returns what must be refused after all."""
        state = self.state
        if isinstance(action, (a.Backward, a.StepWithClosure)) and state.removed():
            state.restart()  # the user has cleared gradients
        if isinstance(action, a.StepWithClosure) or (isinstance(action, a.Zero) and action.how.startswith("optimizer")):
            state.restart()
        if isinstance(action, (a.Backward, a.FailedBackward, a.StepWithClosure)):
            state.synchronized = False
        # One after the other up to each point where ranks meet.
        playing = [action.play(rank) for rank in self.ranks]
        while True:
            points = [next(each, None) for each in playing]
            assert len(set(points)) == 1, f"ranks of the reference part at {action}: {points}"
            if points[0] is None:
                break
            late = self._meet(points[0])
            if late is not None:
                return late
        if isinstance(action, a.Freeze) and not action.frozen:
            state.note_unfrozen(action.param)
        if self._look is not None:  # between actions: that is where the run under test can look too
            self._compare(self._look)
            self._look = None
        return None

    def _meet(self, point: str) -> Optional[Refused]:
        state = self.state
        if point == "backward":
            late = after_backward(state)
            if late is not None:
                return late
            if self.settings.reduce_in == "backward" and not state.reduced and state.reduced_in_backward():
                state.active |= set(self.ranks[0].trainable())
                state.note_reduced()
                self._reduce(state.active - state.left_to_step)
                self._look = "after backward"
        elif point == "synchronize":
            state.note_end_of_step()
            state.active |= set(self.ranks[0].trainable())
            self._reduce(state.left_to_step if state.reduced else state.active)
            state.restart()
            state.synchronized = True
            self._look = "after synchronize"
        elif point == "step":
            state.synchronized = False
            self._look = "after step"
        return None

    def _reduce(self, names: set[str]) -> None:
        for name in sorted(names):
            params = [rank.params[name] for rank in self.ranks]
            dense = [
                torch.zeros_like(p) if p.grad is None else p.grad.to_dense() if p.grad.is_sparse else p.grad
                for p in params
            ]
            total = torch.stack([grad.detach() for grad in dense]).sum(0)
            result = total / len(self.ranks) if self.settings.op == "Average" else total
            for p in params:
                p.grad = result.clone()
            if self.state.sparse & {name} and not self.settings.sparse_as_dense:
                for p in params:
                    p.grad = result.to_sparse(1)

    def _compare(self, where: str) -> None:
        action = a.Compare(where)
        self.kept.append(action)
        for rank in self.ranks:
            action.do(rank)
            if where == "after backward":
                for name in self.state.left_to_step:
                    rank.looks[-1].gradients.pop(name, None)


def expect(program: Program) -> Expected:
    return Reference(program).run()

"""Runs a program on ranks that are threads and compares it with its reference.

``python -m programs.run FILE`` does so for a text.
"""

import dataclasses
import sys
import traceback
import warnings
from pathlib import Path
from typing import Optional

import torch
from harness.world import RanksFailed, World

import poseidon_hvd as hvd

from . import actions, models
from . import program as programs
from .machine import Look, Machine, RankUnderTest
from .program import NETWORK, Program
from .reference import Expected, expect

# A program takes milliseconds.
SECONDS = 20.0

# Relative to the norm of the tensor, and to the whole model's for what cancels out. float32 has 6e-8 per operation,
# sums here have some ten terms and go through some ten layers, and a program has at most eight steps with small
# learning rates, so errors of 1e-6 are ordinary; a wrong number is wrong by a rank's share of a gradient.
RELATIVE, OF_THE_WHOLE = 2e-5, 2e-6
RELATIVE_FP16, OF_THE_WHOLE_FP16 = 1e-2, 2e-3


class Wrong(AssertionError):
    """The product and the reference differ."""


@dataclasses.dataclass
class Outcome:
    """Of one rank. ``error``: what ended the program, and at which action."""

    machine: Optional[RankUnderTest] = None
    error: Optional[BaseException] = None
    at: int = -1


def wrap(machine: Machine, base: torch.optim.Optimizer) -> torch.optim.Optimizer:
    s = machine.program.settings
    return hvd.DistributedOptimizer(
        base,
        machine.net.named_parameters(),
        compression=getattr(hvd.Compression, s.compression),
        backward_passes_per_step=s.passes,
        op=getattr(hvd, s.op),
        gradient_predivide_factor=s.predivide,
        groups=s.groups or None,
        sparse_as_dense=s.sparse_as_dense,
        policy=s.policy,
        dense=s.dense,
        reduce_in=s.reduce_in,
        network=NETWORK,
    )


class Runner:
    """Keeps a world for each number of ranks, until a program breaks it."""

    def __init__(self, make=wrap) -> None:
        self._make = make
        self._worlds = {}
        self.left = {}
        self.refused = self.ran = 0

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for world in self._worlds.values():
            world.close()

    def check(self, given: Program) -> None:
        """Raises Wrong with the program's text."""
        expected = expect(given)
        for reason, count in expected.left.items():
            self.left[reason] = self.left.get(reason, 0) + count
        outcomes, failure = self._run(expected)
        self.ran += 1
        self.refused += any(each.error is not None for each in outcomes)
        problem, at = find_problem(expected, outcomes, failure)
        if problem is not None:
            raise Wrong(f"{problem}\n\n{expected.program.text(mark=at)}")

    def _run(self, expected: Expected):
        program = expected.program
        outcomes = [Outcome() for _ in range(program.ranks)]
        # Where all ranks come to the same end by themselves, the world may be used again.
        together = {rank for refusal in expected.refusals for rank in refusal.ranks} == set(range(program.ranks))

        def main(rank):
            outcome = outcomes[rank.rank]
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                try:
                    machine = outcome.machine = RankUnderTest(program, rank.rank, self._make)
                    for outcome.at, action in enumerate(program.actions):
                        for _ in action.play(machine):
                            pass
                except Exception as error:
                    outcome.error = error
                    if not together or not any(refusal.covers(rank.rank, error) for refusal in expected.refusals):
                        raise

        world = self._worlds.get(program.ranks) or World(program.ranks)
        self._worlds[program.ranks] = world
        try:
            world.run(main, seconds=SECONDS)
        except RanksFailed as failed:
            world.close()
            del self._worlds[program.ranks]
            return outcomes, failed
        return outcomes, None


def find_problem(expected: Expected, outcomes: list[Outcome], failure: Optional[RanksFailed]):
    """Text and index of an action, or None twice."""
    if failure is not None:
        own = [rank for rank, kind in failure.kinds.items() if kind != "stopped"]
        refused = [
            r
            for r in own
            if outcomes[r].error is not None and any(x.covers(r, outcomes[r].error) for x in expected.refusals)
        ]
        others = [r for r in own if r not in refused and not isinstance(outcomes[r].error, hvd_internal_error())]
        if not refused or others:
            rank = (others or own or [0])[0]
            return f"{failure}", outcomes[rank].at
    if expected.must_end and not any(outcome.error for outcome in outcomes):
        refusal = expected.refusals[-1]
        return (
            f"expected {refusal.kind.__name__} matching {refusal.pattern!r} on ranks {refusal.ranks}, "
            "and nothing was raised",
            refusal.index,
        )
    for rank, outcome in enumerate(outcomes):
        error = outcome.error
        refusals = [refusal for refusal in expected.refusals if error is not None and refusal.covers(rank, error)]
        if refusals and outcome.at < min(refusal.index for refusal in refusals):
            return f"rank {rank} refused too early: {error}", outcome.at
    return compare(expected, outcomes)


def hvd_internal_error():
    from horovod.common.exceptions import HorovodInternalError

    return HorovodInternalError


def compare(expected: Expected, outcomes: list[Outcome]):
    program = expected.program
    fp16 = program.settings.compression == "fp16"
    relative, of_the_whole = (RELATIVE_FP16, OF_THE_WHOLE_FP16) if fp16 else (RELATIVE, OF_THE_WHOLE)
    places = [index for index, action in enumerate(program.actions) if isinstance(action, actions.Compare)]
    for number, index in enumerate(places):
        looks = [
            outcome.machine.looks[number] if outcome.machine and number < len(outcome.machine.looks) else None
            for outcome in outcomes
        ]
        wanted = [rank_looks[number] for rank_looks in expected.looks]
        wrong = []
        for what in ("gradients", "parameters"):
            for rank, look in enumerate(looks):
                if look is not None:
                    wrong += differences(
                        rank, what, getattr(look, what), getattr(wanted[rank], what), relative, of_the_whole
                    )
        if all(looks):
            wrong += replicas_differ(looks, wanted)
        if wrong:
            more = f"\n  and {len(wrong) - 4} more" if len(wrong) > 5 else ""
            return f"{wanted[0].where} (action {index}):\n" + "\n".join(wrong[: 4 if more else 5]) + more, index
    for rank, outcome in enumerate(outcomes):
        if outcome.error is None and outcome.machine is not None:
            for mine, theirs in zip(outcome.machine.seen, expected.seen[rank]):
                if not (mine.to_dense().double() - theirs.to_dense()).norm() <= 1e-4 * theirs.to_dense().norm() + 1e-5:
                    return f"rank {rank}: autograd.grad gave {mine}, expected {theirs}", None
            if outcome.machine.counted != expected.counted[rank]:
                return (
                    f"rank {rank}: hooks were called {outcome.machine.counted} times, "
                    f"expected {expected.counted[rank]}",
                    None,
                )
    return None, None


def differences(rank, what, got, wanted, relative, of_the_whole):
    norms = {name: float(tensor.norm()) for name, tensor in wanted.items() if tensor is not None}
    whole = sum(norm * norm for norm in norms.values()) ** 0.5
    wrong = []
    for name, theirs in wanted.items():
        mine = got[name]
        if (mine is None) != (theirs is None):
            wrong.append(
                f"  rank {rank}, {what[:-1]} of {name}: {'None' if mine is None else 'a tensor'}, expected "
                f"{'None' if theirs is None else 'a tensor'}"
            )
        elif mine is not None:
            error = float((mine.double() - theirs).norm())
            if not error <= relative * norms[name] + of_the_whole * whole:
                wrong.append(
                    f"  rank {rank}, {what[:-1]} of {name}: off by {error:.2e} of {norms[name]:.2e} "
                    f"(whole model: {whole:.2e})\n"
                    f"    got      {_short(mine)}\n    expected {_short(theirs)}"
                )
    return wrong


def _short(tensor: torch.Tensor) -> str:
    values = tensor.reshape(-1)[:6].tolist()
    return ", ".join(f"{value:.5g}" for value in values) + (", ..." if tensor.numel() > 6 else "")


def replicas_differ(looks: list[Look], wanted: list[Look]) -> list[str]:
    """Bitwise, wherever the reference's are equal."""
    wrong = []
    for what in ("gradients", "parameters"):
        for name, first in getattr(looks[0], what).items():
            if name not in getattr(wanted[0], what):
                continue
            reference = [getattr(look, what)[name] for look in wanted]
            if any(
                (each is None) != (reference[0] is None) or (each is not None and not torch.equal(each, reference[0]))
                for each in reference
            ):
                continue
            for rank, look in enumerate(looks[1:], 1):
                other = getattr(look, what)[name]
                same = (
                    first is None
                    and other is None
                    or (first is not None and other is not None and torch.equal(first, other))
                )
                if not same:
                    wrong.append(f"  {what[:-1]} of {name}: rank {rank} differs from rank 0")
    return wrong


def read(text: str) -> Program:
    names = {name: value for module in (actions, models, programs) for name, value in vars(module).items()}
    return eval(text, {"__builtins__": {}, **names})


if __name__ == "__main__":
    torch.set_num_threads(1)
    with Runner() as runner:
        try:
            runner.check(read(Path(sys.argv[1]).read_text()))
            print("as expected")
        except Wrong:
            traceback.print_exc(limit=0)
            sys.exit(1)

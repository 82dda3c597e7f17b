"""Training programs drawn at random, compared with PyTorch alone: ``programs`` draws, runs and judges them.

``POSEIDON_PROGRAMS`` says how many, ``POSEIDON_PROGRAMS_SEED`` which ones. A failure prints the shrunk program; saved
to a file, ``PYTHONPATH=tests python -m programs.run FILE`` runs it again.
"""

import contextlib
import os
from typing import Callable

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, seed, settings
from programs.machine import Machine
from programs.program import Program
from programs.run import Runner, Wrong, read, wrap
from programs.strategies import programs

SEED = int(os.environ.get("POSEIDON_PROGRAMS_SEED", "1"))
PROGRAMS = int(os.environ.get("POSEIDON_PROGRAMS", "300"))


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def for_programs(check: Callable[[Program], None], count: int, *, shrink: bool = False) -> None:
    """Without a deadline of hypothesis' own, which is in wall time: the world in which a program runs has one."""
    phases = [Phase.generate, Phase.shrink] if shrink else [Phase.generate]
    options = settings(
        max_examples=count,
        deadline=None,
        database=None,
        phases=phases,
        report_multiple_bugs=False,
        suppress_health_check=list(HealthCheck),
        print_blob=False,
    )
    seed(SEED)(options(given(programs())(check)))()


@pytest.mark.timeout(60 + PROGRAMS)
def test_programs_end_as_with_one_process():
    with Runner() as runner:
        print(f"{PROGRAMS} programs, seed {SEED}")
        for_programs(runner.check, PROGRAMS, shrink=True)
        print(f"{runner.ran} were run, of which {runner.refused} ended with the error that they must")
        assert runner.ran >= PROGRAMS * 0.9  # hypothesis leaves out what it has drawn before


# ---- Can it fail? Each mutation is a fault of the kind that is looked for. It must be found in a few programs.


def _with_hook(**hooks) -> Callable:
    def make(machine: Machine, base):
        optimizer = wrap(machine, base)
        optimizer.register_reduction_hook(
            **{when: lambda name, grad, f=f: f(machine, name, grad) for when, f in hooks.items()}
        )
        return optimizer

    return make


def _one_gradient_a_little_wrong(machine, name, grad):
    if machine.rank == 1 and name == "head.bias" and not grad.is_sparse:
        grad.mul_(1.001)


def _last_bit_of_a_replica(machine, name, grad):
    if machine.rank == 1 and name == "head.bias":
        grad.copy_(torch.nextafter(grad, torch.full_like(grad, 10.0)))


def _sum_instead_of_average(machine, base):
    machine.program = _changed(
        machine.program, op="Sum" if machine.program.settings.op == "Average" else "Average", predivide=1.0
    )
    return wrap(machine, base)


def _changed(program, **settings_):
    import dataclasses

    return dataclasses.replace(program, settings=dataclasses.replace(program.settings, **settings_))


def _reduced_later(machine, base):
    machine.program = _changed(machine.program, reduce_in="step")
    return wrap(machine, base)


def _zero_grad_that_does_nothing(machine, base):
    optimizer = wrap(machine, base)
    zero_grad = optimizer.zero_grad

    def quiet(*args, **kwargs):
        with contextlib.suppress(AssertionError):
            zero_grad(*args, **kwargs)

    optimizer.zero_grad = quiet
    return optimizer


@pytest.mark.parametrize(
    "make, programs_needed",
    [
        (_with_hook(before=_one_gradient_a_little_wrong), 20),
        (_with_hook(after=_last_bit_of_a_replica), 20),
        (_sum_instead_of_average, 5),
        (_reduced_later, 20),
        (_zero_grad_that_does_nothing, 300),
    ],
    ids=["wrong by 1e-3", "last bit of a replica", "sum for average", "reduced later", "refused no more"],
)
def test_faults_are_found(make, programs_needed):
    found = []
    with Runner(make) as runner:

        def check(program):
            if not found:
                try:
                    runner.check(program)
                except Wrong as wrong:
                    found.append(wrong)

        for_programs(check, programs_needed)
    assert found


def test_texts_are_programs():
    drawn: list[Program] = []
    for_programs(lambda program: drawn.append(program), 30)
    for program in drawn:
        assert read(program.text()) == program
        assert read(repr(program)) == program

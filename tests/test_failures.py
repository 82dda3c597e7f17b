"""One rank fails; the others must end, soon, with a reason, and leave nothing behind. No launch may run into its time limit."""

import re
from pathlib import Path
from typing import Mapping

import pytest

from harness.launch import Launched, launch

SCRIPT = str(Path(__file__).parent / "scripts" / "failure.py")
# From the failure to the end of the launch. Far more than it takes; a rank that waits for the failed one takes for ever.
SECONDS_TO_END = 30.0

pytestmark = pytest.mark.timeout(240)


def run(what: str, ranks: int = 2, env: Mapping[str, str] = {}) -> Launched:
    launched = launch(ranks, [SCRIPT, what], seconds=150, env=env)
    assert not launched.timed_out, f"a rank hangs\n{launched}"
    assert not launched.orphans, f"left behind: {launched.orphans}\n{launched}"
    return launched


def assert_ended_soon(launched: Launched, after: str) -> None:
    failed = re.search(rf"rank 1 {after} ([\d.]+)", launched.output)
    assert failed, str(launched)
    assert launched.ended - float(failed.group(1)) < SECONDS_TO_END, str(launched)


def assert_named(launched: Launched, rank: int) -> None:
    """The survivor says that Horovod failed, on which rank and in which tensor."""
    reason = re.search(rf"rank {rank} dies of HorovodInternalError: (.*)", launched.output)
    assert reason, f"rank {rank} does not say why it ends\n{launched}"
    assert f"[rank {rank}]" in reason.group(1) and re.search(r"(weight|bias)", reason.group(1)), reason.group(0)


@pytest.mark.parametrize("ranks", [2, 4])
def test_exception_in_backward_with_factors_in_flight(ranks):
    launched = run("raise", ranks)
    assert launched.returncode != 0
    assert "the bomb went off" in launched.output
    assert "reached the end" not in launched.output
    assert_ended_soon(launched, "raising")
    assert_named(launched, 0)


def test_exception_in_the_profiling_step():
    launched = run("raise-at-once")
    assert launched.returncode != 0
    assert_ended_soon(launched, "raising")
    assert re.search(r"rank 0 dies of HorovodInternalError", launched.output), str(launched)


def test_crash_without_a_farewell():
    launched = run("crash")
    assert launched.returncode != 0
    assert "rank 0 reached the end" not in launched.output
    assert_ended_soon(launched, "crashes")


def test_rank_that_runs_fewer_steps():
    """It ends normally; the others cannot go on and must say so."""
    launched = run("fewer-steps")
    assert launched.returncode != 0
    assert_ended_soon(launched, "ends early")
    assert_named(launched, 0)


def test_join_before_the_others_are_done():
    """Horovod's join does not cover gathers: an error that names the remedy, which works. No stall."""
    launched = run("join")
    assert launched.returncode != 0, str(launched)
    assert re.search(r"rank 0 dies of HorovodInternalError: .*uneven_steps=True", launched.output), str(launched)
    launched = run("join", env={"POSEIDON_UNEVEN_STEPS": "1"})
    assert launched.returncode == 0, str(launched)
    assert launched.output.count("reached the end") == 2, str(launched)


def test_end_with_factors_in_flight():
    """The script just stops after a backward: the exit handlers of Horovod and of the engine neither hang nor crash."""
    launched = run("end-in-flight")
    assert launched.returncode == 0, str(launched)
    assert launched.output.count("reached the end") == 2


def test_exception_that_the_script_survives():
    """A failed backward that is caught, here a second one through a freed graph, does not spoil the step."""
    launched = run("caught")
    assert launched.returncode == 0, str(launched)
    assert "rank 1 goes on" in launched.output
    assert launched.output.count("reached the end") == 2


def test_launcher_limit_kills_everything(tmp_path):
    """The harness itself: a rank that sleeps is found and killed, and the launch counts as timed out."""
    script = tmp_path / "sleep.py"
    script.write_text("import time\ntime.sleep(600)\n")
    launched = launch(2, [str(script)], seconds=8)
    assert launched.timed_out and launched.seconds < 60

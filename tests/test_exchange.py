"""Every case of ``cases/``: on ranks that are threads, or on 2 and 4 real ones, which it shares with others."""

import pytest
from harness.registry import find, selection
from harness.world import World


def _parametrized(kind):
    chosen = selection(kind)
    ids = [f"{ranks}-{case.replace('.', '-', 1)}" for ranks, case in chosen]
    return pytest.mark.parametrize(("ranks", "case"), chosen, ids=ids)


@_parametrized("threads")
def test_threads(ranks, case):
    found = find(case)
    with World(ranks, measured=found.measured) as world:
        world.run(found.run, seconds=found.seconds)


# The first test of a launch waits for all of it.
@pytest.mark.timeout(1800)
@_parametrized("ranks")
def test_ranks(ranks, case, campaigns):
    outcome = campaigns.outcome(ranks, case)
    if not outcome.passed:
        pytest.fail(outcome.text, pytrace=False)

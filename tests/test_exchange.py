"""Every case of ``cases/`` on 2 and on 4 real ranks; one launch per module and number of ranks."""

import pytest

from harness.registry import MODULES, cases_of

# The first test of a launch waits for all of it.
pytestmark = pytest.mark.timeout(600)

_ALL = [(ranks, module, name) for ranks in (2, 4) for module in MODULES for name, c in cases_of(module).items() if ranks in c.ranks]


@pytest.mark.parametrize(("ranks", "module", "case"), _ALL, ids=[f"{ranks}-{module}-{name}" for ranks, module, name in _ALL])
def test_case(ranks, module, case, campaigns):
    outcome = campaigns.outcome(ranks, module, case)
    if not outcome.passed:
        pytest.fail(outcome.text, pytrace=False)

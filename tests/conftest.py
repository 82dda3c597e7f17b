"""Launches are shared by the tests that read their outcomes."""

from collections import defaultdict

import pytest
from harness.campaign import Outcome, run_cases
from harness.slow import is_slow


def pytest_collection_modifyitems(items) -> None:
    for item in items:
        if is_slow(item.path.stem, item.name, getattr(item, "fixturenames", ())):
            item.add_marker("slow")


class Campaigns:
    """Runs all selected cases of a number of real ranks at the first question about one of them."""

    def __init__(self, selected: dict[int, list[str]]) -> None:
        self._selected = selected
        self._outcomes: dict[int, dict[str, Outcome]] = {}

    def outcome(self, ranks: int, case: str) -> Outcome:
        if ranks not in self._outcomes:
            self._outcomes[ranks] = run_cases(ranks, self._selected[ranks])
        return self._outcomes[ranks][case]


@pytest.fixture(scope="session")
def campaigns(request) -> Campaigns:
    selected = defaultdict(list)
    for item in request.session.items:
        if "campaigns" in getattr(item, "fixturenames", ()):
            params = item.callspec.params
            selected[params["ranks"]].append(params["case"])
    return Campaigns(selected)

"""Launches are shared by the tests that read their outcomes."""

from collections import defaultdict
from typing import Dict, List, Tuple

import pytest

from harness.campaign import Outcome, run_cases


class Campaigns:
    """Runs a module's selected cases at the first question about one of them."""

    def __init__(self, selected: Dict[Tuple[int, str], List[str]]) -> None:
        self._selected = selected
        self._outcomes: Dict[Tuple[int, str], Dict[str, Outcome]] = {}

    def outcome(self, ranks: int, module: str, case: str) -> Outcome:
        key = ranks, module
        if key not in self._outcomes:
            self._outcomes[key] = run_cases(ranks, module, self._selected[key])
        return self._outcomes[key][case]


@pytest.fixture(scope="session")
def campaigns(request) -> Campaigns:
    selected = defaultdict(list)
    for item in request.session.items:
        if "campaigns" in getattr(item, "fixturenames", ()):
            params = item.callspec.params
            selected[params["ranks"], params["module"]].append(params["case"])
    return Campaigns(selected)

"""docs/reliability.md says what the last whole run of the faults saw."""

import importlib.util
import json
import re
from pathlib import Path

import pytest
from harness.fault_table import ROWS

ROOT = Path(__file__).resolve().parent.parent


def load_tool():
    spec = importlib.util.spec_from_file_location("reliability", ROOT / "tools" / "reliability.py")
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    return tool


TOOL = load_tool()
RESULTS = json.loads(TOOL.RESULTS.read_text())["rows"]


def test_page_is_made_of_the_results():
    page = TOOL.PAGE.read_text()
    assert page == TOOL.with_table(page, RESULTS), "run python tools/reliability.py"


def test_results_are_as_expected():
    rows = {row.name: row for row in ROWS}
    assert RESULTS
    for each in RESULTS:
        row = rows[each["name"]]
        assert (each["fault"], each["phase"], each["ranks"]) == (row.fault, row.phase, row.ranks), row.name
        assert re.fullmatch(row.ours, each["poseidon_hvd"]["outcome"]), row.name
        assert each["poseidon_hvd"]["seconds"] < row.longest, row.name


@pytest.mark.faults
def test_results_are_of_all_rows():
    """A row that was added, renamed or left out asks for another run of make test-faults."""
    assert [each["name"] for each in json.loads(TOOL.RESULTS.read_text())["rows"]] == [row.name for row in ROWS]


def test_names_are_unique():
    assert len({row.name for row in ROWS}) == len(ROWS)

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
RESULTS = json.loads(TOOL.RESULTS.read_text())["rows"] if TOOL.RESULTS.exists() else None
needs_results = pytest.mark.skipif(RESULTS is None, reason="no whole run of make test-faults has been filed yet")


@needs_results
def test_page_is_made_of_the_results():
    page = TOOL.PAGE.read_text()
    assert page == TOOL.with_table(page, RESULTS), "run python tools/reliability.py"


@needs_results
def test_results_are_those_of_the_rows():
    """A row that was added, renamed or left out asks for another run of make test-faults."""
    assert [each["name"] for each in RESULTS] == [row.name for row in ROWS]
    for each, row in zip(RESULTS, ROWS):
        assert (each["fault"], each["phase"], each["ranks"]) == (row.fault, row.phase, row.ranks), row.name
        assert re.fullmatch(row.ours, each["poseidon_hvd"]["outcome"]), row.name
        assert each["poseidon_hvd"]["seconds"] < row.longest, row.name


def test_names_are_unique():
    assert len({row.name for row in ROWS}) == len(ROWS)

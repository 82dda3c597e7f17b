"""What ``make test`` leaves out: no group wholly."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from harness.slow import GROUPS, is_slow

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def kept() -> list[str]:
    """Node ids of what ``make test`` runs."""
    options = ["--collect-only", "-q", "-p", "no:cacheprovider", "-m", "not faults and not slow"]
    command = [sys.executable, "-m", "pytest", "tests", *options]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    return [line for line in done.stdout.splitlines() if "::" in line]


@pytest.mark.parametrize("module", GROUPS)
def test_each_group_keeps_a_smoke_test(kept, module):
    of_module = f"tests/{module}.py::"
    names = [line.removeprefix(of_module) for line in kept if line.startswith(of_module)]
    assert any(re.match(GROUPS[module].smoke, name) for name in names)


def test_patterns():
    assert is_slow("test_exchange", "test_threads[8-walks-one]", ())
    assert not is_slow("test_exchange", "test_threads[2-walks-one]", ())
    assert is_slow("test_cluster", "test_rate_changes_while_up", ("cluster",))
    assert not is_slow("test_cluster", "test_layout", ("request",))
    assert not is_slow("test_of_another_module", "test_any", ("cluster",))

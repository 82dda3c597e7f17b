"""One rank fails: the others end soon, with an error that says of what, and leave nothing behind; or all go on.

The whole is docs/reliability.md.
"""

import json
import os
import re
from pathlib import Path

import pytest
from harness.cluster import need
from harness.fault_table import ROWS
from harness.faults import BY_LAUNCHER, HANGS, LIBRARIES, run
from harness.launch import launch

from bench.cluster import available

SLACK = 5.0  # seconds beyond plain Horovod's own
TABLE = os.environ.get("POSEIDON_FAULTS_JSON")

pytestmark = pytest.mark.timeout(1800)


def check(row, outcome, launched):
    assert not launched.orphans, f"left behind: {launched.orphans}\n{launched}"
    assert re.fullmatch(row.ours, outcome.words), f"{outcome}\n{launched}"
    if row.fault == "out-of-memory":
        told = r"\[rank 1\] .*(\w+\.weight): out of memory: .* MB .*'\1': 'allreduce'"
        assert re.search(told, outcome.messages["1"]), outcome
    if row.fault in ("NaN", "Inf"):
        assert launched.output.count("sees 6 of 6 gradients that are not finite") == row.ranks, str(launched)


def observe(row, library, folder):
    """Once more where the launcher was faster: it ends the others some seconds after it sees one dead."""
    for attempt in range(2):
        where = folder / f"{library}-{attempt}"
        where.mkdir()
        outcome, launched = run(row, library, where)
        if outcome.words != BY_LAUNCHER:
            break
    return outcome, launched


def record(row, outcomes):
    """Into the file, in the place of what it says of this row."""
    if not TABLE:
        return
    path = Path(TABLE)
    seen = {each["name"]: each for each in json.loads(path.read_text())["rows"]} if path.exists() else {}
    mine = {"name": row.name, "fault": row.fault, "phase": row.phase, "ranks": row.ranks}
    seen[row.name] = {**mine, **{library: outcome.plain() for library, outcome in outcomes.items()}}
    rows = [seen[each.name] for each in ROWS if each.name in seen]
    path.write_text(json.dumps({"rows": rows}, indent=1) + "\n")


@pytest.mark.parametrize("row", [row for row in ROWS if row.smoke], ids=lambda row: row.name)
def test_fault(row, tmp_path):
    outcome, launched = observe(row, "poseidon_hvd", tmp_path)
    check(row, outcome, launched)
    assert outcome.seconds < row.longest, f"{outcome}\n{launched}"


@pytest.mark.faults
@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_fault_beside_horovod(row, tmp_path):
    if row.act is not None:
        need(*available())
    outcomes = {}
    for library in LIBRARIES:
        outcomes[library], launched = observe(row, library, tmp_path)
        print(library, outcomes[library])
        if library == "poseidon_hvd":
            check(row, outcomes[library], launched)
    ours, horovods = outcomes.values()
    assert ours.seconds < row.longest, outcomes
    # Horovod's own time counts only where it comes to the same end, and not where each new optimizer measures the
    # network for its plan.
    if row.script != "endurance.py" and ("end" in ours.words) == ("end" in horovods.words) and horovods.words != HANGS:
        assert ours.seconds < horovods.seconds + SLACK, outcomes
    record(row, outcomes)


def test_launcher_limit_kills_everything(tmp_path):
    """The harness itself: a rank that sleeps is found and killed, and the launch counts as timed out."""
    script = tmp_path / "sleep.py"
    script.write_text("import time\ntime.sleep(600)\n")
    launched = launch(2, [str(script)], seconds=8)
    assert launched.timed_out and launched.seconds < 60

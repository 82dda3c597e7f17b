"""Acceptance: a plain Horovod script, in which only the import line is replaced, trains to the same loss curve."""

import json
import re
from pathlib import Path

import pytest

from harness.launch import launch

SCRIPTS = Path(__file__).parent / "scripts"
PLAIN = "import horovod.torch as hvd"
STEPS = 20

pytestmark = pytest.mark.timeout(300)


def run(script: Path):
    """Losses per step, and tensors exchanged per scheme (None for plain Horovod)."""
    launched = launch(2, [str(SCRIPTS / "run_and_report.py"), str(script)], seconds=120).expect_success()
    losses = [float(value) for value in re.findall(r"loss \d+ (\S+)", launched.output)]
    assert len(losses) == STEPS, str(launched)
    schemes = re.search(r"schemes (\{.*\})", launched.output)
    return losses, json.loads(schemes.group(1)) if schemes else None


@pytest.fixture(scope="module")
def plain():
    losses, schemes = run(SCRIPTS / "digits_cnn.py")
    assert schemes is None
    assert losses[-1] < 0.7 * losses[0], f"the script does not learn: {losses}"
    return losses


@pytest.mark.parametrize("line", ["import poseidon_hvd as hvd", "import poseidon_hvd.torch as hvd"])
def test_same_loss_curve(plain, tmp_path, line):
    source = (SCRIPTS / "digits_cnn.py").read_text()
    assert source.count(PLAIN) == 1
    changed = tmp_path / "digits_cnn.py"
    changed.write_text(source.replace(PLAIN, line))
    losses, schemes = run(changed)
    for step, (ours, theirs) in enumerate(zip(losses, plain)):
        assert abs(ours - theirs) < 1e-4 * theirs, f"step {step}: {ours} instead of {theirs}"
    # Of 10 tensors the three convolution and bias pairs are dense; fc1 and fc2 are cheaper as factors at 32 rows.
    assert schemes["sfb"] == 4 * (STEPS - 1), schemes

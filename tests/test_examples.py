"""examples/digits.py as a user runs it: under horovodrun with our optimizer and with Horovod's, and as one process."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from harness.launch import environment, launch

SCRIPT = str(Path(__file__).resolve().parent.parent / "examples" / "digits.py")
EPOCH = re.compile(r"epoch +(\d+)/\d+ \[=+\] +\d+/\d+, loss ([\d.]+)  test accuracy ([\d.]+)%")
SENT = re.compile(r"sent by each rank: ([\d.]+) MB; plain Horovod: ([\d.]+) MB")
STEP = re.compile(r"trained in [\d.]+ s on (\d+) ranks?, [\d.]+ ms per step")

SHORT = ["--epochs", "3"]


def epochs(output):
    """(loss, accuracy in %) of each epoch, from the finished progress bars."""
    found = EPOCH.findall(output)
    assert [int(number) for number, _, _ in found] == list(range(1, len(found) + 1)), output
    return [(float(loss), float(accuracy)) for _, loss, accuracy in found]


@pytest.fixture(scope="module")
def ours():
    return launch(2, [SCRIPT, *SHORT], seconds=120).expect_success().output


@pytest.fixture(scope="module")
def horovods():
    return launch(2, [SCRIPT, *SHORT, "--horovod"], seconds=120).expect_success().output


def scheme_of(output, tensor):
    """Third column after the shape in the printed table."""
    line = re.search(rf"{re.escape(tensor)} +\d+(?: x \d+)? +(?:\d+|-) +(\w+)", output)
    assert line, f"{tensor} is not in the table:\n{output}"
    return line[1]


def test_every_epoch_shows_loss_and_accuracy(ours):
    results = epochs(ours)
    assert len(results) == 3
    assert results[-1][0] < results[0][0] / 4
    assert results[-1][1] > 90
    assert f"test accuracy {results[-1][1]:.2f}%" in ours.splitlines()[-1]
    assert STEP.search(ours)[1] == "2"


def test_output_is_no_flood(ours):
    """There is no terminal here, so every redrawn bar counts: first and last of an epoch, and two per second between."""
    seconds = float(re.search(r"trained in ([\d.]+) s", ours)[1])
    assert ours.count("epoch ") <= 3 * 3 + 2 * seconds + 1
    assert "[1]<std" not in ours  # rank 1 is silent


def test_hidden_layers_travel_as_factors(ours):
    # 64 rows over both ranks against break-evens of 113 and 512 rows; 19 for the last layer.
    assert {name: scheme_of(ours, name) for name in ("fc1.weight", "fc1.bias", "fc2.weight", "fc2.bias", "fc3.weight", "fc3.bias")} == {
        "fc1.weight": "sfb", "fc1.bias": "sfb", "fc2.weight": "sfb", "fc2.bias": "sfb", "fc3.weight": "allreduce", "fc3.bias": "allreduce",
    }


def test_sends_what_the_formulas_say(ours):
    sent, horovod = map(float, SENT.search(ours).groups())
    steps, rows, size = 3 * 22, 64, 2
    parameters = [(512, 64), (512, 512), (10, 512)]
    dense = [2 * 4 * (m * n + m) * (size - 1) / size for m, n in parameters]
    factors = [4 * (m + n + 1) * rows * (size - 1) / size for m, n in parameters[:2]]  # + 1: the flag
    # The first step only observes, so it is dense.
    assert sent == pytest.approx((sum(dense) + (steps - 1) * (sum(factors) + dense[2])) / 1e6, abs=0.006)
    assert horovod == pytest.approx(steps * sum(dense) / 1e6, abs=0.006)
    assert sent < horovod / 4


def test_trains_like_horovod(ours, horovods):
    for (loss, _), (expected, _) in zip(epochs(ours), epochs(horovods)):
        assert loss == pytest.approx(expected, rel=1e-4)
    assert "as sufficient factors" not in horovods and "sent by each rank" not in horovods


def test_reaches_97_percent():
    output = launch(2, [SCRIPT], seconds=200).expect_success().output
    assert epochs(output)[-1][1] >= 97


@pytest.mark.parametrize("arguments", [[], ["--horovod"]], ids=["poseidon_hvd", "horovod"])
def test_runs_as_one_process(arguments):
    done = subprocess.run([sys.executable, SCRIPT, *SHORT, *arguments], env=environment(), capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert epochs(done.stdout)[-1][1] > 85
    assert ("nothing is exchanged" in done.stdout) == (not arguments)
    assert STEP.search(done.stdout)[1] == "1"

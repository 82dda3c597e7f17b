"""The replay bench: its layer tables, the arithmetic of its scale, and one small run. No assertion on time."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from bench.replay import networks, report
from bench.replay.networks import NETWORKS
from bench.replay.schedule import Scale, flops_per_second, link_bits, rebuild_seconds, scaled_layers, schedule

ROOT = Path(__file__).resolve().parent.parent

# Totals as the architectures' authors and common implementations give them; exact where those are exact.
PUBLISHED_TOTALS = {
    "vgg19-22k": (229e6, 0.005),
    "vgg19": (143_667_240, 0),
    "inception-v3": (27_161_264, 0),
    "resnet152": (60_192_808, 0),
    "alexnet": (61_100_840, 0),
    "resnet50": (25_557_032, 0),
    "bert-base": (110e6, 0.01),
    "bert-large": (340e6, 0.015),
}
# Multiply-adds per image, as commonly given (in billions).
PUBLISHED_GMACS = {
    "vgg19": 19.6,
    "googlenet": 1.58,
    "inception-v3": 5.7,
    "resnet152": 11.5,
    "alexnet": 0.71,
    "resnet50": 4.1,
}


@pytest.mark.parametrize("name", PUBLISHED_TOTALS)
def test_parameter_totals(name):
    expected, tolerance = PUBLISHED_TOTALS[name]
    total = sum(layer.parameters for layer in networks.get(name).layers())
    assert abs(total - expected) <= tolerance * expected
    assert total == pytest.approx(networks.get(name).parameters, rel=0.015)


def test_googlenet_parameters():
    assert 5e6 < sum(layer.parameters for layer in networks.get("googlenet").layers()) < 7e6


def test_convolutions_of_vgg19():
    convolutions = sum(layer.parameters for layer in networks.get("vgg19-22k").layers() if layer.linear is None)
    assert convolutions == pytest.approx(20.0e6, rel=0.005)


def test_tensors_of_resnet50():
    layers = networks.get("resnet50").layers()
    assert sum(len(layer.tensors) + 2 * (layer.linear is not None) for layer in layers) == 161


@pytest.mark.parametrize("name", PUBLISHED_GMACS)
def test_multiply_adds(name):
    assert sum(layer.macs for layer in networks.get(name).layers()) == pytest.approx(
        1e9 * PUBLISHED_GMACS[name], rel=0.02
    )


@pytest.mark.parametrize("name", NETWORKS)
def test_schedule_covers_published_step(name):
    network = networks.get(name)
    plan = schedule(network, Scale(4, 8.0))
    assert plan.step_seconds == pytest.approx(8 * network.step_seconds)
    ends = np.array([*plan.forward, *reversed(plan.backward)])
    assert (np.diff(ends) >= 0).all()
    macs = [layer.macs for layer in network.layers()]
    forward_share = sum(macs) / (3 * sum(macs) - macs[0])
    assert plan.forward[-1] == pytest.approx(forward_share * plan.step_seconds)


def test_layer_times_follow_multiply_adds():
    network = networks.get("tiny")
    plan = schedule(network, Scale(1, 1.0))
    macs = [layer.macs for layer in network.layers()]
    spent = np.diff([0, *plan.forward])
    assert spent / spent.sum() == pytest.approx(np.array(macs) / sum(macs))
    backward = np.diff([*reversed(plan.backward)])  # of layers n-2 ... 0
    assert backward[:-1] == pytest.approx(2 * spent[-2:0:-1])
    assert backward[-1] == pytest.approx(spent[0])


def test_extra_backward_delays_later_layers():
    network = networks.get("tiny")
    plain, charged = schedule(network, Scale(1, 2.0)), schedule(network, Scale(1, 2.0), {2: 0.5})
    assert np.subtract(charged.backward, plain.backward) == pytest.approx([1.0, 1.0, 1.0, 0.0])
    assert charged.forward == plain.forward


def test_scale():
    scale = Scale(4, 8.0)
    assert scale.rate(10e9) == 78_125_000
    assert scale.environment() == {"HOROVOD_CYCLE_TIME": "8", "HOROVOD_FUSION_THRESHOLD": str(8 << 20)}
    assert link_bits("10gbit-equivalent") == link_bits("10gbit") == 10_000_000_000
    assert link_bits("56gbit") == 56_000_000_000
    assert link_bits("unshaped") is None


@pytest.mark.parametrize("name", ["vgg19-22k", "vgg19", "inception-v3", "resnet152", "bert-large"])
@pytest.mark.parametrize("size", [2, 4, 8])
def test_bytes_scale_exactly(name, size):
    """Whole gradients and factors both shrink by s^2, up to the rounding of odd sizes."""
    network = networks.get(name)
    layers, scaled = network.layers(), scaled_layers(network, Scale(size, 1.0))
    whole = sum(sum(layer.tensors) for layer in layers)
    assert sum(sum(layer.tensors) for layer in scaled) * size**2 == pytest.approx(whole, rel=0.01)
    for layer, small in zip(layers, scaled):
        fc = layer.linear
        if fc is not None and fc.out_features > 2 and network.batch * fc.rows % size == 0:
            weight, factors = (
                fc.out_features * fc.in_features,
                network.batch * fc.rows * (fc.out_features + fc.in_features),
            )
            assert small.out_features * small.in_features * size**2 == pytest.approx(weight, rel=0.01)
            assert small.rows * (small.out_features + small.in_features) * size**2 == pytest.approx(factors, rel=0.01)


def test_rebuild_charge():
    """VGG19-22K: 16 ranks, 208.7 million weights, 32 rows: 2 * 480 * 208.7e6 operations at the network's own speed."""
    network = networks.get("vgg19-22k")
    weights = 25088 * 4096 + 4096 * 4096 + 4096 * 21841
    total = sum(rebuild_seconds(network, layer, 16) for layer in network.layers())
    assert total == pytest.approx(2 * 480 * weights / flops_per_second(network))


def test_evaluation():
    """Two ranks, one block: a step lasts from the slowest rank's end to the slowest rank's next end."""
    network = networks.get("tiny")
    ends = ([0.0, 1.0, 1.9], [0.0, 0.9, 2.1])
    blocks = [[{"ends": e, "late": [0.0, 0.05], "sent": 100, "before": None, "after": None}] for e in ends]
    raw = {"blocks": {"none": blocks}, "schedule_seconds": {"none": 10 * network.step_seconds}}
    found = report.evaluate(network, Scale(2, 10.0), 2, 1_000_000, raw)["none"]
    assert found["step_seconds"]["median"] == pytest.approx(0.105)  # 1.0 and 1.1, undilated
    assert found["speedup"] == pytest.approx(2 * 0.08 / 0.105)
    assert found["sent_bytes_per_rank"] == pytest.approx(50 * 4)
    assert found["of_none"] == 1


def test_smoke(tmp_path):
    """Two ranks on loopback: every system's gradients are right (the ranks check before they time), and all is
    written.
    """
    systems = ["none", "horovod", "ddp", "poseidon-bytes", "poseidon-bytes-charged", "poseidon-allreduce"]
    command = [
        sys.executable,
        "-m",
        "bench.replay",
        "--network",
        "tiny",
        "--local",
        "-np",
        "2",
        "--rounds",
        "1",
        "--steps",
        "2",
        "--scale",
        "2",
        "--dilation",
        "1",
        "--timeline",
        "--systems",
        ",".join(systems),
        "--output",
        str(tmp_path),
        "--timeout",
        "200",
    ]
    env = {key: value for key, value in os.environ.items() if not key.startswith(("HOROVOD_", "POSEIDON_"))}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads((tmp_path / "replay-tiny-2.json").read_text())
    assert (tmp_path / "replay-tiny-2.png").stat().st_size > 0
    assert list(result["systems"]) == systems
    for entry in result["systems"].values():
        assert entry["step_seconds"]["count"] == 2
        assert entry["speedup"] > 0
    assert result["horovod_environment"] == {
        "HOROVOD_CYCLE_TIME": "1",
        "HOROVOD_FUSION_THRESHOLD": str(32 << 20),
        "OMP_NUM_THREADS": "1",
    }
    assert "4 of 6 tensors as sufficient factors" in result["schemes"]["poseidon-bytes"]
    assert "0 of 6 tensors as sufficient factors" in result["schemes"]["poseidon-allreduce"]
    stages = result["systems"]["poseidon-bytes"]["stages"]
    assert stages["sfb"]["rebuild"]["mean"] > 0
    tail = result["tails"]["poseidon-bytes"]
    assert tail["taken_up"] <= tail["agreed"] <= tail["begun"] <= tail["ended"]
    assert str(ROOT) not in json.dumps(result["environment"])


def test_wrong_gradients_are_seen():
    import torch

    from bench.replay.model import Clock, Replay

    network = networks.get("tiny")
    clock = Clock(schedule(network, Scale(4, 1.0)))
    clock.hurry = True
    model = Replay(scaled_layers(network, Scale(4, 1.0)), clock, rank=0)
    model().backward()
    assert list(model.wrong_gradients(1)) == []
    with torch.no_grad():
        model.weights[1].weight.grad[3] *= 1.01
    assert [message.split(":")[0] for message in model.wrong_gradients(1)] == ["fc1.weight"]
    assert len(list(model.wrong_gradients(2))) == 6  # a mean over two ranks would be another one

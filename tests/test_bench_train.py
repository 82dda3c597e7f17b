"""The instrument measures what it says, at smoke size: bench.train on two ranks, bench.compare on its results.

No word about time.
"""

import json
from types import SimpleNamespace

import pytest
import torch
from harness.bench import bench

from bench import compare, models, steps, systems

TENSORS = {
    "alexnet": (61_100_840, 16),
    "mlp": (8_344_552, 6),
    "resnet50": (25_557_032, 161),
    "transformer": (16_232_424, 52),
    "dlrm": (10_671_681, 22),
}


def train(folder, model, *arguments):
    """(what was printed, what was filed)"""
    output = bench(
        "train",
        "--local",
        "--np",
        2,
        "--steps",
        2,
        "--model",
        model,
        "--directory",
        folder,
        "--timeout",
        100,
        *arguments,
    )
    return output, json.loads((folder / f"train-{model}-2xlocal.json").read_text())


@pytest.fixture(scope="module")
def mlp(tmp_path_factory):
    folder = tmp_path_factory.mktemp("mlp")
    systems = "none,horovod,ddp,ddp-powersgd,poseidon-allreduce,poseidon-sfb,poseidon-bytes,poseidon-time"
    output, result = train(folder, "mlp", "--systems", systems, "--timeline")
    return folder, output, result


@pytest.fixture(scope="module")
def transformer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("transformer")
    output, result = train(folder, "transformer", "--systems", "none,poseidon-bytes", "--scale", "0.06")
    return folder, output, result


def test_every_system_is_timed_in_every_round(mlp):
    _, output, result = mlp
    names = result["settings"]["systems"].split(",")
    assert list(result["seconds_per_step"]) == list(result["samples"]) == names
    assert all(len(steps) == 2 and min(steps) > 0 for steps in result["samples"].values())
    assert all(set(result["speedup"][name]) == {"none", "horovod", "ddp"} for name in names)
    for name in names:
        assert result["speedup"][name].get(name, 1.0) == 1.0
        assert f" {name} " in output


def test_gradients_are_checked_and_lossy_systems_marked(mlp):
    _, output, result = mlp
    assert result["lossy"] == ["ddp-powersgd"] and "ddp-powersgd (lossy)" in output
    exact = {name: error for name, error in result["gradient_error"].items() if name not in result["lossy"]}
    assert set(exact) == {"ddp", "poseidon-allreduce", "poseidon-sfb", "poseidon-bytes", "poseidon-time"}
    assert max(exact.values()) < 1e-5 < result["gradient_error"]["ddp-powersgd"]


def test_engine_bytes_equal_formulas(mlp):
    """Two ranks send half of 2 x 4 bytes per parameter as allreduce, one rank's rows of 4 (M + N + flag) bytes as
    factors.
    """
    engine = mlp[2]["engine_bytes_per_step"]
    assert engine["none"] is None and engine["horovod"] is None
    assert engine["poseidon-allreduce"] == pytest.approx(4 * TENSORS["mlp"][0], rel=1e-3)
    factors = 4 * 16 * sum(m + n + 1 for m, n in ((2048, 1024), (2048, 2048), (1000, 2048)))
    assert engine["poseidon-sfb"] == engine["poseidon-bytes"] == pytest.approx(factors, rel=1e-3)


def test_what_a_plan_predicts_stands_beside_what_was_measured(mlp):
    _, output, result = mlp
    assert set(result["predicted"]) <= {"poseidon-time", "poseidon-allreduce"}
    for name, p in result["predicted"].items():
        assert p["of_measured"] == pytest.approx(p["step_seconds"] / result["seconds_per_step"][name]["median"])
        assert f"{name}: its plan predicted {p['step_seconds']:.3f} s" in output


def with_plans(*made_at, predicted=None, factored=(), **options):
    """A system whose plan after step i was made at ``made_at[i]``, with factors if that is in ``factored``; the last
    one stays.
    """
    done = []

    def plan():
        step = made_at[min(len(done), len(made_at)) - 1]
        scheme = "sfb" if step in factored else "allreduce"
        return (
            None
            if step is None
            else {"made_at_step": step, "predicted_step_seconds": predicted, "tensors": [{"scheme": scheme}]}
        )

    system = systems.System("ours", None, None, SimpleNamespace(plan=plan), **options)
    system.run = lambda loss_of, update: done.append(update)
    return system


def test_predictions_are_those_of_plans_that_have_one():
    silent = systems.System("none", None, None, SimpleNamespace())
    unsure = with_plans(1)
    built = [silent, unsure, with_plans(1, predicted=0.3)]
    for system in built[1:]:
        system.run(None, update=True)
    found = steps._predicted(built, {"none": {"median": 0.1}, "ours": {"median": 0.4}})
    assert list(found) == ["ours"] and found["ours"]["of_measured"] == pytest.approx(0.75)
    assert found["ours"]["made_at_step"] == 1


def test_warm_up_ends_with_a_plan_that_was_made_from_measurements():
    assert systems.warm_up(with_plans(1), None) == 2
    assert systems.warm_up(with_plans(0, 0, 0, 3, 3, 3, 3, 7, measures=True), None) == 9
    assert systems.warm_up(with_plans(None, None, 2, 4, 6, measures=True), None) == 6
    trial = (0, 0, 0, 3, 3, 3, 3, 7, 7, 7, 7, 11)
    assert (
        systems.warm_up(with_plans(*trial, measures=True, factored=[7]), None) == systems.MOST_WARMUP_STEPS
    )  # 11 changed it back
    assert systems.warm_up(with_plans(*trial, 11, 11, 11, 15, measures=True, factored=[7]), None) == 17
    assert systems.warm_up(with_plans(*trial, measures=True, factored=[7, 11]), None) == 13
    short = with_plans(*range(1, 200), measures=True, predicted=0.01)
    assert systems.warm_up(short, None) == systems.MOST_SHORT_WARMUP_STEPS
    for restless in (range(1, 200), [0], [None], [0, 0, 3]):
        assert systems.warm_up(with_plans(*restless, measures=True), None) == systems.MOST_WARMUP_STEPS


def test_loopback_makes_no_claim_about_bandwidth(mlp):
    _, output, result = mlp
    assert "bandwidth claims need the cluster" in output
    assert set(result["wire_bytes_per_step"].values()) == {None}


def test_time_is_accounted_for(mlp):
    _, output, result = mlp
    assert "Where a step went" in output
    assert set(result["stages"]["poseidon-sfb"]) == {"sfb"} and set(result["stages"]["poseidon-allreduce"]) == {
        "allreduce"
    }
    assert result["stages"]["horovod"] == {}
    assert result["phases"]["none"]["synchronize"] == pytest.approx(0, abs=1e-3)


def test_result_says_where_it_comes_from(mlp):
    folder, _, result = mlp
    environment = result["environment"]
    assert environment["command"].startswith("python -m bench.train --local")
    assert {"commit", "torch", "horovod", "cpu", "cores", "extension_sha1", "load_average_before"} <= set(environment)
    assert environment["torch_threads"] == 1
    assert (folder / "train-mlp-2xlocal.png").read_bytes().startswith(b"\x89PNG")


def test_reference_is_horovod_also_where_it_is_not_timed(transformer):
    _, output, result = transformer
    assert result["gradient_error"]["poseidon-bytes"] < 1e-5
    assert "x horovod" not in output
    assert any("tokens.weight" in line and " row-sparse " in line for line in result["plans"]["poseidon-bytes"])


def test_compare_of_a_file_with_itself(mlp):
    path = mlp[0] / "train-mlp-2xlocal.json"
    output = bench("compare", path, path)
    assert "1.000" in output and "differs" not in output and "B slower" not in output and "B faster" not in output


def test_compare_names_what_differs(mlp, transformer):
    output = bench("compare", mlp[0] / "train-mlp-2xlocal.json", transformer[0] / "train-transformer-2xlocal.json")
    assert "differs: model: A mlp, B transformer" in output and " none " in output and " horovod " not in output


def test_compare_ratio():
    def result(*steps):
        return {
            "seconds_per_step": {"x": {"median": steps[1], "p10": steps[0], "p90": steps[2], "count": 3}},
            "samples": {"x": steps},
        }

    (row,) = compare.compare(result(1.0, 1.1, 1.2), result(2.0, 2.2, 2.4))
    assert (
        row.ratio == pytest.approx(2)
        and row.interval[0] >= 2.0 / 1.2
        and row.interval[1] <= 2.4
        and row.verdict == "B slower"
    )
    (row,) = compare.compare(result(1.0, 1.1, 1.2), result(1.0, 1.1, 1.2))
    assert row.verdict == "no difference seen"


@pytest.mark.parametrize("arguments", [("--model", "vgg"), ("--systems", "none,posseidon")], ids=["model", "system"])
def test_unknown_names_are_refused_with_those_that_exist(arguments):
    output = bench("train", "--local", *arguments, expect=1)
    assert "resnet50" in output or "poseidon-sfb" in output


@pytest.mark.parametrize("name", TENSORS)
def test_models_have_their_published_sizes_and_run_small(name):
    workload = models.build(name)
    with torch.device("meta"):  # sizes need no memory
        parameters = list(workload.make_model().parameters())
    assert (sum(p.numel() for p in parameters), len(parameters)) == TENSORS[name]
    rows = models.rows_of(workload, 0, 0.01)
    inputs, target = workload.make_batch(rows, 0.01)
    assert rows == 2 and all(x.shape[0] == 2 for x in (*inputs, target))
    with torch.device("meta"):
        model = workload.make_model()
        loss = workload.loss(model(*(x.to("meta") for x in inputs)), target.to("meta"))
    assert loss.shape == ()

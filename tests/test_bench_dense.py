"""bench.dense measures what it says, at smoke size on loopback; its verdicts and its counting by hand.

No word about time.
"""

import json
import shutil

import pytest
from harness.bench import bench

from bench import dense, instructions, launch

STOCK = ["none", "horovod", "ddp"]
METHODS = ["horovod", "bsp", "wfbp", "lazy:20000000", "auto"]
GRADIENT_BYTES, TENSORS = 4 * 8_344_552, 6  # of the MLP


@pytest.fixture(scope="module")
def mlp(tmp_path_factory):
    """(folder, what was printed, what was filed)"""
    folder = tmp_path_factory.mktemp("dense")
    output = bench(
        "dense",
        "--local",
        "--np",
        2,
        "--models",
        "mlp",
        "--methods",
        ",".join(METHODS),
        "--steps",
        3,
        "--no-peaks",
        "--timeline",
        "--directory",
        folder,
        "--timeout",
        100,
    )
    return folder, output, json.loads((folder / "dense-mlp-2xlocal.json").read_text())


@pytest.fixture(scope="module")
def memory(tmp_path_factory):
    folder = tmp_path_factory.mktemp("memory")
    output = bench("dense", "--memory", "--local", "--np", 2, "--models", "mlp", "--directory", folder, "--timeout", 28)
    return output, json.loads((folder / "dense-memory-mlp.json").read_text())


def test_every_method_is_timed_in_every_round_beside_stock_systems(mlp):
    _, output, result = mlp
    names = [*STOCK, *(f"dense-{method}" for method in METHODS)]
    assert list(result["seconds_per_step"]) == list(result["samples"]) == names
    assert all(len(seconds) == 3 and min(seconds) > 0 for seconds in result["samples"].values())
    assert all(set(speedup) == {"horovod", "ddp"} for speedup in result["speedup"].values())
    assert all(f" {name} " in output for name in names)
    assert (
        set(result["gradient_error"]) == set(names) - {"none", "horovod"}
        and max(result["gradient_error"].values()) < 1e-5
    )


def test_everything_is_dense_and_every_method_the_one_asked_for(mlp):
    result = mlp[2]
    assert set(result["slices"]) == {f"dense-{method}" for method in METHODS}
    for name, slices in result["slices"].items():
        assert slices["method"].partition(":")[0] == name.removeprefix("dense-").partition(":")[0]
        assert set(result["stages"][name]) == {"allreduce"}


def test_allreduces_and_bytes_of_slices_are_those_of_the_method(mlp):
    counts = mlp[2]["dense"]
    assert all(counts[name] == {} for name in STOCK)
    assert [counts[f"dense-{method}"]["allreduces"] for method in ("horovod", "wfbp", "bsp")] == [TENSORS, TENSORS, 1]
    assert 1 <= counts["dense-lazy:20000000"]["allreduces"] < TENSORS
    for method in ("wfbp", "bsp", "lazy:20000000"):
        each = counts[f"dense-{method}"]
        assert each["slices"] == each["allreduces"] and each["in_place_bytes"] + each["copied_bytes"] == GRADIENT_BYTES
    assert counts["dense-horovod"]["slices"] == counts["dense-horovod"]["copied_bytes"] == 0


def test_columns_are_of_the_systems_that_have_the_figure():
    measured = {
        "dense": {
            "none": {},
            "dense-bsp": {"allreduces": 1.0, "slices": 1.0, "copied_bytes": 2.5e6, "in_place_bytes": 1e6},
        },
        "peak_bytes": {},
    }
    columns = {
        "allreduces": {"dense-bsp": "1"},
        "MB copied": {"dense-bsp": "2.50"},
        "MB in place": {"dense-bsp": "1.00"},
    }
    assert dense.columns(measured) == columns
    measured["peak_bytes"] = {"none": [3e8, 4e8], "dense-bsp": [5e8, 4e8]}
    assert dense.columns(measured) == {**columns, "peak MB": {"none": "400", "dense-bsp": "500"}}


def test_verdict_is_round_by_round_against_the_better_one():
    samples = {
        "none": [0.1] * 3,
        "horovod": [4.0, 6.0, 40.0],
        "ddp": [2.0, 4.0, 20.0],
        "dense-lazy": [1.0, 1.0, 1.0],
        "dense-auto": [1.0, 3.0, 20.0],
    }
    found = dense.verdicts(samples)
    assert list(found) == ["dense-lazy", "dense-auto"]
    assert found["dense-auto"] == {"seconds": 3.0, "best": "ddp", "of_best": 0.75, "speedup": 2.0}
    assert "ours / best of (Horovod, DDP) 0.750, Horovod / ours 2.000 (dense-auto; best: ddp)" in dense.verdict_text(
        found
    )
    del found["dense-auto"]
    assert "(dense-lazy; best: ddp)" in dense.verdict_text(found)


def test_verdict_is_printed_and_filed(mlp):
    _, output, result = mlp
    assert dense.verdicts(result["samples"]) == result["verdicts"]
    assert dense.verdict_text(result["verdicts"]) in output and "(dense-auto; best:" in output


def test_result_says_where_it_comes_from(mlp):
    folder, output, result = mlp
    assert (
        result["environment"]["command"].startswith("python -m bench.dense --local") and result["benchmark"] == "dense"
    )
    assert (folder / "dense-mlp-2xlocal.png").read_bytes().startswith(b"\x89PNG")
    assert "bandwidth claims need the cluster" in output and set(result["wire_bytes_per_step"].values()) == {None}


def test_peaks_are_of_each_system_alone_on_each_rank(memory):
    output, result = memory
    peaks = result["peak_bytes"]
    assert list(peaks) == [*STOCK, "dense-auto"] and all(len(ranks) == 2 for ranks in peaks.values())
    # Weights and gradients are there in any case. DDP keeps the gradients once more, in buckets.
    assert min(peaks["none"]) > 2 * GRADIENT_BYTES and min(peaks["ddp"]) > max(peaks["none"]) + GRADIENT_BYTES / 2
    assert all(f" {name} " in output for name in peaks)


@pytest.mark.parametrize("library", ["none", "horovod", "dense-auto"])
def test_one_rank_exchanges_every_gradient(library):
    output = bench("instructions", "--library", library, "--steps", 4, "--tensors", 8, "--pause", 0.1)
    done = json.loads(next(line for line in output.splitlines() if line.startswith("{")))
    assert done == {"library": library, "steps": 4, "tensors": 8, "exchanged": 0 if library == "none" else 8}


# Start-up costs 10,000; a step costs 100 with the plain optimizer, 400 with Horovod's and 200 with ours. A second
# thread polls.
FAKE_VALGRIND = """#!/bin/sh
for argument in "$@"; do
    case $argument in
        --callgrind-out-file=*) file=${argument#*=} ;;
        none) cost=100 ;;
        horovod) cost=400 ;;
        dense-*) cost=200 ;;
    esac
    steps=$argument
done
[ $cost ] || exit 3
total=$((10000 + cost * steps))
printf 'version: 1\\nevents: Ir\\nthread: 1\\n\\nfn=(1) step\\n0 5\\n\\ntotals: %d\\n' $total > $file-01
printf 'version: 1\\nthread: 2\\n\\ntotals: %d\\n' $((7 * steps)) > $file-02
echo counted
"""


@pytest.fixture
def fake_valgrind(tmp_path, monkeypatch):
    program = tmp_path / "valgrind"
    program.write_text(FAKE_VALGRIND)
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert shutil.which("valgrind") == str(program)


def test_own_instructions_are_those_of_a_step_beyond_the_plain_optimizer(fake_valgrind):
    measured = instructions.measure(["horovod", "dense-auto"], timeout=30)
    assert measured["own"] == {"horovod": 300, "dense-auto": 100}
    assert measured["instructions_per_step"]["horovod"] == {"training_thread": 400, "other_threads": 7}


def test_instructions_are_printed_and_filed(fake_valgrind, tmp_path):
    output = bench("dense", "--instructions", "--methods", "auto,bsp", "--directory", tmp_path)
    result = json.loads((tmp_path / "dense-instructions.json").read_text())
    assert result["horovod_over_own"] == {"horovod": 1, "dense-auto": 3, "dense-bsp": 3}
    assert " dense-bsp " in output and " 3.00 " in output and result["settings"]["tensors"] == 500


def test_a_run_that_fails_is_shown(fake_valgrind):
    with pytest.raises(SystemExit, match="ended with status 3"):
        instructions.measure(["other"], timeout=30)


def test_without_valgrind_nothing_is_counted(monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(SystemExit, match="not on PATH"):
        instructions.measure(["horovod"], timeout=30)


@pytest.mark.parametrize(
    "arguments, known",
    [
        (("--models", "mlp,vgg"), "resnet50"),
        (("--methods", "auto,hovorod"), "priority"),
        (("--methods", "lazy:few"), "lazy:BYTES"),
        (("--rates", "unshaped,fast"), "200mbit"),
    ],
    ids=["model", "method", "threshold", "rate"],
)
def test_unknown_names_are_refused_with_those_that_exist(arguments, known):
    assert known in bench("dense", *arguments, expect=1)


def test_help():
    words = set(bench("dense", "--help").replace(",", " ").split())
    assert {"--models", "--rates", "--methods", "--memory", "--instructions", "--no-peaks"} <= words


def test_ranks_keep_what_they_free_unless_their_peak_is_measured(tmp_path, monkeypatch):
    environments = []
    monkeypatch.delenv("MALLOC_TRIM_THRESHOLD_", raising=False)
    monkeypatch.setattr(launch, "_run_local", lambda argv, env, ranks, timeout: environments.append(env) or 0)
    for keep in (True, False):
        launch.run("bench.dense", {"threads": 1}, tmp_path, ranks=2, rate=None, timeout=1, keep_memory=keep)
    assert ["MALLOC_TRIM_THRESHOLD_" in env for env in environments] == [True, False]

"""bench.selector measures what it says, at smoke size on loopback; its sample and its verdicts by hand.

No word about time.
"""

import argparse
import collections
import dataclasses
import json
import threading

import pytest
from harness.bench import bench

from bench import cells, launch, regret, selector
from bench.cells import SCHEMES, Cell
from bench.systems import MOST_SHORT_WARMUP_STEPS

BIG = Cell(8192, 8192, 512, 8, "50mbit")
LIMITS = {"limit_seconds": 20.0, "memory_bytes": 24 * 2**30, "cores": 2}


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """(folder, what was printed, what was filed)"""
    folder = tmp_path_factory.mktemp("selector")
    output = bench(
        "selector",
        "--local",
        "--np",
        2,
        "--layers",
        "64x64,96x256",
        "--rows",
        "1,8",
        "--cells",
        3,
        "--seconds",
        0.2,
        "--directory",
        folder,
        "--timeout",
        100,
    )
    return folder, output, json.loads((folder / "selector.json").read_text())


def test_every_cell_of_the_sample_is_measured(small):
    _, output, result = small
    assert len(result["cells"]) == result["asked_for"] == 3 and result["failures"] == {}
    assert "Measured 3 of 3 cells" in output and "bandwidth claims need the cluster" in output
    for record in result["cells"]:
        assert (record["ranks"], record["rate"]) == (2, "unshaped")
        assert (
            set(record["timing"]) == {*SCHEMES, "policy"}
            and len({timing["count"] for timing in record["timing"].values()}) == 1
        )
        assert record["gradient_error"] < 1e-5
        assert set(record["predicted_seconds"]) == set(SCHEMES) and record["warmup_steps"] <= MOST_SHORT_WARMUP_STEPS


def test_verdicts_follow_from_the_times(small):
    result = small[2]
    for record in result["cells"]:
        seconds = record["seconds"]
        assert record["regret"] == seconds[record["chosen"]] / min(seconds.values()) >= 1
        assert seconds[record["best"]] == min(seconds.values())
    assert sum(sum(counts.values()) for counts in result["summary"]["confusion"].values()) == 3
    assert set(result["summary"]["rules"]) == {"time", "bytes", "always allreduce", "always sfb"}


def test_result_says_where_it_comes_from(small):
    folder, _, result = small
    assert result["environment"]["command"].startswith("python -m bench.selector --local")
    assert {"commit", "torch", "horovod", "cpu", "cores", "extension_sha1", "load_average_before"} <= set(
        result["environment"]
    )
    assert (folder / "selector.png").read_bytes().startswith(b"\x89PNG")


def test_default_sample_is_even_and_always_the_same():
    grid = cells.grid()
    possible = [cell for cell in grid if cells.reason_to_leave_out(cell, **LIMITS) is None]
    taken = cells.sample(possible, 144)
    assert taken == cells.sample(possible, 144) and len(set(taken)) == 144
    for key, most in (
        (lambda c: (c.ranks, c.rate), 0),
        (lambda c: c.rows, 3),
        (lambda c: c.layer, 6),
        (lambda c: (c.layer, c.rows), 2),
    ):
        counts = collections.Counter(map(key, taken))
        assert len(counts) == len(set(map(key, possible))) and max(counts.values()) - min(counts.values()) <= most


def test_sample_of_everything_is_everything():
    grid = cells.grid(ranks=[2], rates=["unshaped"])
    assert cells.sample(grid, 10_000) == grid


def test_bytes_of_a_cell():
    cell = Cell(100, 50, 8, 4, "unshaped")
    assert cell.wire_bytes == {"allreduce": 2 * 4 * 100 * 50 * 3 / 4, "sfb": 4 * 150 * 8 * 4 * 3 / 4}
    assert cell.network_seconds("allreduce") == 0
    assert dataclasses.replace(cell, rate="1mbit").network_seconds("sfb") == pytest.approx(8 * 14_400 / 1e6)


@pytest.mark.parametrize(
    "change, limits, word",
    [
        ({}, {}, "allreduce"),
        ({"rate": "unshaped"}, {}, "products"),
        ({"rate": "unshaped"}, {"limit_seconds": 1000.0, "memory_bytes": 2**30}, "GiB"),
        ({"rate": "unshaped"}, {"limit_seconds": 1000.0}, None),
    ],
)
def test_cells_are_left_out_with_a_reason(change, limits, word):
    reason = cells.reason_to_leave_out(dataclasses.replace(BIG, **change), **{**LIMITS, **limits})
    assert reason is None if word is None else word in reason


def test_list_runs_nothing_and_names_what_is_left_out(tmp_path):
    output = bench("selector", "--list", "--cells", 20, "--directory", tmp_path)
    assert "8192 x 8192, 512 rows, 8 ranks, 50mbit: its allreduce" in output and "20 cells, very roughly" in output
    assert list(tmp_path.iterdir()) == []


def record_of(cell, allreduce, sfb, chosen):
    return {
        **dataclasses.asdict(cell),
        "seconds": {"allreduce": allreduce, "sfb": sfb},
        "chosen": chosen,
        "predicted_seconds": dict.fromkeys(SCHEMES),
    }


def test_regret_and_confusion():
    few, many = Cell(100, 100, 1, 2, "50mbit"), Cell(100, 100, 512, 2, "50mbit")
    records = record_of(few, 2.0, 1.0, "sfb"), record_of(many, 1.0, 3.0, "sfb"), record_of(few, 1.0, 1.04, "allreduce")
    judged = [regret.judge(record) for record in records]
    verdicts = [(r["best"], r["regret"], r["near_tie"]) for r in judged]
    assert verdicts == [("sfb", 1.0, False), ("allreduce", 3.0, False), ("allreduce", 1.0, True)]
    totals = regret.summary(judged, "time")
    assert totals["rules"]["time"] == {
        "within_10_percent": pytest.approx(2 / 3),
        "median": 1.0,
        "mean": pytest.approx(5 / 3),
        "worst": 3.0,
        "worst_cell": str(many),
    }
    assert totals["rules"]["bytes"]["worst"] == 1.04 and totals["rules"]["always allreduce"]["worst"] == 2.0
    assert totals["confusion"] == {
        "allreduce": {"allreduce": 0, "sfb": 0, "near_tie": 1},
        "sfb": {"allreduce": 1, "sfb": 1, "near_tie": 0},
    }
    assert totals["predicted_of_measured"] is None


def test_what_was_measured_before_a_failure_is_filed(tmp_path):
    cell = Cell(64, 64, 1, 2, "unshaped")
    lines = [{"cpu": "some", "cores": 2, "commit": "abc"}, record_of(cell, 2.0, 1.0, "sfb")]
    (tmp_path / "cells.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    args = argparse.Namespace(result="partial", directory=tmp_path, policy="time", local=True)
    measured = {"environment": None, "cells": [], "left_out": [{**dataclasses.asdict(BIG), "reason": "too long"}]}
    selector._collect(tmp_path, measured)
    selector.file(args, measured)
    result = json.loads((tmp_path / "partial.json").read_text())
    assert [r["regret"] for r in result["cells"]] == [1.0] and result["environment"]["commit"] == "abc"
    assert (tmp_path / "partial.png").exists()


def test_ranks_have_the_rate_changed_and_wait_for_it(tmp_path):
    """The launcher's side by hand: nobody else looks into the folder."""
    seen = []
    cluster = argparse.Namespace(set_rate=seen.append)
    launch._serve_rate(tmp_path, cluster)
    assert seen == []
    for number, rate in enumerate(("50mbit", "unshaped", "50mbit"), 1):
        rank = threading.Thread(target=launch.request_rate, args=(tmp_path, number, rate))
        rank.start()
        while rank.is_alive():
            launch._serve_rate(tmp_path, cluster)
        rank.join()
    assert seen == ["50mbit", "unshaped", "50mbit"]


def test_unknown_values_are_refused():
    assert "invalid literal" in bench("selector", "--np", "2,two", expect=2)

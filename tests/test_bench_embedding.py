"""bench.embedding measures what it says, at smoke size on loopback. No word about time."""

import json

import pytest
import torch
from harness.bench import bench

from bench.embedding import CLASSES, KINDS, draw_tokens, merged_bytes

VOCABULARY, WIDTH, SEQUENCES, TOKENS = 5000, 32, 8, 16


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """(folder, what was printed, what was filed)"""
    folder = tmp_path_factory.mktemp("embedding")
    sizes = ("--vocabulary", VOCABULARY, "--width", WIDTH, "--sequences", SEQUENCES, "--tokens", TOKENS)
    output = bench("embedding", "--local", "--np", 2, *sizes, "--steps", 2, "--directory", folder, "--timeout", 100)
    return folder, output, json.loads((folder / "embedding-2xlocal.json").read_text())


def test_every_system_is_timed_and_exact(small):
    _, output, result = small
    assert list(result["seconds_per_step"]) == list(KINDS)
    assert (
        set(result["gradient_error"]) == set(KINDS) - {"none", "horovod"}
        and max(result["gradient_error"].values()) < 1e-5
    )
    assert all(set(speedup) == {"none", "horovod", "horovod-sparse"} for speedup in result["speedup"].values())
    assert all(f" {name} " in output for name in KINDS)


def test_formula_counts_the_distinct_tokens_of_each_rank(small):
    result = small[2]
    distinct = [
        draw_tokens((SEQUENCES, TOKENS), VOCABULARY, uniform=False, seed=1 + rank).unique().numel() for rank in range(2)
    ]
    assert result["distinct_tokens"] == distinct
    assert result["formula_bytes_per_step"] == sum(distinct) / 2 * (WIDTH + 2) * 4


def test_forced_rows_are_fewer_bytes_than_the_table(small):
    result = small[2]
    table, head = 4 * VOCABULARY * WIDTH, 4 * (WIDTH + 1) * CLASSES  # halves of 2 x 4 bytes
    assert 0 < result["engine_bytes_per_step"]["poseidon-row-sparse"] < (table + head) / 2
    assert any("tokens.weight" in line and "row-sparse" in line for line in result["plans"]["poseidon-row-sparse"])


def test_loopback_makes_no_claim_about_bandwidth(small):
    _, output, result = small
    assert "bandwidth claims need the cluster" in output
    assert set(result["wire_bytes_per_step"].values()) == set(result["sent_of_formula"].values()) == {None}


def test_result_says_where_it_comes_from(small):
    folder, _, result = small
    assert (
        result["environment"]["command"].startswith("python -m bench.embedding --local")
        and not result["settings"]["uniform"]
    )
    assert (folder / "embedding-2xlocal.png").read_bytes().startswith(b"\x89PNG")


def test_merged_bytes():
    assert merged_bytes([10, 20, 30, 40], 256) == 3 / 4 * 100 * 258 * 4


def test_tokens_are_distributed_as_documented():
    tokens = draw_tokens((400, 500), 1000, uniform=False, seed=1)
    assert tokens.dtype == torch.int64 and tokens.shape == (400, 500)
    shares = torch.bincount(tokens.flatten(), minlength=1000).double().sort(descending=True).values / tokens.numel()
    expected = 1.0 / (torch.arange(1, 1001, dtype=torch.float64) + 2.7)
    expected /= expected.sum()
    assert shares[:10].tolist() == pytest.approx(expected[:10].tolist(), rel=0.1)  # thousands of each were drawn


def test_the_same_tokens_are_frequent_on_every_rank():
    drawn = [draw_tokens((400, 500), 1000, uniform=False, seed=seed).flatten() for seed in (1, 2)]
    tops = [set(torch.bincount(tokens).topk(3).indices.tolist()) for tokens in drawn]
    assert tops[0] == tops[1] and tops[0] != {0, 1, 2}


def test_uniform_tokens():
    counts = torch.bincount(draw_tokens((400, 500), 1000, uniform=True, seed=1).flatten(), minlength=1000)
    assert counts.min() > 100 and counts.max() < 300  # 200 expected, 14 is a standard deviation


def test_unknown_systems_are_refused_with_those_that_exist():
    assert "horovod-sparse" in bench("embedding", "--systems", "none,hovorod", expect=2)

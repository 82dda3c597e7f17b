"""Bytes on the wire: interface counters of two hosts and the engine's own counters against the formulas (acceptance
3).
"""

import json
import os
import pathlib
import sys

import pytest

from bench.cluster import Cluster, available

TOLERANCE = 0.03  # negotiation (one small message per cycle) and frame headers on top of the payload

WORKER = pathlib.Path(__file__).parent / "scripts" / "wire_bytes.py"


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    usable, reason = available()
    if not usable and os.environ.get("POSEIDON_REQUIRE_CLUSTER") != "1":
        pytest.skip(reason)
    path = tmp_path_factory.mktemp("wire") / "measured.json"
    with Cluster(hosts=2) as cluster:
        done = cluster.run([sys.executable, str(WORKER), str(path)], timeout=150, env={"OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done
    return json.loads(path.read_text())


@pytest.mark.parametrize("policy", ["bytes", "allreduce", "sfb"])
def test_engine_counters_equal_formulas(measured, policy):
    case = measured[policy]
    assert case["engine"] == pytest.approx(case["formula"], rel=TOLERANCE)


@pytest.mark.parametrize("policy", ["bytes", "allreduce", "sfb"])
def test_interface_counters_equal_formulas(measured, policy):
    case = measured[policy]
    for host_bytes in case["interface"]:
        assert host_bytes == pytest.approx(case["formula"], rel=TOLERANCE)


def test_sfb_sends_less(measured):
    assert measured["bytes"]["formula"] < measured["allreduce"]["formula"] / 2
    assert measured["bytes"]["engine"] < measured["bytes"]["horovod"] / 2

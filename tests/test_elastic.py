"""Workers that are added and removed while training runs, on one host and on two: losses go on as if nothing had
happened.

What happens in the processes that stay is in test_examples.py too, with the example.
"""

import json
import sys
from pathlib import Path

import pytest
from harness.cluster import need
from harness.elastic import launch_elastic, prepare, replay
from harness.launch import environment, horovodrun, launch

from bench.cluster import Cluster, available

SCRIPT = str(Path(__file__).parent / "scripts" / "elastic.py")
SECONDS = 180  # a new worker takes some ten on a busy machine

pytestmark = pytest.mark.timeout(300)


def check(folder, library, steps_and_sizes):
    """Which steps ran on how many ranks, their losses, and that each ring had a plan of its own and began with an
    observed step.
    """
    journal = [json.loads(line) for line in (folder / "journal").read_text().splitlines()]
    assert [(entry["step"], entry["size"]) for entry in journal] == steps_and_sizes
    replay(journal)
    if library != "poseidon_hvd":
        return
    before = {"size": None}
    for entry in journal:
        assert entry["plan_size"] == entry["size"], entry
        assert entry["steps"] == (before["steps"] + 1 if before["size"] == entry["size"] else 1), (before, entry)
        assert entry["factored"] == (4 * (entry["steps"] - 1) if entry["size"] > 1 else 0), entry
        before = entry


def on(size, *steps):
    return [(step, size) for step in steps]


@pytest.mark.parametrize("library", ["poseidon_hvd", "horovod.torch"])
def test_workers_come_and_go(library, tmp_path):
    """One rank, two, three, and two again."""
    changes = [{"step": step, "size": size, "hosts": f"localhost:{size}\n"} for step, size in ((3, 2), (6, 3), (9, 2))]
    options = prepare(tmp_path, "localhost:1\n", library, steps=12, changes=changes)
    launch(
        1,
        [SCRIPT, str(tmp_path)],
        seconds=SECONDS,
        env={"POSEIDON_POLICY": "sfb"},
        options=[*options, "--network-interface", "lo"],
    ).expect_success()
    check(tmp_path, library, [*on(1, 0, 1, 2), *on(2, 3, 4, 5), *on(3, 6, 7, 8), *on(2, 9, 10, 11)])


def test_another_takes_the_place_of_a_dead_one(tmp_path):
    """The others go on without it, and then with the new one."""
    launch_elastic(tmp_path, "poseidon_hvd", limit=SECONDS).expect_success()
    # Step 4 never ended, and step 3 was not committed.
    check(tmp_path, "poseidon_hvd", [*on(2, 0, 1, 2, 3), *on(1, 3, 4, 5), *on(2, 6, 7, 8)])


def test_two_hosts(tmp_path):
    """A worker comes on another host, and goes on alone from what it was given when the first one, rank 0, is lost."""
    need(*available())
    options = prepare(
        tmp_path,
        "host1:1\n",
        "poseidon_hvd",
        steps=9,
        deaths=[{"step": 6, "size": 2, "rank": 0}],
        changes=[{"step": 3, "size": 2, "hosts": "host1:1\nhost0:1\n"}],
    )
    command = [
        horovodrun(),
        "-np",
        "1",
        *options,
        "--network-interfaces",
        "eth0",
        sys.executable,
        SCRIPT,
        str(tmp_path),
    ]
    with Cluster(hosts=2) as cluster:
        done = cluster.exec("host0", command, timeout=SECONDS, env=environment({"POSEIDON_POLICY": "sfb"}))
    assert done.returncode == 0, done.stdout
    check(tmp_path, "poseidon_hvd", [*on(1, 0, 1, 2), *on(2, 3, 4, 5), *on(1, 6, 7, 8)])

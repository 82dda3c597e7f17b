"""The ways to start ranks: horovodrun with hosts on the command line and in a file, horovod.run() from Python, over ssh
to other hosts.

Every rank trains with Horovod's optimizer and with ours, so each way is tried with both.
"""

import json
import os
import re
import shutil
import sys
from pathlib import Path

import pytest
from harness.cluster import need
from harness.launch import LauncherMissing, environment, horovodrun, launch, run
from horovod.torch import mpi_built

from bench.cluster import Cluster, available

SCRIPTS = Path(__file__).parent / "scripts"
# What a shell would change if anybody on the way forgot to quote.
WORDS = ["two words", "$HOME", "it's", '"', "*"]
NOTE = 'a value; with $HOME, "quotes" and an = sign'
GIVEN = {"POSEIDON_POLICY": "sfb", "NOTE_FOR_RANKS": NOTE}
# 3 slots, of which the second name's is on the other "host": (local rank, local size), (cross rank, cross size) of each
# rank.
HOSTS = "localhost:2,127.0.0.1:1"
PLACES = [([0, 2], [0, 2]), ([1, 2], [0, 1]), ([0, 1], [1, 2])]

pytestmark = pytest.mark.timeout(240)


def check(reports, places):
    """All ranks are where they should be, got the environment, and trained to the same parameters, with factors and
    as Horovod does.
    """
    assert [told["rank"] for told in reports] == list(range(len(places)))
    assert [(told["local"], told["cross"]) for told in reports] == places
    for told in reports:
        assert told["size"] == len(places)
        assert told["environment"]["NOTE_FOR_RANKS"] == NOTE and told["environment"]["POSEIDON_POLICY"] == "sfb"
        assert set(told["schemes"].values()) == {"sfb"}, told
        assert told["parameters"] == reports[0]["parameters"]
        assert told["difference"] < 1e-5, told


def told_by(folder, ranks):
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(ranks)]


# ---- On this machine


def test_hosts_on_the_command_line(tmp_path):
    options = ["-H", HOSTS, "--fusion-threshold-mb", "1", "--cycle-time-ms", "2"]
    launch(
        3, [str(SCRIPTS / "launched.py"), str(tmp_path), *WORDS], seconds=120, env=GIVEN, options=options
    ).expect_success()
    reports = told_by(tmp_path, 3)
    check(reports, PLACES)
    for told in reports:
        assert told["words"] == WORDS and told["directory"] == str(Path.cwd())
        assert told["environment"]["HOROVOD_FUSION_THRESHOLD"] == str(1024 * 1024)


def test_hosts_file(tmp_path):
    hosts = tmp_path / "hosts"
    hosts.write_text("localhost slots=2\n127.0.0.1 slots=1\n")
    launch(
        3, [str(SCRIPTS / "launched.py"), str(tmp_path)], seconds=120, env=GIVEN, options=["-hostfile", str(hosts)]
    ).expect_success()
    check(told_by(tmp_path, 3), PLACES)


def test_function_run_from_python():
    """horovod.run(): arguments go to the function, results come back in the order of ranks."""
    launched = run([sys.executable, str(SCRIPTS / "run_function.py")], seconds=120, env=GIVEN).expect_success()
    results = re.search(r"^results (.*)$", launched.output, re.MULTILINE)
    assert results, str(launched)
    check(json.loads(results[1]), [([0, 2], [0, 1]), ([1, 2], [0, 1])])


def test_function_that_fails():
    launched = run([sys.executable, str(SCRIPTS / "run_function.py"), "fail"], seconds=120, env=GIVEN)
    assert not launched.timed_out and not launched.orphans, str(launched)
    assert launched.returncode != 0 and "the function failed" in launched.output and "results [" not in launched.output


def test_mpirun(tmp_path):
    """MPI's own launcher. Horovod then negotiates and reduces by MPI."""
    mpirun = shutil.which("mpirun", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}")
    if mpirun is None or not mpi_built():
        pytest.skip("without MPI in Horovod a process that mpirun starts is a job of its own")
    # Open MPI's words, of versions 4 and 5, for "as root, too" and "on fewer cores, too"; others do not ask.
    env = {
        **GIVEN,
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "OMPI_MCA_rmaps_base_oversubscribe": "1",
        "PRTE_MCA_rmaps_default_mapping_policy": ":OVERSUBSCRIBE",
    }
    command = [mpirun, "-np", "2", sys.executable, str(SCRIPTS / "launched.py"), str(tmp_path), *WORDS]
    run(command, seconds=120, env=env).expect_success()
    reports = told_by(tmp_path, 2)
    check(reports, [([0, 2], [0, 1]), ([1, 2], [0, 1])])
    assert all(told["words"] == WORDS for told in reports)


def test_timeline(tmp_path):
    """Horovod's timeline has our messages, under names that say the scheme and do not grow with the steps."""
    timeline = tmp_path / "timeline.json"
    launch(
        2,
        [str(SCRIPTS / "launched.py"), str(tmp_path)],
        seconds=120,
        env=GIVEN,
        options=["--timeline-filename", str(timeline)],
    ).expect_success()
    check(told_by(tmp_path, 2), [([0, 2], [0, 1]), ([1, 2], [0, 1])])
    events = json.loads(timeline.read_text())
    names = {
        event["args"]["name"] for event in events if event.get("name") == "process_name" and "name" in event["args"]
    }
    ours = {re.sub(r"^poseidon\.0\.", "", name) for name in names if name.startswith("poseidon.")}
    parameters = ["0.weight", "0.bias", "2.weight", "2.bias"]
    # The first step is dense; then a weight takes its bias along.
    assert {name for name in ours if not name.startswith("agree.")} == {
        *(f"allreduce.{name}" for name in parameters),
        "sfb.0.weight",
        "sfb.2.weight",
    }
    assert {"agree.profile", "agree.plan", "agree.hash"} <= ours and not [
        name for name in ours if re.search(r"^agree.*\d", name)
    ]
    assert {f"allreduce.{name}" for name in parameters} <= names  # Horovod's own optimizer, in the same file
    assert min(event["ts"] for event in events if "ts" in event) < 60e6  # microseconds since the start


# ---- On several hosts


@pytest.fixture(scope="module")
def cluster():
    need(*available())
    with Cluster(hosts=2) as made:
        yield made


def on_cluster(cluster, folder, ranks, *options, prefix=()):
    """horovodrun on host0, with no word about ports or keys: those are the business of ssh's own configuration."""
    command = [
        *prefix,
        horovodrun(),
        "-np",
        str(ranks),
        "--disable-cache",
        *options,
        sys.executable,
        str(SCRIPTS / "launched.py"),
        str(folder),
        *WORDS,
    ]
    done = cluster.exec("host0", command, timeout=120, env=environment(GIVEN))
    assert done.returncode == 0, done.stdout
    return told_by(folder, ranks)


TWO_BY_TWO = [([0, 2], [0, 2]), ([1, 2], [0, 2]), ([0, 2], [1, 2]), ([1, 2], [1, 2])]


def test_two_hosts_with_two_ranks_each(cluster, tmp_path):
    reports = on_cluster(cluster, tmp_path, 4, "-H", "host0:2,host1:2", "--network-interfaces", "eth0")
    check(reports, TWO_BY_TWO)
    assert [told["host"] for told in reports] == ["host0", "host0", "host1", "host1"]
    assert all(told["words"] == WORDS and told["directory"] == str(Path.cwd()) for told in reports)


def test_hosts_file_with_another_host_first(cluster, tmp_path):
    hosts = tmp_path / "hosts"
    hosts.write_text("host1 slots=2\nhost0 slots=1\n")
    reports = on_cluster(cluster, tmp_path, 3, "-hostfile", str(hosts), "--network-interfaces", "eth0")
    check(reports, PLACES)
    assert [told["host"] for told in reports] == ["host1", "host1", "host0"]


def test_own_name_that_does_not_resolve(cluster, tmp_path):
    """As in many a container. Only addresses of the chosen interface are used."""
    rename = 'hostname nowhere.invalid && exec "$@"'
    reports = on_cluster(cluster, tmp_path, 2, prefix=["unshare", "--uts", "sh", "-c", rename, "sh"])
    check(reports, [([0, 2], [0, 1]), ([1, 2], [0, 1])])
    assert {told["host"] for told in reports} == {"nowhere.invalid"}


def test_host_that_does_not_exist(cluster):
    """An error that names it, from horovodrun; no rank is started."""
    command = [
        horovodrun(),
        "-np",
        "2",
        "--disable-cache",
        "-H",
        "host0:1,nowhere:1",
        sys.executable,
        "-c",
        "print('started')",
    ]
    done = cluster.exec("host0", command, timeout=60, env=environment())
    assert (
        done.returncode != 0 and "nowhere" in done.stdout and "could not connect to some hosts via ssh" in done.stdout
    ), done.stdout
    assert "<stdout>:started" not in done.stdout


# ---- The harness itself


def test_a_missing_launcher_is_a_failure(monkeypatch, tmp_path):
    """Never a skip: without horovodrun nothing of this folder proves anything."""
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(LauncherMissing, match="multi-process tests need it"):
        horovodrun()
    assert issubclass(LauncherMissing, AssertionError)

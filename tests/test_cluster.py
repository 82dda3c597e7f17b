"""The virtual cluster: two hosts, logins, counters, rates, horovodrun, and nothing left behind.

Makes network namespaces, so it needs root; skipped otherwise, unless POSEIDON_REQUIRE_CLUSTER=1 makes that a failure.
Nothing here asserts a time: how fast this machine is must not decide.
"""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from harness.cluster import need

from bench.cluster import Cluster, ClusterError, RunTimeout, available
from bench.cluster.counters import read_local
from bench.cluster.layout import NETNS_ETC, NETNS_RUN, RUN_ROOT, SSH_PORT, Layout
from bench.cluster.network import leftovers
from bench.cluster.processes import pids_inside
from bench.cluster.shaping import format_rate, parse_rate, token_bucket
from bench.cluster.state import State, load, save

REPOSITORY = Path(__file__).resolve().parents[1]
PAYLOAD_BYTES = 8_000_000
PORT = 5001

RECEIVE = f"""
import socket, sys
with socket.create_server((sys.argv[1], {PORT})) as server:
    print("listening", flush=True)
    connection, _ = server.accept()
    with connection:
        total = 0
        while data := connection.recv(1 << 16):
            total += len(data)
print(total, flush=True)
"""
SEND = f"""
import socket, sys
with socket.create_connection((sys.argv[1], {PORT}), timeout=20) as connection:
    connection.sendall(bytes({PAYLOAD_BYTES}))
"""
CONNECT = f"""
import os, socket, sys
with socket.create_connection((sys.argv[1], {SSH_PORT}), timeout=20) as connection:
    congestion = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).rstrip(bytes(1)).decode()
    print(congestion, sorted(os.sched_getaffinity(0)))
"""
WHO_AM_I = "import socket; name = socket.gethostname(); print(name, socket.gethostbyname(name))"
ALLREDUCE = """
import json, socket, sys
import torch
import horovod.torch as hvd
from bench.cluster.counters import read_local

hvd.init()
before = read_local()
total = hvd.allreduce(torch.arange(100_000, dtype=torch.float32) * (hvd.rank() + 1), op=hvd.Sum)
after = read_local()
report = {
    "host": socket.gethostname(),
    "size": hvd.size(),
    "exact": torch.equal(total, 3 * torch.arange(100_000, dtype=torch.float32)),
    "sent": after[0] - before[0],
}
with open(f"{sys.argv[1]}/{hvd.rank()}.json", "w") as file:
    json.dump(report, file)
"""


@pytest.fixture(scope="module")
def machine() -> None:
    """Fails or skips where no cluster can be made."""
    need(*available())


@pytest.fixture(scope="module")
def cluster(machine: None) -> Iterator[Cluster]:
    with Cluster(hosts=2) as made:
        yield made
    _assert_nothing_left(made.name)


def _assert_nothing_left(name: str) -> None:
    assert name not in leftovers()
    assert not [path for root in (NETNS_RUN, NETNS_ETC) if root.is_dir() for path in root.glob(f"*.{name}.*")]
    assert not (RUN_ROOT / name).exists()
    assert _processes_of(name) == []


def _processes_of(name: str) -> list[int]:
    """Processes whose command line names the cluster's directory: its sshd daemons."""
    marker = f"{RUN_ROOT / name}/".encode()
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if marker in path.read_bytes():
                found.append(int(path.parent.name))
        except OSError:
            continue
    return found


def _transfer(cluster: Cluster) -> dict[str, tuple[int, int]]:
    """Sends PAYLOAD_BYTES from host0 to host1 over TCP and returns what the counters of both grew by."""
    before = cluster.byte_counters()
    python, address = sys.executable, cluster.address("host1")
    with cluster.popen("host1", [python, "-c", RECEIVE, address], stdout=subprocess.PIPE, text=True) as receiver:
        assert receiver.stdout is not None and receiver.stdout.readline() == "listening\n"
        sender = cluster.exec("host0", [python, "-c", SEND, address], timeout=30)
        assert sender.returncode == 0, sender.stdout
        assert receiver.communicate(timeout=30)[0] == f"{PAYLOAD_BYTES}\n"
    after = cluster.byte_counters()
    return {host: (after[host][0] - before[host][0], after[host][1] - before[host][1]) for host in after}


@pytest.mark.parametrize(
    "text, bits", [("200mbit", 200_000_000), ("1.5gbit", 1_500_000_000), ("64kbit", 64_000), ("unshaped", None)]
)
def test_rate_text(text: str, bits: int | None) -> None:
    assert parse_rate(text) == bits
    assert format_rate(bits) == text


@pytest.mark.parametrize("text", ["", "200", "200mb", "-1mbit", "1kbit", "100gbit", "fast"])
def test_bad_rate_lists_good_ones(text: str) -> None:
    with pytest.raises(ClusterError, match="200mbit"):
        parse_rate(text)


@pytest.mark.parametrize("bits", [1_000_000, 200_000_000, 1_000_000_000, 10_000_000_000])
def test_superpackets_fit_the_burst(bits: int) -> None:
    """With every segment's header counted, as tbf does; else the kernel would cut each one up."""
    bucket = token_bucket(bits)
    headers = -(-bucket.superpacket_bytes // 1448) * 66
    assert bucket.superpacket_bytes + headers <= bucket.burst_bytes <= bucket.limit_bytes
    assert bucket.rate_bytes == bits // 8


def test_layout() -> None:
    layout = Layout("a-b", 3)
    assert [layout.address(host) for host in layout.host_names] == ["10.99.0.1", "10.99.0.2", "10.99.0.3"]
    assert Layout.cluster_of(layout.namespace("host2")) == "a-b"
    assert Layout.cluster_of("poseidon-a-b-host2") is None
    for name, hosts in (("A", 1), ("a.b", 1), ("", 1), ("../x", 1), ("a", 0), ("a", 65)):
        with pytest.raises(ClusterError):
            Layout(name, hosts)


def test_hosts_have_equal_shares_of_the_cores() -> None:
    def shares(hosts: int, *cores: int) -> list[tuple[int, ...]]:
        layout = Layout("a", hosts, cores)
        return [layout.cores_of(host) for host in layout.host_names]

    assert shares(4, 0, 1) == [(0,), (1,), (0,), (1,)]
    assert shares(2, 0, 1) == [(0,), (1,)]
    assert shares(2, 0, 1, 4, 5) == [(0, 1), (4, 5)]
    assert shares(2) == [(), ()]
    with pytest.raises(ClusterError, match="2 cores .* among 3 hosts"):
        shares(3, 0, 1)


def test_checkouts_of_other_versions_read_the_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("layout", "state"):
        monkeypatch.setattr(f"bench.cluster.{module}.RUN_ROOT", tmp_path)
    file = tmp_path / "a" / "state.json"
    file.parent.mkdir()
    made = State("a", 2, "unshaped", "token", True, None, None)
    save(made)
    told = json.loads(file.read_text())
    assert "cores" not in told
    file.write_text(json.dumps({**told, "of a later version": 1}))
    assert load("a") == made
    save(replace(made, cores=(0, 1)))
    assert load("a").layout == Layout("a", 2, (0, 1))


def test_read_local_of_a_missing_interface() -> None:
    assert read_local("no-such-interface") is None


def test_login_from_host_to_host(cluster: Cluster) -> None:
    here = cluster.exec("host0", [sys.executable, "-c", WHO_AM_I])
    there = cluster.exec("host0", ["ssh", "host1", f"{sys.executable} -c '{WHO_AM_I}'"])
    assert here.stdout == f"host0 {cluster.address('host0')}\n"
    assert there.stdout == f"host1 {cluster.address('host1')}\n"


def test_hosts_see_only_the_cluster(cluster: Cluster) -> None:
    interfaces = cluster.exec("host0", ["ls", "/sys/class/net"]).stdout.split()
    routes = cluster.exec("host0", ["ip", "-o", "route"]).stdout.splitlines()
    assert [name for name in interfaces if not name.startswith("bonding")] == ["eth0", "lo"]
    assert len(routes) == 1 and routes[0].startswith("10.99.0.0/24")


def test_connections_use_what_linux_uses_by_default(cluster: Cluster, tmp_path: Path) -> None:
    """Whatever this machine does; also what is started through a login."""
    command = _connect_to(cluster.address("host1"), tmp_path)
    everything = sorted(os.sched_getaffinity(0))
    assert cluster.exec("host0", command).stdout == f"cubic {everything}\n"
    assert cluster.exec("host1", ["ssh", "host0", *command]).stdout == f"cubic {everything}\n"


def test_cores_of_their_own(machine: None, tmp_path: Path) -> None:
    everything = sorted(os.sched_getaffinity(0))
    need(len(everything) % 2 == 0, "two hosts cannot share out an odd number of cores")
    with Cluster(hosts=2, own_cores=True) as cluster:
        half = len(everything) // 2
        for host, other, cores in (("host0", "host1", everything[:half]), ("host1", "host0", everything[half:])):
            command = _connect_to(cluster.address(other), tmp_path)
            expected = f"cubic {cores}\n"
            assert Cluster.attach(cluster.name).exec(host, command).stdout == expected
            assert cluster.exec(other, ["ssh", host, *command]).stdout == expected


def _connect_to(address: str, folder: Path) -> list[str]:
    script = folder / "connect.py"
    script.write_text(CONNECT)
    return [sys.executable, str(script), address]


def test_counters_follow_the_payload(cluster: Cluster) -> None:
    """Headers and acknowledgements are the rest: far under 3% with 64 KiB super-packets, each counted with one
    header.
    """
    cluster.set_rate("unshaped")
    grown = _transfer(cluster)
    sent, received = grown["host0"][0], grown["host1"][1]
    assert PAYLOAD_BYTES <= received <= 1.03 * PAYLOAD_BYTES
    assert PAYLOAD_BYTES <= sent <= 1.03 * PAYLOAD_BYTES
    assert max(grown["host0"][1], grown["host1"][0]) <= 0.03 * PAYLOAD_BYTES


def test_rate_changes_while_up(cluster: Cluster) -> None:
    for rate, bits in (("200mbit", 200_000_000), ("1gbit", 1_000_000_000)):
        cluster.set_rate(rate)
        assert cluster.rate == rate
        assert set(cluster.shaped_rates().values()) == {(bits, bits)}
        # Cut into frames of 1500 bytes each carries its own headers: up to 66 on 1448 bytes, 4.6%; some may be sent
        # twice.
        assert PAYLOAD_BYTES <= _transfer(cluster)["host1"][1] <= 1.06 * PAYLOAD_BYTES
    cluster.set_rate("unshaped")
    assert set(cluster.shaped_rates().values()) == {(None, None)}


def test_second_process_uses_the_cluster(cluster: Cluster) -> None:
    assert Cluster.attach(cluster.name).exec("host1", ["hostname"]).stdout == "host1\n"
    with pytest.raises(ClusterError, match="is up"):
        Cluster(hosts=1, name=cluster.name).start()
    assert _cli("exec", "--name", cluster.name, "host1", "--", "sh", "-c", "hostname; exit 7") == (7, "host1\n")


def test_unmodified_horovodrun(cluster: Cluster, tmp_path: Path) -> None:
    need(importlib.util.find_spec("horovod") is not None, "horovod is not installed: tools/build_horovod.py")
    script = tmp_path / "allreduce.py"
    script.write_text(ALLREDUCE)
    done = cluster.run(["python", str(script), str(tmp_path)], timeout=60)
    assert done.returncode == 0, done.stdout
    reports = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    assert [report["host"] for report in reports] == ["host0", "host1"]
    assert all(report["size"] == 2 and report["exact"] for report in reports)
    # A ring of two sends each byte of the tensor once; the rest is negotiation.
    assert all(400_000 <= report["sent"] <= 1.1 * 400_000 for report in reports)


def test_timeout_ends_what_was_started_on_every_host(cluster: Cluster) -> None:
    namespaces = [f"poseidon.{cluster.name}.{host}" for host in cluster.hosts]
    before = sorted(pids_inside(namespaces))
    # Without a terminal, ending the ssh client does not end what it started on host1: the bound must reach it.
    script = "echo started; ssh host1 POSEIDON_CLUSTER_RUN=$POSEIDON_CLUSTER_RUN sleep 300"
    with pytest.raises(RunTimeout, match="started"):
        cluster.exec("host0", ["sh", "-c", script], timeout=1.5)
    left = set(pids_inside(namespaces)) - set(before)
    assert not {pid for pid in left if _command(pid) == "sleep"}


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return ""


def _cli(*arguments: str) -> tuple[int, str]:
    command = [sys.executable, "-m", "bench.cluster", *arguments]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode != 1, done.stderr
    return done.returncode, done.stdout


def _hold(name: str) -> subprocess.Popen[str]:
    """A process of its own that holds a cluster of one host."""
    command = [sys.executable, "-m", "bench.cluster", "up", "--hold", "--hosts", "1", "--name", name]
    holder = subprocess.Popen(
        command,
        cwd=REPOSITORY,
        stdout=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a shell may have started us with it ignored
    )
    assert holder.stdout is not None and holder.stdout.readline().startswith(f"{name}:")
    assert len(leftovers()[name]) == 2 and len(_processes_of(name)) == 1
    return holder


@pytest.mark.parametrize("sig", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_holder_leaves_nothing(machine: None, sig: signal.Signals) -> None:
    name = f"interrupted-{os.getpid()}"
    with _hold(name) as holder:
        holder.send_signal(sig)
        assert holder.wait(timeout=30) == 128 + sig
    _assert_nothing_left(name)


def test_exception_leaves_nothing(machine: None) -> None:
    name = f"failed-{os.getpid()}"
    with pytest.raises(ZeroDivisionError), Cluster(hosts=1, name=name):
        raise ZeroDivisionError
    _assert_nothing_left(name)


@pytest.mark.parametrize("cleaner", [["down"], ["down", "--orphans"]])
def test_cleaned_up_after_a_crash(machine: None, cleaner: list[str]) -> None:
    name = f"crashed-{os.getpid()}"
    with _hold(name) as holder:
        assert _cli("down", "--name", name)[0] == 2  # refused: it is held
        holder.kill()
    assert len(_processes_of(name)) == 1
    assert _cli(*cleaner, "--name", name)[0] == 0
    _assert_nothing_left(name)


def test_up_replaces_what_a_crash_left(machine: None) -> None:
    name = f"stale-{os.getpid()}"
    with _hold(name) as holder:
        holder.kill()
    stale = _processes_of(name)
    assert _cli("up", "--hosts", "1", "--rate", "100mbit", "--name", name)[0] == 0
    assert len(_processes_of(name)) == 1 and _processes_of(name) != stale
    assert "100mbit" in _cli("status")[1]
    assert _cli("down", "--name", name)[0] == 0
    _assert_nothing_left(name)

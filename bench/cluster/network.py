"""Namespaces and links of a cluster: a bridge in a namespace of its own, one veth pair to each host.

Both ends of a link are made inside the namespaces, so the machine's own network never sees an interface, an address or
a route. pyroute2 is imported where it is used: without it the rest of the package still loads.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Iterator
from typing import Any

from bench.cluster import shaping
from bench.cluster.errors import ClusterError
from bench.cluster.layout import BRIDGE, HOST_INTERFACE, NETNS_ETC, NETNS_RUN, PREFIX_LENGTH, Layout

__all__ = ["byte_counters", "create", "leftovers", "remove", "set_link", "set_rate", "shaped_rates"]

# Linux's own default. A machine may have another one, and what a link carries while all cores compute depends on it.
_CONGESTION_CONTROL = "cubic"


def create(layout: Layout) -> None:
    """Makes namespaces, bridge and links, unshaped. On an error what was made stays, for ``remove``."""
    from pyroute2 import netns

    for namespace in (layout.switch_namespace, *map(layout.namespace, layout.host_names)):
        netns.create(namespace)
        _disable_ipv6(namespace)
    with _route(layout.switch_namespace) as switch:
        switch.link("add", ifname=BRIDGE, kind="bridge", br_mcast_snooping=0)
        bridge = _index(switch, BRIDGE)
        switch.link("set", index=bridge, state="up")
        for host in layout.host_names:
            peer = {"ifname": layout.port(host), "net_ns_fd": layout.switch_namespace}
            with _route(layout.namespace(host)) as ip:
                ip.link("add", ifname=HOST_INTERFACE, kind="veth", peer=peer)
                link = _index(ip, HOST_INTERFACE)
                ip.addr("add", index=link, address=layout.address(host), prefixlen=PREFIX_LENGTH)
                ip.link("set", index=link, state="up")
                ip.link("set", index=_index(ip, "lo"), state="up")
            _set_congestion_control(layout, host)
            switch.link("set", index=_index(switch, layout.port(host)), master=bridge, state="up")


def remove(namespace: str) -> None:
    """Removes a namespace, and with it every link that ends there. Absent is fine."""
    from pyroute2 import netns

    with contextlib.suppress(FileNotFoundError):
        netns.remove(namespace)


def leftovers() -> dict[str, set[str]]:
    """Namespaces of every cluster on this machine, found by name: {cluster: namespaces}."""
    found: dict[str, set[str]] = {}
    for root in (NETNS_RUN, NETNS_ETC):
        for namespace in os.listdir(root) if root.is_dir() else ():
            cluster = Layout.cluster_of(namespace)
            if cluster is not None:
                found.setdefault(cluster, set()).add(namespace)
    return found


def set_rate(layout: Layout, bits: int | None) -> None:
    """Shapes both directions of every link: the host's end what it sends, the bridge's end what it receives."""
    with _route(layout.switch_namespace) as switch:
        for host in layout.host_names:
            shaping.apply(switch, _index(switch, layout.port(host)), bits)
            with _route(layout.namespace(host)) as ip:
                shaping.apply(ip, _index(ip, HOST_INTERFACE), bits)


def set_link(layout: Layout, host: str, up: bool) -> None:
    """Pulls a host's cable out of the switch, or puts it back."""
    with _route(layout.switch_namespace) as switch:
        switch.link("set", index=_index(switch, layout.port(host)), state="up" if up else "down")


def shaped_rates(layout: Layout) -> dict[str, tuple[int | None, int | None]]:
    """Bits per second of each host's link as the kernel has them: {host: (sending, receiving)}."""
    rates = {}
    with _route(layout.switch_namespace) as switch:
        for host in layout.host_names:
            with _route(layout.namespace(host)) as ip:
                sending = shaping.read(ip, _index(ip, HOST_INTERFACE))
            rates[host] = sending, shaping.read(switch, _index(switch, layout.port(host)))
    return rates


def byte_counters(layout: Layout) -> dict[str, tuple[int, int]]:
    """{host: (sent, received)} bytes of each host's interface."""
    counters = {}
    for host in layout.host_names:
        with _route(layout.namespace(host)) as ip:
            statistics = ip.get_links(ifname=HOST_INTERFACE)[0].get_attr("IFLA_STATS64")
        counters[host] = statistics["tx_bytes"], statistics["rx_bytes"]
    return counters


@contextlib.contextmanager
def _route(namespace: str) -> Iterator[Any]:
    from pyroute2 import IPRoute

    # To open a socket in another namespace pyroute2 forks, and ends the child by SIGTERM. A Python handler for it that
    # raises would unwind this stack in the child and take our sockets out of the epoll sets that both share: then we
    # wait for ever. With the signal held back the child ends by itself. And an exception raised in one of Python's fork
    # hooks would be lost.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
    try:
        ip = IPRoute(netns=namespace, flags=0)  # flags=0: a missing namespace is an error, not created
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    with ip:
        yield ip


def _index(ip: Any, interface: str) -> int:
    return ip.link_lookup(ifname=interface)[0]


def _set_congestion_control(layout: Layout, host: str) -> None:
    """For every connection between hosts, by the route: a namespace may not choose what the machine does not allow
    all users to choose.
    """
    route = [
        "route",
        "replace",
        layout.subnet,
        "dev",
        HOST_INTERFACE,
        "proto",
        "kernel",
        "scope",
        "link",
        "src",
        layout.address(host),
    ]
    command = ["ip", "-n", layout.namespace(host), *route, "congctl", _CONGESTION_CONTROL]
    done = subprocess.run(command, capture_output=True, text=True, timeout=10)
    if done.returncode != 0:
        raise ClusterError(
            f"no {_CONGESTION_CONTROL} for TCP (kernel module tcp_{_CONGESTION_CONTROL}): {done.stderr.strip()}"
        )


def _disable_ipv6(namespace: str) -> None:
    """Keeps neighbour discovery, which the kernel starts by itself, out of the counters."""
    script = (
        "cd /proc/sys/net/ipv6/conf 2>/dev/null || exit 0; "
        "for scope in all default; do echo 1 > $scope/disable_ipv6; done"
    )
    subprocess.run(["ip", "netns", "exec", namespace, "sh", "-c", script], check=True, timeout=10)

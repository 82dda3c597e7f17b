"""Whether this machine can hold a cluster, and if not, what is missing."""

from __future__ import annotations

import functools
import importlib.util
import os
import shutil
import sys

from bench.cluster import network, shaping, signals, state, teardown
from bench.cluster.errors import ClusterError
from bench.cluster.layout import Layout
from bench.cluster.sshd import find_sshd

__all__ = ["available", "require"]

# Program -> Debian package.
_PROGRAMS = {
    "ip": "iproute2",
    "taskset": "util-linux",
    "unshare": "util-linux",
    "hostname": "hostname",
    "ssh": "openssh-client",
    "ssh-keygen": "openssh-client",
}


def available() -> tuple[bool, str]:
    """Can a cluster be made here?

    Tries it once with one host: in a container root may lack the rights, and a kernel may lack veth, bridge or tbf.

    Returns:
        (True, "") or (False, what is missing and what to do).
    """
    missing = _missing()
    if not missing:
        missing = _probe()
    if not missing:
        return True, ""
    return (
        False,
        f"the virtual cluster needs {'; '.join(missing)}. Without it use --local "
        "(loopback, no shaping, no bandwidth claims)",
    )


def require() -> None:
    """Raises ClusterError with the reason where no cluster can be made."""
    ok, reason = available()
    if not ok:
        raise ClusterError(reason)


def _missing() -> list[str]:
    if not sys.platform.startswith("linux"):
        return ["Linux"]
    missing = []
    if os.geteuid() != 0:
        missing.append("root (network namespaces): run it as root or under sudo")
    packages = {package for program, package in _PROGRAMS.items() if shutil.which(program) is None}
    if find_sshd() is None:
        packages.add("openssh-server")
    if packages:
        missing.append(f"programs of {', '.join(sorted(packages))}: apt-get install {' '.join(sorted(packages))}")
    if importlib.util.find_spec("pyroute2") is None:
        missing.append("pyroute2: pip install pyroute2")
    return missing


@functools.cache
def _probe() -> list[str]:
    layout = Layout(f"probe-{os.getpid()}", 1)
    with signals.deferred(), state.locked():  # a cluster without a state file would look left over
        try:
            network.create(layout)
            network.set_rate(layout, shaping.parse_rate("100mbit"))
            return []
        except Exception as error:  # of netlink, mount or unshare, each with its own type
            return [
                f"the right to make namespaces, and veth, bridge, sch_tbf and tcp_cubic in the kernel: "
                f"a trial failed with {error!r}"
            ]
        finally:
            teardown.remove_cluster(layout.name)

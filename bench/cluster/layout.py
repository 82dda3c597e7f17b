"""Names, addresses and paths of one cluster: a pure function of its name, number of hosts and cores."""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass
from pathlib import Path

from bench.cluster.errors import ClusterError

__all__ = ["BRIDGE", "HOST_INTERFACE", "NETNS_ETC", "NETNS_RUN", "PREFIX_LENGTH", "RUN_ROOT", "SSH_PORT", "Layout"]

RUN_ROOT = Path("/run/poseidon-cluster")
NETNS_RUN = Path("/run/netns")
NETNS_ETC = Path("/etc/netns")
HOST_INTERFACE = "eth0"
BRIDGE = "br0"
SSH_PORT = 2222
PREFIX_LENGTH = 24

_SUBNET = ipaddress.ip_network(f"10.99.0.0/{PREFIX_LENGTH}")
_MAX_HOSTS = 64
# Names hold no dot, so that a namespace "poseidon.NAME.MEMBER" belongs to exactly one cluster.
_NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,31}")
_PREFIX = "poseidon"


@dataclass(frozen=True)
class Layout:
    """Where everything of one cluster lies.

    Every cluster uses the same addresses: no two share a network.

    Args:
        name: lower-case letters, digits and dashes.
        hosts: number of hosts.
        cores: of the machine, to be shared out among the hosts; none: all hosts use all.
    """

    name: str
    hosts: int
    cores: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise ClusterError(
                f"bad cluster name {self.name!r}: up to 32 of a-z, 0-9 and dashes, a letter or digit first"
            )
        if not 1 <= self.hosts <= _MAX_HOSTS:
            raise ClusterError(f"bad number of hosts {self.hosts}: 1 to {_MAX_HOSTS}")
        if self.cores and self.hosts % len(self.cores) != 0 and len(self.cores) % self.hosts != 0:
            raise ClusterError(
                f"{len(self.cores)} cores cannot be shared out evenly among {self.hosts} hosts: "
                "choose another number of hosts"
            )

    @property
    def host_names(self) -> list[str]:
        return [f"host{index}" for index in range(self.hosts)]

    @property
    def switch_namespace(self) -> str:
        """The namespace that holds only the bridge."""
        return f"{_PREFIX}.{self.name}.switch"

    def namespace(self, host: str) -> str:
        return f"{_PREFIX}.{self.name}.host{self.index(host)}"

    def index(self, host: str) -> int:
        try:
            return self.host_names.index(host)
        except ValueError:
            raise ClusterError(f"no host {host!r} in cluster {self.name!r}: {', '.join(self.host_names)}") from None

    def address(self, host: str) -> str:
        return str(_SUBNET[self.index(host) + 1])

    def cores_of(self, host: str) -> tuple[int, ...]:
        """The host's own cores, as many as every other host's; none: it uses those that all use."""
        if not self.cores:
            return ()
        width = max(1, len(self.cores) // self.hosts)
        first = self.index(host) * width % len(self.cores)
        return self.cores[first : first + width]

    @property
    def subnet(self) -> str:
        return str(_SUBNET)

    def port(self, host: str) -> str:
        """The bridge's end of the host's link."""
        return f"port{self.index(host)}"

    @property
    def run_dir(self) -> Path:
        """State file, keys, configuration and logs."""
        return RUN_ROOT / self.name

    def etc_dir(self, host: str) -> Path:
        """What lies here, ``ip netns exec`` binds over /etc for the processes it starts."""
        return NETNS_ETC / self.namespace(host)

    @staticmethod
    def cluster_of(namespace: str) -> str | None:
        """The cluster that a namespace belongs to by its name, None for somebody else's namespace."""
        parts = namespace.split(".")
        return parts[1] if len(parts) == 3 and parts[0] == _PREFIX and _NAME.fullmatch(parts[1]) else None

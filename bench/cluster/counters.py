"""Byte counters, read by a rank about the host it runs on.

A super-packet (GSO) counts one header however many frames it stands for: see docs/cluster.md.
"""

from __future__ import annotations

from pathlib import Path

__all__ = ["read_local"]

_NET = Path("/sys/class/net")


def read_local(interface: str | None = None) -> tuple[int, int] | None:
    """Bytes (sent, received) by this host's network interface since it came up.

    Args:
        interface: its name; by default the only one besides loopback.

    Returns:
        None where there is no such interface, or several to choose from.
    """
    if interface is None:
        try:
            # Every link has an address file; /sys/class/net may also hold control files of drivers.
            names = [path.name for path in _NET.iterdir() if path.name != "lo" and (path / "address").exists()]
        except OSError:
            return None
        if len(names) != 1:
            return None
        interface = names[0]
    statistics = _NET / interface / "statistics"
    try:
        return int((statistics / "tx_bytes").read_text()), int((statistics / "rx_bytes").read_text())
    except OSError:
        return None

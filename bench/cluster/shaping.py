"""Bandwidth of a link: the text of a rate, and a token bucket (tc tbf) that enforces it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from bench.cluster.errors import ClusterError

__all__ = ["UNSHAPED", "TokenBucket", "apply", "format_rate", "parse_rate", "read", "token_bucket"]

UNSHAPED = "unshaped"

_UNITS = {"bit": 1, "kbit": 1_000, "mbit": 1_000_000, "gbit": 1_000_000_000}
_RATE = re.compile(r"(\d+(?:\.\d+)?)(bit|kbit|mbit|gbit)")
_MIN_BITS, _MAX_BITS = 64_000, 34_000_000_000  # tc carries the rate as 32 bits of bytes per second

_FULL_SUPERPACKET_BYTES = 65_536
_SMALL_SUPERPACKET_BYTES = 16_384
_ROOT = 0xFFFFFFFF  # TC_H_ROOT

_QUEUE_SECONDS = 0.05
_MIN_QUEUE_BYTES = 256 * 1024


@dataclass(frozen=True)
class TokenBucket:
    """Parameters of one direction of a link.

    Attributes:
        rate_bytes: bytes per second, Ethernet headers of every frame included.
        burst_bytes: what may leave at once after a pause.
        limit_bytes: length of the queue; beyond it frames are dropped.
        superpacket_bytes: largest segment that TCP may hand to the interface (GSO).
    """

    rate_bytes: int
    burst_bytes: int
    limit_bytes: int
    superpacket_bytes: int


def parse_rate(text: str) -> int | None:
    """Bits per second of a rate such as "200mbit", "1.5gbit"; None for "unshaped"."""
    if text == UNSHAPED:
        return None
    match = _RATE.fullmatch(text.strip().lower())
    bits = round(float(match[1]) * _UNITS[match[2]]) if match else 0
    if not _MIN_BITS <= bits <= _MAX_BITS:
        raise ClusterError(
            f"bad rate {text!r}: a number and one of {', '.join(_UNITS)}, "
            f"from 64kbit to 34gbit (200mbit, 1.5gbit), or {UNSHAPED}"
        )
    return bits


def format_rate(bits: int | None) -> str:
    """The shortest text that ``parse_rate`` reads back as the same rate."""
    if bits is None:
        return UNSHAPED
    unit = max((u for u in _UNITS if bits >= _UNITS[u]), key=_UNITS.__getitem__, default="bit")
    return f"{bits / _UNITS[unit]:.12g}{unit}"


def token_bucket(bits: int) -> TokenBucket:
    """Chooses the bucket of a rate.

    The burst is credit that an idle link hands out for free, so it is kept to one millisecond of the rate; less would
    lose bandwidth whenever the timer comes late. A frame larger than the burst is cut up by the kernel at a cost in CPU
    time that all hosts share, so slow links get smaller super-packets rather than a larger burst.
    """
    rate = bits // 8
    burst = max(rate // 1000, _SMALL_SUPERPACKET_BYTES + 4096)
    superpacket = _FULL_SUPERPACKET_BYTES if burst > _FULL_SUPERPACKET_BYTES + 8192 else _SMALL_SUPERPACKET_BYTES
    limit = burst + max(round(rate * _QUEUE_SECONDS), _MIN_QUEUE_BYTES)
    return TokenBucket(rate, burst, limit, superpacket)


def apply(ip: Any, index: int, bits: int | None) -> None:
    """Shapes what an interface sends, or lifts the shaping; traffic in flight is kept.

    Args:
        ip: ``pyroute2.IPRoute`` of the interface's namespace.
        index: index of the interface.
        bits: bits per second, None for unshaped.
    """
    if bits is None:
        ip.link("set", index=index, gso_max_size=_FULL_SUPERPACKET_BYTES)
        if read(ip, index) is not None:
            ip.tc("del", index=index, parent=_ROOT)
        return
    bucket = token_bucket(bits)
    ip.link("set", index=index, gso_max_size=bucket.superpacket_bytes)
    ip.tc(
        "replace", "tbf", index, handle="1:", rate=bucket.rate_bytes, burst=bucket.burst_bytes, limit=bucket.limit_bytes
    )


def read(ip: Any, index: int) -> int | None:
    """Bits per second that the kernel holds an interface to, None if it does not."""
    for qdisc in ip.get_qdiscs(index=index):
        if qdisc.get_attr("TCA_KIND") == "tbf":
            return qdisc.get_attr("TCA_OPTIONS").get_attr("TCA_TBF_PARMS")["rate"] * 8
    return None

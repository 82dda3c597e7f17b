"""Parsers of settings: ``(source, value)`` -> checked value.

They raise ValueError with a message that begins with the source.
"""

import os
from collections.abc import Mapping, Sequence
from typing import Any, Callable, Optional

from ._native import _C
from ._values import number, one_of, read_json, shown

__all__ = ["choice", "megabytes", "named", "network", "network_variables", "schemes", "schemes_text", "size", "switch"]

Network = tuple[float, float, float, float]

_MOST_PATTERN = 1000  # characters; what fnmatch does with a pattern can take the square of its length


def named(parse: Callable[[str], Any]) -> Callable[[str, Any], str]:
    """Text that the core parses."""
    return lambda source, value: one_of(parse, source, value)


def choice(*values: str) -> Callable[[str, Any], str]:
    """One of these texts."""

    def parse(source: str, value: Any) -> str:
        try:
            known = value in values
        except Exception:  # of a foreign type's own choice
            known = False
        if not known:
            raise ValueError(f"{source}: {shown(value)} is none of {', '.join(values)}.")
        return str(value)

    return parse


def switch(source: str, value: Any) -> bool:
    try:
        known = value in (False, True)
    except Exception:  # an array, say
        known = False
    if not known:
        raise ValueError(f"{source}: {shown(value)} is none of False, True.")
    return bool(value)


def size(source: str, value: Any) -> float:
    return number(source, value, "a size in bytes", _C.most_bytes)


def megabytes(source: str, text: str) -> float:
    """In bytes."""
    return number(source, text, "a size in 10^6 bytes", _C.most_bytes / 1e6) * 1e6


def schemes_text(source: str, text: str) -> dict[str, str]:
    """``"fc*.weight=sfb,head.weight=allreduce"``."""
    found = {}
    for item in filter(None, (part.strip() for part in text.split(","))):
        pattern, separator, scheme = item.rpartition("=")
        if not separator or not pattern:
            raise ValueError(f"{source}: {shown(item)} is not of the form PATTERN=SCHEME.")
        found[pattern.strip()] = scheme.strip()
    return schemes(source, found)


def schemes(source: str, value: Any) -> dict[str, str]:
    if not isinstance(value, Mapping):
        raise ValueError(f"{source}: {shown(value)} is not a mapping of patterns to schemes.")
    for pattern, scheme in value.items():
        if not isinstance(pattern, str) or len(pattern) > _MOST_PATTERN:
            raise ValueError(f"{source}: {shown(pattern)} is not a pattern of at most {_MOST_PATTERN} characters.")
        one_of(_C.parse_scheme_override, f"{source}, {pattern!r}", scheme)
    return dict(value)


_KINDS = ("allreduce", "allgather")
_KEYS = (
    ("alpha_seconds", "a number of seconds", _C.most_alpha),
    ("beta_seconds_per_byte", "a number of seconds per byte", _C.most_beta),
)
_NETWORK_VARIABLES = (
    "POSEIDON_ALPHA_ALLREDUCE",
    "POSEIDON_BETA_ALLREDUCE",
    "POSEIDON_ALPHA_ALLGATHER",
    "POSEIDON_BETA_ALLGATHER",
)


def network_variables() -> Optional[tuple[str, Network]]:
    """From the four variables, else from the file that POSEIDON_PROFILE names."""
    if any(name in os.environ for name in _NETWORK_VARIABLES):
        missing = [name for name in _NETWORK_VARIABLES if name not in os.environ]
        if missing:
            raise ValueError(
                f"{', '.join(missing)}: not set, though others of {', '.join(_NETWORK_VARIABLES)} are. "
                "Set all four or none."
            )
        return _NETWORK_VARIABLES[0], _checked(_NETWORK_VARIABLES, [os.environ[name] for name in _NETWORK_VARIABLES])
    path = os.environ.get("POSEIDON_PROFILE")
    return ("POSEIDON_PROFILE", network("POSEIDON_PROFILE", path)) if path else None


def network(source: str, value: Any) -> Network:
    """``plan()["network"]``, a whole ``plan()``, or the name of a JSON file with one of them."""
    try:
        if isinstance(value, (str, os.PathLike)):
            value = read_json(value)
        value = value.get("network", value)
        values = [value[kind][key] for kind in _KINDS for key, _, _ in _KEYS]
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(
            f"{source}: cannot read a network from it ({type(error).__name__}: {error}). Give what "
            'optimizer.plan()["network"] returned, or the name of a JSON file with it.'
        ) from None
    return _checked([f"{source}: {kind}, {key}" for kind in _KINDS for key, _, _ in _KEYS], values)


def _checked(sources: Sequence[str], values: Sequence[Any]) -> Network:
    """alpha and beta of allreduce, then of allgather."""
    ranges = _KEYS * len(_KINDS)
    checked = [number(source, value, what, most) for source, value, (_, what, most) in zip(sources, values, ranges)]
    for kind, at in zip(_KINDS, (0, 2)):
        if checked[at] == checked[at + 1] == 0:
            raise ValueError(
                f"{sources[at]} and {sources[at + 1]} are both 0, as if an {kind} took no time. Give one of them, or "
                "no network at all: then it is measured."
            )
    return checked[0], checked[1], checked[2], checked[3]

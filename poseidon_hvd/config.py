"""Settings: from arguments, then ``POSEIDON_*`` variables, then defaults. Read once per optimizer and validated."""

import dataclasses
import fnmatch
import math
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any, Optional, Union

from ._native import _C
from ._values import from_environment, number, one_of, read_json, shown

_MOST_PATTERN = 1000  # characters; what fnmatch does with a pattern can take the square of its length


@dataclasses.dataclass(frozen=True)
class Config:
    """What decides how gradients travel.

    Attributes:
        policy: ``"time"`` (what makes the predicted step shortest), ``"bytes"`` (the scheme that sends fewer bytes,
            Poseidon's rule restated for ring-allreduce), ``"allreduce"`` or ``"sfb"`` (wherever it is possible, and
            row-sparse for embeddings).
        schemes: parameter-name pattern (``fnmatch``) -> ``"auto"``, ``"allreduce"``, ``"sfb"`` or ``"row-sparse"``; the
            last match wins.
        network: for policy ``"time"``: alpha (s) and beta (s/byte) of allreduce, then of allgather; None: measured at
            the first step.
        memory_limit: bytes that the gathered rows of all factored tensors may take on each rank, for policy ``"time"``.
        log_plans: print a new plan on rank 0.
        dense: how allreduced gradients are put together: ``"auto"``, ``"lazy"``, ``"lazy:BYTES"``, ``"merged"``,
            ``"wfbp"``, ``"bsp"``, ``"priority"``, ``"priority:BYTES"`` or ``"horovod"``. ``"auto"`` goes by
            measurements, which policies ``"bytes"`` and ``"sfb"`` do without: there it becomes ``"lazy"``.
        uneven_steps: ranks may be in ``hvd.join()`` while others still train, also while layers are factored.
        reduce_in: ``"backward"``: gradients are reduced when backward() returns; ``"step"``: when synchronize() or
            step() does, as in Horovod, so that work between backward() and step() overlaps with communication.
        schemes_source: where ``schemes`` came from, for messages.
    """

    policy: str = "time"
    schemes: Mapping[str, str] = dataclasses.field(default_factory=dict)
    network: Optional[tuple[float, float, float, float]] = None
    memory_limit: float = 2e9
    log_plans: bool = False
    uneven_steps: bool = False
    dense: str = "auto"
    reduce_in: str = "backward"
    schemes_source: str = dataclasses.field(default="schemes", compare=False)

    @classmethod
    def resolve(
        cls,
        policy: Optional[str],
        schemes: Optional[Mapping[str, str]],
        network: Union[None, str, Mapping[str, Any]] = None,
        memory_limit: Optional[float] = None,
        uneven_steps: Optional[bool] = None,
        dense: Optional[str] = None,
        reduce_in: Optional[str] = None,
    ) -> "Config":
        """Arguments override the environment, option by option.

        Raises:
            ValueError: a value that does not exist, or out of its range; the message names the argument or variable,
                and what may be.
        """
        source = "policy"
        if policy is None:
            policy, source = from_environment("POSEIDON_POLICY"), "POSEIDON_POLICY"
        policy = cls.policy if policy is None else one_of(_C.parse_policy, source, policy)
        source = "schemes"
        if schemes is None:
            schemes, source = _parse_schemes(from_environment("POSEIDON_SCHEMES") or ""), "POSEIDON_SCHEMES"
        return cls(
            policy=policy,
            schemes=_checked_schemes(schemes, source),
            network=_network(network),
            memory_limit=_memory_limit(memory_limit),
            log_plans=_log_plans(),
            uneven_steps=_uneven_steps(uneven_steps),
            dense=_dense(dense, policy),
            reduce_in=_reduce_in(reduce_in),
            schemes_source=source,
        )

    def overrides(self, names: Sequence[str]) -> list[str]:
        """The scheme asked for each parameter.

        Raises:
            ValueError: a pattern matches no parameter, most likely a misspelt name.
        """
        wanted: dict[str, str] = dict.fromkeys(names, "auto")
        for pattern, scheme in self.schemes.items():
            try:
                matched = fnmatch.filter(names, pattern)
            except re.error as error:  # a range that runs backwards, in older versions of Python
                raise ValueError(f"{self.schemes_source}: {pattern!r} is not a pattern of fnmatch: {error}.") from None
            if not matched:
                some = ", ".join(list(names)[:8]) + (", ..." if len(names) > 8 else "")
                raise ValueError(
                    f"{self.schemes_source}: {pattern!r} matches no parameter of this optimizer. Its parameters are {some}."
                )
            wanted.update((name, scheme) for name in matched)
        return [wanted[name] for name in names]


def _parse_schemes(text: str) -> dict[str, str]:
    """``"fc*.weight=sfb,head.weight=allreduce"``."""
    schemes = {}
    for item in filter(None, (part.strip() for part in text.split(","))):
        pattern, separator, scheme = item.rpartition("=")
        if not separator or not pattern:
            raise ValueError(f"POSEIDON_SCHEMES: {shown(item)} is not of the form PATTERN=SCHEME.")
        schemes[pattern.strip()] = scheme.strip()
    return schemes


def _checked_schemes(schemes: Mapping[str, str], source: str) -> dict[str, str]:
    if not isinstance(schemes, Mapping):
        raise ValueError(f"{source}: {shown(schemes)} is not a mapping of patterns to schemes.")
    for pattern, scheme in schemes.items():
        if not isinstance(pattern, str) or len(pattern) > _MOST_PATTERN:
            raise ValueError(f"{source}: {shown(pattern)} is not a pattern of at most {_MOST_PATTERN} characters.")
        one_of(_C.parse_scheme_override, f"{source}, {pattern!r}", scheme)
    return dict(schemes)


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


def _network(network: Union[None, str, Mapping[str, Any]]) -> Optional[tuple[float, float, float, float]]:
    """From the argument, else from the four variables, else from the file that POSEIDON_PROFILE names."""
    source = "network"
    if network is None and any(name in os.environ for name in _NETWORK_VARIABLES):
        missing = [name for name in _NETWORK_VARIABLES if name not in os.environ]
        if missing:
            raise ValueError(
                f"{', '.join(missing)}: not set, though others of {', '.join(_NETWORK_VARIABLES)} are. Set all four or none."
            )
        return _checked_network(_NETWORK_VARIABLES, [os.environ[name] for name in _NETWORK_VARIABLES])
    if network is None and os.environ.get("POSEIDON_PROFILE"):
        network, source = os.environ["POSEIDON_PROFILE"], "POSEIDON_PROFILE"
    if network is None:
        return None
    try:
        if isinstance(network, (str, os.PathLike)):
            network = read_json(network)
        network = network.get("network", network)  # a whole plan() will do
        values = [network[kind][key] for kind in _KINDS for key, _, _ in _KEYS]
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(
            f"{source}: cannot read a network from it ({type(error).__name__}: {error}). Give what "
            'optimizer.plan()["network"] returned, or the name of a JSON file with it.'
        ) from None
    return _checked_network([f"{source}: {kind}, {key}" for kind in _KINDS for key, _, _ in _KEYS], values)


def _checked_network(sources: Sequence[str], values: Sequence[Any]) -> tuple[float, float, float, float]:
    """alpha and beta of allreduce, then of allgather."""
    ranges = _KEYS * len(_KINDS)
    checked = tuple(
        number(source, value, what, most) for source, value, (_, what, most) in zip(sources, values, ranges)
    )
    for kind, at in zip(_KINDS, (0, 2)):
        if checked[at] == checked[at + 1] == 0:
            raise ValueError(
                f"{sources[at]} and {sources[at + 1]} are both 0, as if an {kind} took no time. Give one of them, or no "
                "network at all: then it is measured."
            )
    return checked


def _memory_limit(memory_limit: Optional[float]) -> float:
    if memory_limit is not None:
        return number("memory_limit", memory_limit, "a size in bytes", _C.most_bytes)
    megabytes = from_environment("POSEIDON_MEMORY_LIMIT_MB")
    if megabytes is None:
        return Config.memory_limit
    return number("POSEIDON_MEMORY_LIMIT_MB", megabytes, "a size in 10^6 bytes", _C.most_bytes / 1e6) * 1e6


def _log_plans() -> bool:
    level = os.environ.get("POSEIDON_LOG_LEVEL", "warning")
    if level not in ("info", "warning"):
        raise ValueError(f"POSEIDON_LOG_LEVEL: {shown(level)} is none of info, warning.")
    return level == "info"


def _dense(dense: Optional[str], policy: str) -> str:
    source = "dense"
    if dense is None:
        dense, source = from_environment("POSEIDON_DENSE"), "POSEIDON_DENSE"
    dense = Config.dense if dense is None else one_of(_C.parse_dense, source, dense)
    return "lazy" if dense == "auto" and policy in ("bytes", "sfb") else dense


def _uneven_steps(uneven_steps: Optional[bool]) -> bool:
    if uneven_steps is not None:
        try:
            known = uneven_steps in (False, True)
        except Exception:  # an array, say
            known = False
        if not known:
            raise ValueError(f"uneven_steps: {shown(uneven_steps)} is none of False, True.")
        return bool(uneven_steps)
    text = os.environ.get("POSEIDON_UNEVEN_STEPS", "0")
    if text not in ("0", "1"):
        raise ValueError(f"POSEIDON_UNEVEN_STEPS: {shown(text)} is none of 0, 1.")
    return text == "1"


def _reduce_in(reduce_in: Optional[str]) -> str:
    source = "reduce_in"
    if reduce_in is None:
        reduce_in, source = from_environment("POSEIDON_REDUCE_IN"), "POSEIDON_REDUCE_IN"
    reduce_in = Config.reduce_in if reduce_in is None else reduce_in
    if reduce_in not in ("backward", "step"):
        raise ValueError(f"{source}: {shown(reduce_in)} is none of backward, step.")
    return reduce_in


def stall_warning_seconds() -> float:
    """Seconds of silence before a wait warns, 0 for never: Horovod's own setting, so that both speak at the same time.

    Raises:
        ValueError: it is not a number, or less than 0. Horovod takes any size, and so does this.
    """
    if os.environ.get("HOROVOD_STALL_CHECK_DISABLE") == "1":
        return 0.0
    text = os.environ.get("HOROVOD_STALL_CHECK_TIME_SECONDS", "60")
    return min(number("HOROVOD_STALL_CHECK_TIME_SECONDS", text, "a number of seconds", math.inf), _C.most_seconds)

"""Settings: from arguments, then ``POSEIDON_*`` variables, then defaults. Read once per optimizer and validated."""

import dataclasses
import fnmatch
import json
import math
import os
from typing import Any, Dict, List, Mapping, Optional, Sequence, Tuple, Union

from ._native import _C


@dataclasses.dataclass(frozen=True)
class Config:
    """What decides how gradients travel.

    Attributes:
        policy: ``"time"`` (what makes the predicted step shortest), ``"bytes"`` (the scheme that sends fewer bytes, Poseidon's rule
            restated for ring-allreduce), ``"allreduce"`` or ``"sfb"`` (wherever it is possible, and row-sparse for embeddings).
        schemes: parameter-name pattern (``fnmatch``) -> ``"auto"``, ``"allreduce"``, ``"sfb"`` or ``"row-sparse"``; the last match wins.
        network: for policy ``"time"``: alpha (s) and beta (s/byte) of allreduce, then of allgather; None: measured at the first step.
        memory_limit: bytes that the gathered rows of all factored tensors may take on each rank, for policy ``"time"``.
        log_plans: print a new plan on rank 0.
        dense: how allreduced gradients are put together: ``"auto"``, ``"lazy"``, ``"lazy:BYTES"``, ``"merged"``, ``"wfbp"``, ``"bsp"``,
            ``"priority"``, ``"priority:BYTES"`` or ``"horovod"``. ``"auto"`` goes by measurements, which policies ``"bytes"`` and ``"sfb"``
            do without: there it becomes ``"lazy"``.
        uneven_steps: ranks may be in ``hvd.join()`` while others still train, also while layers are factored.
        reduce_in: ``"backward"``: gradients are reduced when backward() returns; ``"step"``: when synchronize() or step() does, as in
            Horovod, so that work between backward() and step() overlaps with communication.
    """

    policy: str = "time"
    schemes: Mapping[str, str] = dataclasses.field(default_factory=dict)
    network: Optional[Tuple[float, float, float, float]] = None
    memory_limit: float = 2e9
    log_plans: bool = False
    uneven_steps: bool = False
    dense: str = "auto"
    reduce_in: str = "backward"

    @classmethod
    def resolve(cls, policy: Optional[str], schemes: Optional[Mapping[str, str]], network: Union[None, str, Mapping[str, Any]] = None,
                memory_limit: Optional[float] = None, uneven_steps: Optional[bool] = None, dense: Optional[str] = None,
                reduce_in: Optional[str] = None) -> "Config":
        """Arguments override the environment, option by option.

        Raises:
            ValueError: a value that does not exist; the message lists those that do.
        """
        source = "policy"
        if policy is None and "POSEIDON_POLICY" in os.environ:
            policy, source = os.environ["POSEIDON_POLICY"], "POSEIDON_POLICY"
        if policy is None:
            policy = cls.policy
        _validate(_C.parse_policy, policy, source)
        source = "schemes"
        if schemes is None:
            schemes, source = _parse_schemes(os.environ.get("POSEIDON_SCHEMES", "")), "POSEIDON_SCHEMES"
        for pattern, scheme in schemes.items():
            _validate(_C.parse_scheme_override, scheme, f"{source}, {pattern!r}")
        return cls(policy, dict(schemes), _network(network), _memory_limit(memory_limit), _log_plans(), _uneven_steps(uneven_steps),
                   _dense(dense, policy), _reduce_in(reduce_in))

    def overrides(self, names: Sequence[str]) -> List[str]:
        """The scheme asked for each parameter.

        Raises:
            ValueError: a pattern matches no parameter, most likely a misspelt name.
        """
        wanted: Dict[str, str] = {name: "auto" for name in names}
        for pattern, scheme in self.schemes.items():
            matched = fnmatch.filter(names, pattern)
            if not matched:
                shown = ", ".join(list(names)[:8]) + (", ..." if len(names) > 8 else "")
                raise ValueError(f"schemes: {pattern!r} matches no parameter of this optimizer. Its parameters are {shown}.")
            wanted.update((name, scheme) for name in matched)
        return [wanted[name] for name in names]


def _validate(parse, text, source) -> None:
    """The core knows the values; here is known where a bad one came from."""
    try:
        parse(str(text))
    except ValueError as error:
        raise ValueError(f"{source}: {error}") from None


def _parse_schemes(text: str) -> Dict[str, str]:
    """``"fc*.weight=sfb,head.weight=allreduce"``."""
    schemes = {}
    for item in filter(None, (part.strip() for part in text.split(","))):
        pattern, separator, scheme = item.rpartition("=")
        if not separator or not pattern:
            raise ValueError(f"POSEIDON_SCHEMES: {item!r} is not of the form PATTERN=SCHEME.")
        schemes[pattern.strip()] = scheme.strip()
    return schemes


_NETWORK_VARIABLES = ("POSEIDON_ALPHA_ALLREDUCE", "POSEIDON_BETA_ALLREDUCE", "POSEIDON_ALPHA_ALLGATHER", "POSEIDON_BETA_ALLGATHER")


def _network(network: Union[None, str, Mapping[str, Any]]) -> Optional[Tuple[float, float, float, float]]:
    """From the argument, else from the four variables, else from the file that POSEIDON_PROFILE names."""
    source = "network"
    if network is None and any(name in os.environ for name in _NETWORK_VARIABLES):
        missing = [name for name in _NETWORK_VARIABLES if name not in os.environ]
        if missing:
            raise ValueError(f"{', '.join(missing)}: not set, though others of {', '.join(_NETWORK_VARIABLES)} are. Set all four or none.")
        return tuple(_number(name, os.environ[name]) for name in _NETWORK_VARIABLES)
    if network is None and os.environ.get("POSEIDON_PROFILE"):
        network, source = os.environ["POSEIDON_PROFILE"], "POSEIDON_PROFILE"
    if network is None:
        return None
    try:
        if isinstance(network, (str, os.PathLike)):
            with open(network, encoding="utf-8") as file:
                network = json.load(file)
        network = network.get("network", network)  # a whole plan() will do
        values = [network[kind][key] for kind in ("allreduce", "allgather") for key in ("alpha_seconds", "beta_seconds_per_byte")]
    except (OSError, json.JSONDecodeError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{source}: cannot read a network from it ({type(error).__name__}: {error}). Give what optimizer.plan()[\"network\"] "
            "returned, or the name of a JSON file with it."
        ) from None
    return tuple(_number(source, value) for value in values)


def _number(source: str, value: Any) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not (math.isfinite(number) and number >= 0):
        raise ValueError(f"{source}: {value!r} is not a number of seconds (alpha) or seconds per byte (beta), 0 or more.")
    return number


def _memory_limit(memory_limit: Optional[float]) -> float:
    source, scale = "memory_limit", 1.0
    if memory_limit is None:
        text = os.environ.get("POSEIDON_MEMORY_LIMIT_MB")
        if text is None:
            return Config.memory_limit
        memory_limit, source, scale = text, "POSEIDON_MEMORY_LIMIT_MB", 1e6
    try:
        value = float(memory_limit) * scale
    except (TypeError, ValueError):
        value = math.nan
    if not value >= 0:
        raise ValueError(f"{source}: {memory_limit!r} is not a size of 0 or more.")
    return value


def _log_plans() -> bool:
    level = os.environ.get("POSEIDON_LOG_LEVEL", "warning")
    if level not in ("info", "warning"):
        raise ValueError(f"POSEIDON_LOG_LEVEL: {level!r} is none of info, warning.")
    return level == "info"


def _dense(dense: Optional[str], policy: str) -> str:
    source = "dense"
    if dense is None:
        dense, source = os.environ.get("POSEIDON_DENSE", Config.dense), "POSEIDON_DENSE"
    _validate(_C.parse_dense, dense, source)
    return "lazy" if dense == "auto" and policy in ("bytes", "sfb") else dense


def _uneven_steps(uneven_steps: Optional[bool]) -> bool:
    if uneven_steps is not None:
        return bool(uneven_steps)
    text = os.environ.get("POSEIDON_UNEVEN_STEPS", "0")
    if text not in ("0", "1"):
        raise ValueError(f"POSEIDON_UNEVEN_STEPS: {text!r} is none of 0, 1.")
    return text == "1"


def _reduce_in(reduce_in: Optional[str]) -> str:
    source = "reduce_in"
    if reduce_in is None:
        reduce_in, source = os.environ.get("POSEIDON_REDUCE_IN", Config.reduce_in), "POSEIDON_REDUCE_IN"
    if reduce_in not in ("backward", "step"):
        raise ValueError(f"{source}: {reduce_in!r} is none of backward, step.")
    return reduce_in


def stall_warning_seconds() -> float:
    """Seconds of silence before a wait warns: Horovod's own setting, so that both speak at the same time."""
    if os.environ.get("HOROVOD_STALL_CHECK_DISABLE") == "1":
        return 0.0
    text = os.environ.get("HOROVOD_STALL_CHECK_TIME_SECONDS", "60")
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"HOROVOD_STALL_CHECK_TIME_SECONDS={text!r} is not a number of seconds.") from None

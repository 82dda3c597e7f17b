"""Settings: from arguments, then ``POSEIDON_*`` variables, then defaults. Read once per optimizer and validated."""

import dataclasses
import fnmatch
import os
from typing import Dict, List, Mapping, Optional, Sequence

from ._native import _C


@dataclasses.dataclass(frozen=True)
class Config:
    """What decides how gradients travel.

    Attributes:
        policy: ``"bytes"`` (the scheme that sends fewer bytes, Poseidon's rule restated for ring-allreduce), ``"allreduce"`` or
            ``"sfb"`` (wherever it is possible, and row-sparse for embeddings).
        schemes: parameter-name pattern (``fnmatch``) -> ``"auto"``, ``"allreduce"``, ``"sfb"`` or ``"row-sparse"``; the last match wins.
    """

    policy: str = "bytes"
    schemes: Mapping[str, str] = dataclasses.field(default_factory=dict)

    @classmethod
    def resolve(cls, policy: Optional[str], schemes: Optional[Mapping[str, str]]) -> "Config":
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
        return cls(policy, dict(schemes))

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


def stall_warning_seconds() -> float:
    """Seconds of silence before a wait warns: Horovod's own setting, so that both speak at the same time."""
    if os.environ.get("HOROVOD_STALL_CHECK_DISABLE") == "1":
        return 0.0
    text = os.environ.get("HOROVOD_STALL_CHECK_TIME_SECONDS", "60")
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"HOROVOD_STALL_CHECK_TIME_SECONDS={text!r} is not a number of seconds.") from None

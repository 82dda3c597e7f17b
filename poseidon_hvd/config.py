"""Settings: from arguments, then ``POSEIDON_*`` variables, then defaults. Read once per optimizer and validated.

Each knob is one field of ``Config``. The rest follows from it: its variable and checks, what ranks compare, the option
of the C++ session, and the row of docs/configuration.md (tools/configuration.py writes it).
"""

import dataclasses
import fnmatch
import math
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any, Optional

from . import _parsers as parsers
from ._knobs import Knobs, Scope, knob
from ._native import _C
from ._values import number

__all__ = ["Config", "stall_warning_seconds"]


def _overrides(config: Any, name: str, scope: Scope) -> list[str]:
    found: list[str] = config.overrides(scope.names)
    return found


def _without_auto(overrides: Sequence[str], scope: Scope) -> str:
    return ",".join(f"{name}:{scheme}" for name, scheme in zip(scope.names, overrides) if scheme != "auto")


def _global_only(config: Any, name: str, scope: Scope) -> bool:
    return bool(getattr(config, name)) and scope.process_set == 0


def _measured_or_lazy(dense: str, before: Mapping[str, Any]) -> str:
    # "auto" goes by measurements. These policies make none.
    return "lazy" if dense == "auto" and before["policy"] in ("bytes", "sfb") else dense


@dataclasses.dataclass(frozen=True)
class Config(Knobs):
    """What decides how gradients travel."""

    policy: str = knob(
        "time",
        parse=parsers.named(_C.parse_policy),
        variable="POSEIDON_POLICY",
        shown_default="`time`",
        values="`time`: what makes the predicted step shortest ([selector.md](selector.md)). "
        "`bytes`: SFB, or row-sparse for an embedding table, where it sends no more bytes than allreduce. "
        "`sfb`: wherever it is possible. `allreduce`: nowhere",
    )
    # Pattern of names (fnmatch) -> scheme; the last match wins.
    schemes: Mapping[str, str] = knob(
        default_factory=dict,
        parse=parsers.schemes,
        variable="POSEIDON_SCHEMES",
        parse_text=parsers.schemes_text,
        in_session=_overrides,
        agreed_text=_without_auto,
        shown_default="none",
        values="pattern of parameter names -> `auto`, `allreduce`, `sfb` or, for embedding tables, `row-sparse`; "
        "goes before the policy",
    )
    # alpha (s) and beta (s/byte) of allreduce, then of allgather.
    network: Optional[parsers.Network] = knob(
        None,
        parse=parsers.network,
        variable="POSEIDON_PROFILE",
        environment=parsers.network_variables,
        shown_default="measured",
        values='for policy `time`: `plan()["network"]` of an earlier run, or a JSON file with it. Goes after the four '
        "variables `POSEIDON_ALPHA_ALLREDUCE`, `POSEIDON_BETA_ALLREDUCE`, `POSEIDON_ALPHA_ALLGATHER`, "
        "`POSEIDON_BETA_ALLGATHER`",
    )
    memory_limit: float = knob(
        2e9,
        parse=parsers.size,
        variable="POSEIDON_MEMORY_LIMIT_MB",
        parse_text=parsers.megabytes,
        shown_default="2 GB",
        values="for policy `time`: what the gathered rows of all factored layers may take on each rank (the argument "
        "in bytes, the variable in 10^6 bytes)",
    )
    uneven_steps: bool = knob(
        False,
        parse=parsers.switch,
        variable="POSEIDON_UNEVEN_STEPS",
        parse_text=lambda source, text: parsers.choice("0", "1")(source, text) == "1",
        in_session=_global_only,  # hvd.join() knows no other process set
        shown_default="False",
        values="ranks may call `hvd.join()` while others still train (`0` or `1`); see below",
    )
    dense: str = knob(
        "auto",
        parse=parsers.named(_C.parse_dense),
        variable="POSEIDON_DENSE",
        settle=_measured_or_lazy,
        shown_default="`auto`",
        values="how allreduced gradients are put together: `auto`, `lazy`, `lazy:BYTES`, `merged`, `wfbp`, `bsp`, "
        "`priority`, `priority:BYTES`, `horovod` ([dense.md](dense.md))",
    )
    reduce_in: str = knob(
        "backward",
        parse=parsers.choice("backward", "step"),
        variable="POSEIDON_REDUCE_IN",
        shown_default="`backward`",
        values="when gradients are reduced. `backward`: when `backward()` returns, in place and visible. `step`: in "
        "`synchronize()` or `step()`, as in Horovod, so that work between `backward()` and `step()` overlaps with "
        "communication ([reduction.md](reduction.md))",
    )
    log_plans: bool = knob(
        False,
        parse=parsers.switch,
        variable="POSEIDON_LOG_LEVEL",
        parse_text=lambda source, text: parsers.choice("info", "warning")(source, text) == "info",
        argument=False,
        agreed=False,
        option=False,
        shown_default="`warning`",
        values="`info`: rank 0 prints the plan whenever it changes. `warning`: it does not",
    )

    def overrides(self, names: Sequence[str]) -> list[str]:
        """The scheme asked for each parameter.

        Raises:
            ValueError: a pattern matches no parameter, most likely a misspelt name.
        """
        source = self.sources.get("schemes", "schemes")
        wanted: dict[str, str] = dict.fromkeys(names, "auto")
        for pattern, scheme in self.schemes.items():
            try:
                matched = fnmatch.filter(names, pattern)
            except re.error as error:  # a range that runs backwards, in older versions of Python
                raise ValueError(f"{source}: {pattern!r} is not a pattern of fnmatch: {error}.") from None
            if not matched:
                some = ", ".join(list(names)[:8]) + (", ..." if len(names) > 8 else "")
                raise ValueError(
                    f"{source}: {pattern!r} matches no parameter of this optimizer. Its parameters are {some}."
                )
            wanted.update((name, scheme) for name in matched)
        return [wanted[name] for name in names]


def stall_warning_seconds() -> float:
    """Seconds of silence before a wait warns, 0 for never. Horovod's own setting, so that both speak at the same time.

    Raises:
        ValueError: it is not a number, or less than 0. Horovod takes any size, and so does this.
    """
    if os.environ.get("HOROVOD_STALL_CHECK_DISABLE") == "1":
        return 0.0
    text = os.environ.get("HOROVOD_STALL_CHECK_TIME_SECONDS", "60")
    return min(number("HOROVOD_STALL_CHECK_TIME_SECONDS", text, "a number of seconds", math.inf), _C.most_seconds)

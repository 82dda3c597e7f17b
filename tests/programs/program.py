"""A training program as plain data: ranks, model, settings, and what is done in which order."""

import dataclasses
from typing import Optional

from .models import Spec
from .text import Short

POLICIES = ("sfb", "bytes", "time", "allreduce")
DENSE = ("lazy", "lazy:64", "wfbp", "bsp", "merged", "priority:64", "horovod", "auto")
OPTIMIZERS = ("plain", "momentum", "decay", "adam")

# Seconds and seconds per byte. With a network given, nothing is measured.
NETWORK = {
    "allreduce": {"alpha_seconds": 1e-5, "beta_seconds_per_byte": 1e-7},
    "allgather": {"alpha_seconds": 1e-5, "beta_seconds_per_byte": 1e-7},
}


@dataclasses.dataclass(frozen=True, repr=False)
class Settings(Short):
    """Arguments of ``DistributedOptimizer``. ``optimizer``: the one that is wrapped."""

    policy: str = "sfb"
    dense: str = "lazy"
    reduce_in: str = "backward"
    passes: int = 1
    op: str = "Average"
    predivide: float = 1.0
    compression: str = "none"
    sparse_as_dense: bool = False
    groups: int = 0
    optimizer: str = "plain"


@dataclasses.dataclass(frozen=True, repr=False)
class Program(Short):
    """``before``: actions before the optimizer is wrapped."""

    ranks: int = 2
    model: Spec = Spec()
    settings: Settings = Settings()
    actions: tuple = ()
    before: tuple = ()

    def text(self, mark: Optional[int] = None) -> str:
        """Python that makes it again. ``mark``: the index of an action to point at."""
        lines = [
            "Program(",
            f"    ranks={self.ranks},",
            f"    model={self.model!r},",
            f"    settings={self.settings!r},",
        ]
        if self.before:
            lines.append(f"    before={self.before!r},")
        lines.append("    actions=(")
        step = 0
        for index, action in enumerate(self.actions):
            if index == 0 or type(self.actions[index - 1]).__name__ == "EndStep":
                lines.append(f"        # step {step}")
                step += 1
            lines.append(f"        {action!r}," + ("  # <-- here" if index == mark else ""))
        return "\n".join(lines + ["    ),", ")"])

"""The parameters of an optimizer and their names.

The rules are Horovod's. So are the words of messages on which scripts match.
"""

from collections.abc import Iterable, Sequence
from typing import Any, Optional, Union

import torch

__all__ = ["all_parameters", "check_groups", "name_parameters"]


def all_parameters(optimizer: Any) -> list[torch.Tensor]:
    """All parameters, in the order of the groups."""
    _check_initialized(optimizer.param_groups, optimizer._parameter_names)
    return [p for group in optimizer.param_groups for p in group["params"]]


def name_parameters(
    param_groups: Sequence[dict[str, Any]], named_parameters: Optional[Iterable[tuple[str, torch.Tensor]]]
) -> dict[torch.Tensor, str]:
    """Maps each parameter to its name, under Horovod's rules."""
    if named_parameters is not None:
        named_parameters = list(named_parameters)
    else:
        named_parameters = [
            (f"allreduce.noname.{i}.{j}", v)
            for i, group in enumerate(param_groups)
            for j, v in enumerate(group["params"])
        ]
    if any(not isinstance(entry, tuple) for entry in named_parameters):
        raise ValueError(
            "named_parameters should be a sequence of tuples (name, parameter), usually produced by "
            "model.named_parameters()."
        )
    names = [name for name, _ in named_parameters]
    duplicates = sorted({name for name in names if names.count(name) > 1}) if len(set(names)) != len(names) else []
    if duplicates:
        raise ValueError(
            f"Parameter names in named_parameters must be unique. Found duplicates: {', '.join(duplicates)}"
        )
    _check_initialized(param_groups, {p: name for name, p in named_parameters})
    named = {id(p) for _, p in named_parameters}
    unnamed = [
        (i, j, p) for i, group in enumerate(param_groups) for j, p in enumerate(group["params"]) if id(p) not in named
    ]
    if unnamed:
        where = ", ".join(f"param_groups[{i}]['params'][{j}] of shape {tuple(p.shape)}" for i, j, p in unnamed)
        raise ValueError(
            "named_parameters was specified, but one or more model parameters were not named. Python object ids: "
            f"{', '.join(str(id(p)) for _, _, p in unnamed)} ({where})"
        )
    return {p: name for name, p in sorted(named_parameters, key=lambda entry: entry[0])}


def _check_initialized(param_groups: Sequence[dict[str, Any]], names: dict[torch.Tensor, str]) -> None:
    """Refuses parameters of lazy layers: before the first forward they have neither shape nor identity."""
    for i, group in enumerate(param_groups):
        for j, p in enumerate(group["params"]):
            if torch.nn.parameter.is_lazy(p):
                raise ValueError(
                    f"Parameter {names.get(p, 'without a name')} (param_groups[{i}]['params'][{j}]) is not "
                    "initialized yet: its layer is lazy and has seen no input. Run one forward pass (under "
                    "torch.no_grad() will do) before you wrap the optimizer, on every rank."
                )


def check_groups(groups: Any) -> Union[None, int, list[list[torch.Tensor]]]:
    """Returns the argument as it is, or raises ValueError."""
    if groups is None:
        return None
    if isinstance(groups, bool) or not isinstance(groups, (int, list)) or (isinstance(groups, int) and groups <= 0):
        raise ValueError("groups should be a non-negative integer or a list of list of torch.Tensor.")
    if isinstance(groups, list):
        seen: set[int] = set()
        for p in (p for group in groups for p in group):
            if not isinstance(p, torch.Tensor):
                raise ValueError("groups must consist of torch.Tensor.")
            if id(p) in seen:
                raise ValueError("A parameter can only appear once in groups.")
            seen.add(id(p))
    return groups

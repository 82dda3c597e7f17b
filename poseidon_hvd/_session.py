"""How an optimizer opens its session of the C++ extension, and what the session calls back."""

import os
import weakref
from typing import TYPE_CHECKING, Any, Callable, Optional

import torch
from horovod.common.util import split_list
from horovod.torch.compression import Compression
from horovod.torch.mpi_ops import Average

from ._native import _C
from ._parameters import all_parameters

if TYPE_CHECKING:
    from .optimizer import _DistributedOptimizer

__all__ = ["index_groups", "open_session"]

# Anything else is a compressor of the user's own.
_COMPRESSION_KINDS = {Compression.none: "none", Compression.fp16: "fp16"}


def open_session(
    optimizer: "_DistributedOptimizer", *, tag: Optional[str], max_gathered_elements: Optional[int]
) -> None:
    """Local: no rank waits for another here.

    Args:
        tag: None for the next number.
        max_gathered_elements: None for Horovod's own limit.
    """
    optimizer._session = None  # the old one lets go of the parameters before another takes them
    # By name, so that the order is the same on every rank whatever container the parameters came from.
    optimizer._params = sorted(all_parameters(optimizer), key=optimizer._parameter_names.__getitem__)
    names = [optimizer._parameter_names[p] for p in optimizer._params]
    process_set = optimizer.process_set
    optimizer._hooks.resolve(names)
    settings = optimizer._config.in_session(names, process_set.process_set_id)  # validates, also where nothing is sent
    if not process_set.included() or (process_set.size() == 1 and os.environ.get("HOROVOD_ELASTIC") != "1"):
        return
    groups = index_groups(optimizer)
    compression = _COMPRESSION_KINDS.get(optimizer._compression, "python")
    predivide = optimizer.gradient_predivide_factor if optimizer.op == Average else 1.0
    agreed = {
        **settings.agreed,
        "op": optimizer.op,
        "compression": getattr(optimizer._compression, "__name__", str(optimizer._compression)),
        "gradient_predivide_factor": optimizer.gradient_predivide_factor,
        "sparse_as_dense": optimizer.sparse_as_dense,
        "groups": ";".join(",".join(names[i] for i in group) for group in groups),
        "hooks before reduction": ",".join(optimizer._hooks.names_before),
    }
    optimizer._logged_schemes = None
    optimizer._tag = optimizer._world.session_tag(process_set.process_set_id) if tag is None else tag
    contexts: dict[int, Any] = {}
    in_python = compression == "python"
    optimizer._session = _C.Session(
        engine=optimizer._world.engine(),
        names=names,
        params=optimizer._params,
        groups=groups,
        op=optimizer.op,
        prescale=1.0 / predivide,
        postscale=predivide,
        passes_per_step=optimizer.backward_passes_per_step,
        compression=compression,
        compress=_compressor(optimizer._compression, contexts) if in_python else None,
        decompress=_decompressor(optimizer._compression, contexts) if in_python else None,
        sparse_as_dense=optimizer.sparse_as_dense,
        process_set=process_set.process_set_id,
        rank=process_set.rank(),
        size=process_set.size(),
        tag=optimizer._tag,
        settings="\n".join(f"{key}={value}" for key, value in agreed.items()),
        max_gathered_elements=max_gathered_elements,
        before=optimizer._hooks.caller(),
        hooked=optimizer._hooks.hooked,
        reduce=_reducer(optimizer),
        **settings.options,
    )
    optimizer._session.set_hooks_after(optimizer._hooks.any_after)


def index_groups(optimizer: "_DistributedOptimizer") -> list[list[int]]:
    """Indices of the parameters that are reduced together; those of no group are in none of the lists."""
    given = optimizer._groups
    if given is None:
        return []
    index = {p: i for i, p in enumerate(optimizer._params)}
    if isinstance(given, list):
        groups = [[index[p] for p in group if p in index and p.requires_grad] for group in given]
    else:
        groups = split_list([index[p] for p in all_parameters(optimizer) if p.requires_grad], given)
    return [group for group in groups if len(group) > 1]


def _reducer(optimizer: "_DistributedOptimizer") -> Callable[[], None]:
    """For the session, which must not keep the optimizer alive."""
    reference = weakref.ref(optimizer)

    def reduce() -> None:
        optimizer = reference()
        if optimizer is not None:
            optimizer._reduce_in_backward()

    return reduce


def _compressor(compression: Any, contexts: dict[int, Any]) -> Callable[[int, torch.Tensor], torch.Tensor]:
    def compress(index: int, grad: torch.Tensor) -> torch.Tensor:
        tensor: torch.Tensor
        tensor, contexts[index] = compression.compress(grad)
        return tensor

    return compress


def _decompressor(compression: Any, contexts: dict[int, Any]) -> Callable[[int, torch.Tensor], torch.Tensor]:
    def decompress(index: int, received: torch.Tensor) -> torch.Tensor:
        # A sparse gradient travels as it is; as in Horovod, decompression gets its dtype as the context.
        context = received.dtype if received.is_sparse else contexts.pop(index)
        grad: torch.Tensor = compression.decompress(received, context)
        return grad

    return decompress

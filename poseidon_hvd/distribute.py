"""The factory ``DistributedOptimizer``: it checks its arguments and makes the distributed optimizer."""

import collections
import warnings
import weakref
from collections.abc import Iterable, Mapping
from typing import Any, Optional, Union

import torch
from horovod.torch.compression import Compression
from horovod.torch.mpi_ops import Adasum, Average, ProcessSet, global_process_set, rocm_built
from horovod.torch.optimizer import DistributedOptimizer as _horovod_distributed_optimizer

from . import _runtime
from . import optimizer as _optimizer
from .config import Config

__all__ = ["DistributedOptimizer"]


def DistributedOptimizer(
    optimizer: torch.optim.Optimizer,
    named_parameters: Optional[Iterable[tuple[str, torch.Tensor]]] = None,
    compression: Any = Compression.none,
    backward_passes_per_step: int = 1,
    op: int = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: Optional[Union[int, list[list[torch.Tensor]]]] = None,
    sparse_as_dense: bool = False,
    process_set: ProcessSet = global_process_set,
    *,
    policy: Optional[str] = None,
    schemes: Optional[Mapping[str, str]] = None,
    network: Union[None, str, Mapping[str, Any]] = None,
    memory_limit: Optional[float] = None,
    uneven_steps: Optional[bool] = None,
    dense: Optional[str] = None,
    reduce_in: Optional[str] = None,
) -> torch.optim.Optimizer:
    """Makes an optimizer that reduces gradients over all ranks before each step, the cheaper way for each tensor.

    It replaces ``horovod.torch.DistributedOptimizer``, with the same arguments, defaults and behaviour. In addition the
    gradient of a fully connected layer may travel as its sufficient factors: the rows of the layer's input x (K x N)
    and of its output's gradient d (K x M), from which every rank rebuilds ``d^T x`` (Poseidon, arXiv 1706.03292,
    section 3.2). The gradient of an embedding table may travel as the rows that were touched, with equal ids merged.
    The first step runs dense and is observed. Then rank 0 chooses a scheme per tensor and all ranks follow. See
    ``scheme_report()`` and ``stats()`` of the result.

    Args:
        optimizer: the optimizer to wrap. Its hyperparameters and attributes are kept. Its state is not, as in Horovod:
            load it after wrapping.
        named_parameters: names of the parameters, usually ``model.named_parameters()``; the same on every rank.
        compression: ``Compression.none``, ``Compression.fp16`` (gradients and factors travel in float16) or a
            compressor class (its gradients are always allreduced).
        backward_passes_per_step: the number of backward passes whose gradients are summed locally before a step.
        op: ``Average``, ``Sum``, ``Min``, ``Max``, ``Product`` or ``Adasum`` (Horovod's own implementation). SFB is for
            averages and sums.
        gradient_predivide_factor: for ``Average``: gradients are divided by it before the sum and multiplied after.
        num_groups: deprecated, use ``groups``.
        groups: the number of groups, or lists of parameters, whose gradients are reduced together. These are always
            allreduced.
        sparse_as_dense: reduce sparse gradients as dense ones.
        process_set: the ranks that take part.
        policy: ``"time"`` makes the predicted step shortest, from a second of measurements in the first step.
            ``"bytes"`` sends fewer bytes. ``"sfb"`` uses factors wherever it is possible, and rows for embeddings.
            ``"allreduce"`` uses neither. The default comes from ``POSEIDON_POLICY``, else it is ``"time"``.
        schemes: a mapping from patterns of parameter names to ``"auto"``, ``"allreduce"``, ``"sfb"`` or, for embedding
            tables, ``"row-sparse"``. A layer is named by its weight, and its bias goes along. The default comes from
            ``POSEIDON_SCHEMES`` (``"fc*.weight=sfb,head.weight=allreduce"``).
        network: policy ``"time"`` uses this network and does not measure: what ``plan()["network"]`` was, or a JSON
            file with it. The default comes from ``POSEIDON_ALPHA_ALLREDUCE`` (s), ``POSEIDON_BETA_ALLREDUCE`` (s/byte),
            ``.._ALLGATHER``, or the file ``POSEIDON_PROFILE``.
        memory_limit: the bytes that gathered rows may take on each rank under policy ``"time"``. The default comes from
            ``POSEIDON_MEMORY_LIMIT_MB``, else it is 2 GB.
        uneven_steps: ranks may call ``hvd.join()`` while others still train, as with plain Horovod. It costs an
            allreduce of one number per step, and everything is allreduced in steps in which a rank is missing. The
            default comes from ``POSEIDON_UNEVEN_STEPS`` (0 or 1), else it is False.
        dense: how gradients that are allreduced are put together. ``"auto"`` makes the predicted step shortest, from
            the same measurements. ``"lazy"`` or ``"lazy:BYTES"`` sends a message for every so many bytes (4 MiB), in
            the order of backward, the same in every run (GradientFlow, arXiv 1902.06855, section 3.1). ``"merged"`` is
            MG-WFBP (arXiv 1811.11141). ``"wfbp"`` sends one message for each gradient, ``"bsp"`` one after backward.
            ``"priority"`` or ``"priority:BYTES"`` sends parts, front layers first (ByteScheduler). ``"horovod"`` leaves
            it to Horovod's fusion. The default comes from ``POSEIDON_DENSE``, else it is ``"auto"``.
        reduce_in: ``"backward"``: gradients are reduced in place when ``backward()`` returns, so what a script then
            does to ``.grad`` acts as in one process. ``"step"``: they are reduced in ``synchronize()`` or ``step()``,
            as in Horovod, so work between ``backward()`` and ``step()`` overlaps with communication. The default comes
            from ``POSEIDON_REDUCE_IN``, else it is ``"backward"``.

    Returns:
        An instance of a subclass of the optimizer's class, with Horovod's ``synchronize()`` and ``skip_synchronize()``.

    Raises:
        ValueError: an argument that Horovod would refuse, an unknown policy, scheme, pattern or method, or a network
            that cannot be read.
        TypeError: ``torch.optim.LBFGS``, which calls its closure a different number of times on each rank.
    """
    _check(optimizer, backward_passes_per_step, op, gradient_predivide_factor)
    if num_groups != 0:
        warnings.warn("Parameter `num_groups` has been replaced by `groups`.", DeprecationWarning, stacklevel=2)
        groups = num_groups if groups is None else groups
    config = Config.resolve(
        policy=policy,
        schemes=schemes,
        network=network,
        memory_limit=memory_limit,
        uneven_steps=uneven_steps,
        dense=dense,
        reduce_in=reduce_in,
    )
    horovod_size = _runtime.current_world().size()  # raises if Horovod is not initialized
    reason = _reason_for_horovods(optimizer, op, horovod_size)
    if reason is not None:
        if config.policy != Config.policy or config.schemes:
            warnings.warn(
                f"poseidon_hvd: {reason}; Horovod's own optimizer is used, and policy and schemes are ignored.",
                stacklevel=2,
            )
        plain: torch.optim.Optimizer = _horovod_distributed_optimizer(
            optimizer,
            named_parameters,
            compression,
            backward_passes_per_step,
            op,
            gradient_predivide_factor,
            0,
            groups,
            sparse_as_dense,
            process_set,
        )
        return plain
    wrapped_before = _is_wrapped(optimizer)
    wrapped = _wrap(optimizer)
    if not wrapped_before:
        _drop_state(wrapped)
    wrapped._setup(
        named_parameters,
        compression,
        backward_passes_per_step,
        op,
        gradient_predivide_factor,
        groups,
        sparse_as_dense,
        process_set,
        config,
    )
    result: torch.optim.Optimizer = wrapped
    return result


def _check(
    optimizer: torch.optim.Optimizer, backward_passes_per_step: int, op: int, gradient_predivide_factor: float
) -> None:
    """Checks what does not need Horovod to run. Messages are Horovod's where it has some."""
    if gradient_predivide_factor != 1.0:
        if rocm_built():
            raise ValueError("gradient_predivide_factor not supported yet with ROCm")
        if op != Average:
            raise ValueError("gradient_predivide_factor not supported with op != Average")
    if backward_passes_per_step <= 0:
        raise ValueError("backward_passes_per_step must be > 0")
    if isinstance(optimizer, torch.optim.LBFGS):
        raise TypeError(
            "torch.optim.LBFGS cannot be distributed: each rank would evaluate its closure, and so reduce gradients, a "
            "different number of times and wait for the others for ever."
        )


def _reason_for_horovods(optimizer: torch.optim.Optimizer, op: int, size: int) -> Optional[str]:
    """Why Horovod's own optimizer does the work, or None."""
    if op == Adasum and size > 1:
        return "op=Adasum reduces updates instead of gradients"
    if any(p.device.type != "cpu" for group in optimizer.param_groups for p in group["params"]):
        return "this version exchanges gradients of CPU tensors only"
    return None


def _is_wrapped(optimizer: torch.optim.Optimizer) -> bool:
    return "_open_session" in type(optimizer).__dict__


def _wrap(optimizer: torch.optim.Optimizer) -> Any:
    """Makes an object of a new class that lies between the user's class and the methods of ours."""
    base: Any = type(optimizer)
    if _is_wrapped(optimizer):  # start from the user's class
        old: Any = optimizer
        old._close_session()
        base = base.__mro__[1]
    methods = _optimizer._DistributedOptimizer.__dict__
    attributes = {key: value for key, value in methods.items() if key not in ("__dict__", "__weakref__")}
    wrapped_class: Any = type(base.__name__, (base,), attributes)
    wrapped_class._distributed_class = wrapped_class  # for super(): a user may subclass it
    # The user's __init__ is not called: it would lose what else it was given. step() is left out: a scheduler may have
    # bound it to the instance.
    wrapped = wrapped_class.__new__(wrapped_class)
    wrapped.__dict__.update({key: value for key, value in optimizer.__dict__.items() if key != "step"})
    # The same groups. One that is added to the wrapped optimizer later is not ours.
    wrapped.param_groups = list(optimizer.param_groups)
    wrapped._wrapped_from = weakref.ref(optimizer)
    return wrapped


def _drop_state(optimizer: torch.optim.Optimizer) -> None:
    """Drops the state, as Horovod does.

    Horovod's examples broadcast the state before wrapping, which leaves the state of a step that never was.
    """
    steps = [state["step"] for state in optimizer.state.values() if "step" in state]
    if any(step > 1 for step in steps):
        warnings.warn(
            "poseidon_hvd: the state of the optimizer (moments, step counts) is not taken over when it is wrapped, as "
            "in Horovod. Load it after wrapping.",
            stacklevel=3,
        )
    optimizer.state = collections.defaultdict(dict)

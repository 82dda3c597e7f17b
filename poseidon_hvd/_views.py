"""What an optimizer tells of itself, and the weight of a batch. ``_DistributedOptimizer`` has these as methods."""

import math
import sys
from typing import TYPE_CHECKING, Any, Optional, Union

import torch
from horovod.torch.mpi_ops import Average

from .report import plan_table

if TYPE_CHECKING:
    from .optimizer import _DistributedOptimizer

__all__ = ["log_new_plan", "plan", "scheme_report", "stats", "weigh"]


def weigh(optimizer: "_DistributedOptimizer", loss: torch.Tensor, samples: Union[int, float]) -> torch.Tensor:
    """The loss of a batch, scaled so that the averaged gradient is the mean over all samples of all ranks.

    Horovod's average counts ranks alike, whatever number of samples each had. Call it between forward and backward,
    on all ranks, once for each backward pass; a rank in ``hvd.join()`` counts no samples. Costs an allreduce of one
    number, for which it waits::

        loss = optimizer.weigh(F.cross_entropy(model(x), y), len(x))
        loss.backward()

    Args:
        loss: the mean over this rank's samples, of any shape.
        samples: how many there were, 0 or more; or the sum of their weights.

    Returns:
        ``loss * samples * size / total``, with ``size`` ranks and ``total`` samples of all of them. To log, use
        ``loss`` itoptimizer.

    Raises:
        ValueError: ``op`` is not ``Average``; ``samples`` is negative or no number; or it is 0 and the loss is not
            finite, such as the mean over an empty batch.
    """
    if optimizer.op != Average:
        raise ValueError(
            "weigh() is for op=hvd.Average. With op=hvd.Sum use the sum over this rank's samples as its loss."
        )
    try:
        count = float(samples)
    except (TypeError, ValueError, RuntimeError):
        count = math.nan
    if not (math.isfinite(count) and count >= 0):
        raise ValueError(f"weigh: samples={samples!r} is not a number of 0 or more.")
    session = optimizer._current_session()
    total = count if session is None else session.sum_over_ranks("samples", count)
    if count == 0 and not torch.isfinite(loss).all():
        raise ValueError(
            "weigh: samples is 0 and the loss is not finite, so the gradient of all ranks might not be either. On a "
            "rank without samples use a finite loss, such as model(x).sum()."
        )
    size = 1 if session is None else optimizer.process_set.size()
    return loss * (count * size / total if total > 0 else 0.0)


def scheme_report(optimizer: "_DistributedOptimizer") -> str:
    """A table of every tensor's scheme, what each scheme would send and take, and why this one; text for a
    terminal.
    """
    size = optimizer.process_set.size() if optimizer.process_set.included() else 0
    return plan_table(optimizer.plan(), policy=optimizer._config.policy, size=size)


def plan(optimizer: "_DistributedOptimizer") -> Optional[dict[str, Any]]:
    """The plan in force as plain data, for programs and ``json.dump``; None until the first step is over.

    Returns:
        ``policy``; ``size``, the ranks; ``made_at_step``; ``tensors``, in the order of names, each with ``name``,
        ``shape``, ``rows`` (of all ranks together in that step), ``scheme``, ``reason`` and ``costs``: scheme ->
        ``bytes`` that each rank sends in a step, mean over ranks, and ``seconds``: transfer and the tensor's own
        work alone, nothing hidden; both None where the scheme cannot be used or they are not known. With policy
        ``"time"`` also ``network`` (``alpha_seconds`` and ``beta_seconds_per_byte`` of ``allreduce``, per byte of
        tensor, and of ``allgather``, per byte gathered from all ranks; ``skew_seconds``, by which the first rank
        waited for the last), ``network_load`` (``allreduce``, ``allgather``: how many times slower than when it was
        measured idle the network was in the steps observed), ``predicted_step_seconds``, ``exposed_seconds`` (of
        it, communication that backward does not hide) and ``predicted_dense_step_seconds``, with everything
        allreduced; otherwise None. ``dense``: the ``method`` that puts allreduced gradients together and its
        ``slices``, lists of the names that travel in one message, in the order of sending; a name that is in
        several of them travels in parts, one in none by itoptimizer.
    """
    plan = optimizer._session.plan() if optimizer._session is not None else None
    if plan is None:
        return None
    shapes = {optimizer._parameter_names[p]: list(p.shape) for p in optimizer._params}
    chosen, dense = plan["predicted"] or {}, plan["predicted_dense"] or {}
    return {
        "policy": optimizer._config.policy,
        "size": plan["size"],
        "made_at_step": plan["made_at_step"],
        "network": plan["network"],
        "network_load": plan["network_load"] if plan["network"] else None,
        "predicted_step_seconds": chosen.get("step_seconds"),
        "exposed_seconds": chosen.get("exposed_seconds"),
        "predicted_dense_step_seconds": dense.get("step_seconds"),
        "dense": plan["dense"],
        "tensors": [
            {
                "name": d["name"],
                "shape": shapes[d["name"]],
                "rows": d["global_rows"],
                "scheme": d["scheme"],
                "reason": d["reason"],
                "costs": {
                    "allreduce": {"bytes": d["allreduce_bytes"], "seconds": d["allreduce_seconds"]},
                    "sfb": _cost(d["sfb_bytes"], d["gather_seconds"]),
                    "row-sparse": _cost(d["row_sparse_bytes"], d["gather_seconds"]),
                },
            }
            for d in plan["tensors"]
        ],
    }


def stats(optimizer: "_DistributedOptimizer") -> dict[str, Any]:
    """Counters since the start.

    Returns:
        ``steps``; ``synchronize_seconds``, the time that ``backward()`` and ``synchronize()`` blocked;
        ``early_messages``, how many messages of factors or rows left from their layer's own backward node, before
        its input-gradient GEMM; and ``schemes``: for ``"allreduce"``, ``"sfb"`` and ``"row-sparse"`` a dict with
        ``tensors`` (gradients exchanged), ``collectives``, ``wire_bytes`` (payload that this rank sent, mean over
        ranks), ``horovod_wire_bytes`` (what an allreduce of the same gradients would have sent),
        ``waited_seconds``, and the stages ``pack_seconds``, ``queue_seconds``, ``wire_seconds``,
        ``handoff_seconds``, ``rebuild_seconds``, summed over exchanges, which overlap. ``dense``: of gradients in
        the plan's ``slices``, the allreduces (``slices``), the bytes reduced where they lay (``in_place_bytes``)
        and those copied into a message (``copied_bytes``).
    """
    if optimizer._session is not None:
        return optimizer._session.stats()
    keys = (
        "tensors",
        "collectives",
        "wire_bytes",
        "horovod_wire_bytes",
        "waited_seconds",
        "pack_seconds",
        "queue_seconds",
        "wire_seconds",
        "handoff_seconds",
        "rebuild_seconds",
    )
    schemes = {name: dict.fromkeys(keys, 0) for name in ("allreduce", "sfb", "row-sparse")}
    dense = dict.fromkeys(("slices", "in_place_bytes", "copied_bytes"), 0)
    return {"steps": 0, "synchronize_seconds": 0.0, "early_messages": 0, "schemes": schemes, "dense": dense}


def log_new_plan(optimizer: "_DistributedOptimizer") -> None:
    """Prints the plan on rank 0 if its schemes are not those of the last call."""
    found = plan(optimizer)
    schemes = None if found is None else [tensor["scheme"] for tensor in found["tensors"]]
    if found and schemes != optimizer._logged_schemes and optimizer.process_set.rank() == 0:
        print(
            f"[poseidon_hvd] plan made at step {found['made_at_step']}\n{scheme_report(optimizer)}",
            file=sys.stderr,
            flush=True,
        )
    optimizer._logged_schemes = schemes


def _cost(bytes_sent: Optional[float], seconds: Optional[float]) -> dict[str, Optional[float]]:
    return {"bytes": bytes_sent, "seconds": None if bytes_sent is None else seconds}

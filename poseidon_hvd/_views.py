"""What an optimizer reports about itself, and the weighting of a batch.

``_DistributedOptimizer`` has these functions as methods.
"""

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
    """Scales the loss of a batch, so that the averaged gradient is the mean over all samples of all ranks.

    Horovod's average counts every rank alike, whatever number of samples it had. All ranks call this function between
    forward and backward, once for each backward pass; a rank in ``hvd.join()`` counts no samples. The function waits
    for an allreduce of one number::

        loss = optimizer.weigh(F.cross_entropy(model(x), y), len(x))
        loss.backward()

    Args:
        loss: the mean over this rank's samples, of any shape.
        samples: the number of samples, 0 or more; or the sum of their weights.

    Returns:
        ``loss * samples * size / total``, with ``size`` ranks and ``total`` samples of all of them. To log the loss,
        use ``loss`` itself.

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
    """A table for a terminal: the scheme of every tensor, the reason, and what each scheme would send and take."""
    size = optimizer.process_set.size() if optimizer.process_set.included() else 0
    return plan_table(optimizer.plan(), policy=optimizer._config.policy, size=size)


def plan(optimizer: "_DistributedOptimizer") -> Optional[dict[str, Any]]:
    """The plan in force as plain data, for programs and ``json.dump``; None until the first step is over.

    Returns:
        A dict with these keys:

        - ``policy``, ``size`` (the number of ranks), ``made_at_step``.
        - ``tensors``: one dict per tensor, in the order of names, with ``name``, ``shape``, ``rows`` (of all ranks
          together in that step), ``scheme``, ``reason`` and ``costs``. ``costs`` maps a scheme to ``bytes``, which each
          rank sends in a step (mean over ranks), and ``seconds``, which transfer and the tensor's own work take while
          nothing is hidden. Both are None where the scheme cannot be used or they are not known.
        - ``dense``: the ``method`` that puts allreduced gradients together, and its ``slices``: lists of the names that
          travel in one message, in the order of sending. A name in several lists travels in parts, a name in no list
          travels by itself.

        The following are None unless the policy is ``"time"``:

        - ``network``: for ``allreduce`` (per byte of tensor) and ``allgather`` (per byte gathered from all ranks) a
          dict with ``alpha_seconds`` and ``beta_seconds_per_byte``; ``skew_seconds``, the time that the first rank
          waited for the last one.
        - ``network_load``: how many times slower the network was in the observed steps than when it was measured idle,
          for ``allreduce`` and ``allgather``.
        - ``predicted_step_seconds``; ``exposed_seconds``, the part of it in which communication is not hidden by
          backward; ``predicted_dense_step_seconds``, the prediction with everything allreduced.
    """
    found = optimizer._session.plan() if optimizer._session is not None else None
    if found is None:
        return None
    shapes = {optimizer._parameter_names[p]: list(p.shape) for p in optimizer._params}
    chosen, dense = found["predicted"] or {}, found["predicted_dense"] or {}
    return {
        "policy": optimizer._config.policy,
        "size": found["size"],
        "made_at_step": found["made_at_step"],
        "network": found["network"],
        "network_load": found["network_load"] if found["network"] else None,
        "predicted_step_seconds": chosen.get("step_seconds"),
        "exposed_seconds": chosen.get("exposed_seconds"),
        "predicted_dense_step_seconds": dense.get("step_seconds"),
        "dense": found["dense"],
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
            for d in found["tensors"]
        ],
    }


def stats(optimizer: "_DistributedOptimizer") -> dict[str, Any]:
    """Counters since the start.

    Returns:
        A dict with these keys:

        - ``steps``.
        - ``synchronize_seconds``: how long ``backward()`` and ``synchronize()`` blocked.
        - ``early_messages``: how many messages of factors or rows left from their layer's own backward node, before its
          input-gradient GEMM.
        - ``schemes``: a dict for each of ``"allreduce"``, ``"sfb"`` and ``"row-sparse"``, with ``tensors`` (gradients
          exchanged), ``collectives``, ``wire_bytes`` (payload that this rank sent, mean over ranks),
          ``horovod_wire_bytes`` (what an allreduce of the same gradients would have sent), ``waited_seconds``, and the
          stages ``pack_seconds``, ``queue_seconds``, ``wire_seconds``, ``handoff_seconds`` and ``rebuild_seconds``.
          Stages are summed over exchanges, which overlap.
        - ``dense``: for gradients in the plan's ``slices`` the number of allreduces (``slices``), the bytes that were
          reduced where they lay (``in_place_bytes``) and the bytes that were copied into a message (``copied_bytes``).
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

"""How a step ends: Horovod's timeline of the first layer's tensors, which backward yields last and nothing is left
to hide.
"""

import json
import pathlib
from collections.abc import Sequence
from typing import Any

import numpy as np

__all__ = ["MARKS", "spans", "tails"]

# Seconds after the rank's own backward: when Horovod took the tensors up, when all ranks had them, when their
# collective began and ended, and when the step ended; and how long a collective that began before still kept the wire.
MARKS = ("taken_up", "agreed", "begun", "ended", "step_ended", "wire_busy")


def spans(path: pathlib.Path) -> list[dict[str, Any]]:
    """``tensor``, ``what``, ``begin`` and ``end`` (seconds since the epoch) of everything that the timeline
    recorded.
    """
    text = path.read_text().rstrip().rstrip(",")
    events = json.loads(text if text.endswith("]") else text + "]")
    origin = next(
        e["args"]["start_time_since_epoch_in_micros"]
        for e in events
        if "start_time_since_epoch_in_micros" in e.get("args", {})
    )
    names = {e["pid"]: e["args"]["name"] for e in events if e.get("name") == "process_name" and "name" in e["args"]}
    begun: dict[int, list[Any]] = {}
    found = []
    for event in events:
        if event.get("ph") == "B":
            begun.setdefault(event["pid"], []).append(event)
        elif event.get("ph") == "E" and begun.get(event["pid"]):
            begin = begun[event["pid"]].pop()
            found.append(
                {
                    "tensor": names.get(event["pid"], ""),
                    "what": begin["name"],
                    "begin": (origin + begin["ts"]) / 1e6,
                    "end": (origin + event["ts"]) / 1e6,
                }
            )
    return found


def tails(
    path: pathlib.Path, backward_ends: Sequence[float], step_ends: Sequence[float], dilation: float
) -> dict[str, float]:
    """Median of each of ``MARKS`` over steps, in undilated seconds.

    The times passed in are seconds since the epoch on the same rank.
    """
    recorded = spans(path)
    steps = [_tail(recorded, backward_end, step_end) for backward_end, step_end in zip(backward_ends, step_ends)]
    steps = [step for step in steps if step]
    return {mark: float(np.median([step[mark] for step in steps])) / dilation for mark in MARKS} if steps else {}


def _tail(recorded: list[dict[str, Any]], backward_end: float, step_end: float) -> dict[str, float]:
    mine = [s for s in recorded if "weights.0." in s["tensor"] and backward_end - 0.05 < s["end"] < step_end + 0.05]
    negotiations = [s for s in mine if s["what"].startswith("NEGOTIATE")]
    collectives = [s for s in mine if s["what"] in ("ALLREDUCE", "ALLGATHER")]
    if not negotiations or not collectives:
        return {}
    before = [
        s["end"] for s in recorded if s["what"] in ("ALLREDUCE", "ALLGATHER") and s["begin"] < backward_end < s["end"]
    ]
    return {
        "taken_up": max(s["begin"] for s in negotiations) - backward_end,
        "agreed": max(s["end"] for s in negotiations) - backward_end,
        "begun": max(s["begin"] for s in collectives) - backward_end,
        "ended": max(s["end"] for s in collectives) - backward_end,
        "step_ended": step_end - backward_end,
        "wire_busy": max(before, default=backward_end) - backward_end,
    }

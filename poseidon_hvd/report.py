"""The table of schemes, as text for people."""

import collections
from collections.abc import Sequence
from typing import Any, Optional

_UNITS = ("B", "kB", "MB", "GB", "TB")


def format_bytes(count: Optional[float]) -> str:
    """``"1.25 MB"``, powers of 1000 as in network rates; ``"-"`` for None."""
    if count is None:
        return "-"
    value = float(count)
    for unit in _UNITS:
        if abs(value) < 1000 or unit == _UNITS[-1]:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.2f} {unit}"
        value /= 1000
    raise AssertionError("unreachable")


def text_table(header: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[int] = ()) -> str:
    """Columns padded to their widest cell; those in ``right`` are right-aligned."""
    lines = [list(header)] + [list(row) for row in rows]
    widths = [max(len(line[column]) for line in lines) for column in range(len(header))]

    def format_line(line: Sequence[str]) -> str:
        cells = [
            cell.rjust(width) if column in right else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(line, widths))
        ]
        return "  ".join(cells).rstrip()

    return "\n".join(
        [format_line(lines[0]), "  ".join("-" * width for width in widths)] + [format_line(line) for line in lines[1:]]
    )


def format_milliseconds(seconds: Optional[float]) -> str:
    """``"12.3"``, three digits; ``"-"`` for None."""
    if seconds is None:
        return "-"
    value = seconds * 1e3
    return f"{value:.{2 if value < 10 else 1 if value < 100 else 0}f}"


def plan_table(plan: Optional[dict[str, Any]], *, policy: str, size: int) -> str:
    """The plan in force (``optimizer.plan()``), one line per tensor."""
    if size == 0:
        return "This rank is not in the optimizer's process set: nothing is exchanged."
    if size == 1:
        return "1 rank: nothing is exchanged."
    if not plan:
        return "No plan yet: it is made at the end of the first step."
    timed = plan["network"] is not None
    tables = any(tensor["costs"]["row-sparse"]["bytes"] is not None for tensor in plan["tensors"])
    other = "sfb or rows" if tables else "sfb"
    header = [
        "tensor",
        "shape",
        "rows",
        "scheme",
        "allreduce",
        other,
        *(("allreduce ms", f"{other} ms") if timed else ()),
        "why",
    ]
    rows = []
    for tensor in plan["tensors"]:
        costs = tensor["costs"]
        gathered = costs["sfb"] if costs["row-sparse"]["bytes"] is None else costs["row-sparse"]
        row = [
            tensor["name"],
            " x ".join(map(str, tensor["shape"])) or "scalar",
            str(tensor["rows"] or "-"),
            tensor["scheme"],
            format_bytes(costs["allreduce"]["bytes"]),
            format_bytes(gathered["bytes"]),
        ]
        if timed:
            row += [format_milliseconds(costs["allreduce"]["seconds"]), format_milliseconds(gathered["seconds"])]
        rows.append([*row, tensor["reason"]])
    table = text_table(header, rows, right=(1, 2, 4, 5, 6, 7) if timed else (1, 2, 4, 5))
    count = collections.Counter(tensor["scheme"] for tensor in plan["tensors"])
    by_rows = f", {count['row-sparse']} by touched rows" if count["row-sparse"] else ""
    lines = [
        f"{size} ranks, policy {policy}: {count['sfb']} of {len(rows)} tensors as sufficient factors{by_rows}",
        table,
    ]
    when = "in the first step" if plan["made_at_step"] == 0 else f"in step {plan['made_at_step']}"
    lines.append(
        f"rows: of all ranks {when}; allreduce, {other}: bytes that each rank sends per step that way"
        + ("; ms: transfer and own work alone, nothing hidden" if timed else "")
    )
    if timed:
        network = plan["network"]
        lines.append(
            "network: "
            + ", ".join(
                f"{kind} {network[kind]['alpha_seconds'] * 1e3:.2f} ms + "
                f"{network[kind]['beta_seconds_per_byte'] * 1e9:.3g} ns/byte"
                for kind in ("allreduce", "allgather")
            )
            + "; in a step {allreduce:.2f} and {allgather:.2f} times that".format(**plan["network_load"])
        )
        step, dense = plan["predicted_step_seconds"], plan["predicted_dense_step_seconds"]
        lines.append(
            f"predicted step: {format_milliseconds(step)} ms, "
            f"{format_milliseconds(plan['exposed_seconds'])} of them waiting; "
            f"all allreduce {format_milliseconds(dense)} ms, {dense / step if step else 1:.2f} times as long"
        )
    return "\n".join(lines)

"""Text for people: the table of schemes."""

from typing import Any, Dict, List, Mapping, Optional, Sequence, Tuple

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

    def format_line(line):
        cells = [cell.rjust(width) if column in right else cell.ljust(width) for column, (cell, width) in enumerate(zip(line, widths))]
        return "  ".join(cells).rstrip()

    return "\n".join([format_line(lines[0]), "  ".join("-" * width for width in widths)] + [format_line(line) for line in lines[1:]])


def plan_table(decisions: List[Dict[str, Any]], shapes: Mapping[str, Tuple[int, ...]], *, policy: str, size: int) -> str:
    """The plan in force, one line per tensor. Bytes are sent per rank and step, mean over ranks."""
    if size == 0:
        return "This rank is not in the optimizer's process set: nothing is exchanged."
    if size == 1:
        return "1 rank: nothing is exchanged."
    if not decisions:
        return "No plan yet: it is made at the end of the first step."
    rows = []
    for d in decisions:
        shape = " x ".join(map(str, shapes.get(d["name"], ()))) or "scalar"
        rows.append([d["name"], shape, str(d["global_rows"] or "-"), d["scheme"], format_bytes(d["allreduce_bytes"]),
                     format_bytes(d["sfb_bytes"]), d["reason"]])
    table = text_table(("tensor", "shape", "rows", "scheme", "allreduce", "sfb", "why"), rows, right=(1, 2, 4, 5))
    sfb = sum(d["scheme"] == "sfb" for d in decisions)
    return (
        f"{size} ranks, policy {policy}: {sfb} of {len(decisions)} tensors as sufficient factors\n{table}\n"
        "rows: of all ranks in the first step; allreduce, sfb: bytes that each rank sends per step that way"
    )

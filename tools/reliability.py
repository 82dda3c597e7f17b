"""Writes the table of docs/reliability.md from bench/results/faults.json: ``python tools/reliability.py``."""

import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "reliability.md"
RESULTS = ROOT / "bench" / "results" / "faults.json"

BEGIN = "<!-- begin: tools/reliability.py -->\n"
END = "<!-- end -->\n"
HEADER = ("fault", "phase", "ranks", "with poseidon_hvd", "seconds", "with Horovod", "seconds")


def seconds_text(seconds: float) -> str:
    return f"{seconds:.1f}" if seconds < 10 else f"{seconds:.0f}"


def table(rows: list[dict[str, Any]]) -> str:
    lines = [HEADER, ("---", "---", "---:", "---", "---:", "---", "---:")]
    for row in rows:
        cells = [row["fault"].replace("-", " "), row["phase"], str(row["ranks"])]
        for library in ("poseidon_hvd", "horovod.torch"):
            cells += [row[library]["outcome"], seconds_text(row[library]["seconds"])]
        lines.append(tuple(cells))
    return "".join("| " + " | ".join(cells) + " |\n" for cells in lines)


def with_table(page: str, rows: list[dict[str, Any]]) -> str:
    """The page with the table in its place."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    assert rest and after, f"{PAGE.name} lacks the lines {BEGIN.strip()} and {END.strip()}"
    return before + BEGIN + "\n" + table(rows) + "\n" + END + after


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text(), json.loads(RESULTS.read_text())["rows"]))

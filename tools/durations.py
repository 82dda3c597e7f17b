"""Writes the table of what takes how long into CONTRIBUTING.md, from what pytest prints.

    make test-python-all PYTEST_ARGS=--durations=0 | tee durations.txt
    python tools/durations.py durations.txt

Several files are added up; a test that is in two of them counts once, as in the last one.
"""

import argparse
import pathlib
import re
import sys

PAGE = pathlib.Path(__file__).resolve().parent.parent / "CONTRIBUTING.md"
BEGIN, END = "<!-- durations -->", "<!-- end of durations -->"
# "12.34s call     tests/test_exchange.py::test_threads[2-linear-one_row]"
LINE = re.compile(r"^([\d.]+)s (call|setup|teardown) +tests/(test_\w+)\.py::(\w+)(?:\[(\d+)-)?(.*)$", re.MULTILINE)


def seconds_by_test(texts: list[str]) -> dict[tuple[str, str], float]:
    """(group, test) -> seconds, with its setup and teardown. Cases are grouped by kind and number of ranks."""
    found: dict[tuple[str, str, str], float] = {}
    for text in texts:
        for seconds, phase, module, function, number, rest in LINE.findall(text):
            ranks = f" {number}" if module == "test_exchange" and number else ""
            group = f"{function}{ranks}" if ranks else module
            found[group, f"{function}[{number}{rest}", phase] = float(seconds)
    tests: dict[tuple[str, str], float] = {}
    for (group, test, _), seconds in found.items():
        tests[group, test] = tests.get((group, test), 0.0) + seconds
    return tests


def table(tests: dict[tuple[str, str], float]) -> str:
    groups: dict[str, list[float]] = {}
    for (group, _), seconds in tests.items():
        groups.setdefault(group, []).append(seconds)
    rows = [(sum(each), group, len(each), max(each)) for group, each in groups.items()]
    lines = ["| group | tests of 5 ms and more | seconds | the longest |", "| --- | ---: | ---: | ---: |"]
    for total, group, count, longest in sorted(rows, reverse=True):
        if total >= 1:
            lines.append(f"| `{group}` | {count} | {total:.0f} | {longest:.0f} |")
    lines.append(f"| all | {sum(row[2] for row in rows)} | {sum(row[0] for row in rows):.0f} | |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=pathlib.Path)
    args = parser.parse_args()
    tests = seconds_by_test([path.read_text() for path in args.files])
    if not tests:
        sys.exit("durations: no line of --durations=0 in these files")
    before, _, rest = PAGE.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    PAGE.write_text(f"{before}{BEGIN}\n{table(tests)}\n{END}{after}")


if __name__ == "__main__":
    main()

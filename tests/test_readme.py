"""What the documents show: the README's example runs and prints what stands there, and computed tables are computed right."""

import inspect
import re
from pathlib import Path

import pytest
from harness.launch import launch
from harness.registry import cases_of

import poseidon_hvd as hvd

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()
DOCUMENTS = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")] + sorted(
    (ROOT / "docs").glob("*.md")
)


def block(language):
    found = re.findall(rf"^```{language}\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
    assert len(found) == 1, f"{len(found)} {language} blocks in the README"
    return found[0]


def test_example_runs_and_prints_what_the_readme_shows(tmp_path):
    script = tmp_path / "readme.py"
    script.write_text(block("python"))
    output = launch(2, [str(script)], seconds=120, env={"POSEIDON_POLICY": "bytes"}).expect_success().output
    printed = [
        line.partition("<stdout>:")[2].rstrip() for line in output.splitlines() if line.startswith("[0]<stdout>:")
    ]
    assert "\n".join(printed).strip() == block("text").strip()


def test_example_is_short():
    assert sum(1 for line in block("python").splitlines() if line) <= 16


def rows_of_table(path, header):
    """Cells of the lines under the table whose header starts with ``header``."""
    lines = iter(path.read_text().splitlines())
    assert any(line.startswith(f"| {header} |") for line in lines), f"no table {header} in {path.name}"
    next(lines)
    for line in lines:
        if not line.startswith("|"):
            return
        yield [cell.strip() for cell in line.strip("|").split("|")]


def test_break_even_table():
    table = list(rows_of_table(ROOT / "docs" / "sfb.md", "layer"))
    assert len(table) >= 5
    for _, shape, rows, ranks, ratio in table:
        m, n = map(int, shape.split(" x "))
        break_even = 2 * m * n / (m + n)
        assert (int(rows), int(ranks)) == (int(break_even), int(break_even / 32)), shape
        assert float(ratio) == round(break_even / 256, 1), shape


def test_arguments_in_the_configuration_page():
    signature = inspect.signature(hvd.DistributedOptimizer).parameters
    page = ROOT / "docs" / "configuration.md"
    horovods = [(name.strip("`"), default.strip("`")) for name, default, _ in rows_of_table(page, "argument")]
    ours = re.findall(r"^\| `(\w+)` \| `POSEIDON_\w+` \|", page.read_text(), re.MULTILINE)
    assert [name for name, _ in horovods] + ours == list(signature)
    for name, default in horovods:
        if default:
            assert eval(default, dict(vars(hvd))) == signature[name].default, name


def compatibility_rows():
    """Cells of all tables of the compatibility page."""
    lines = (ROOT / "docs" / "compatibility.md").read_text().splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("| ")]
    return [row for row in rows if row[0] not in ("feature", "---")]


def exists(name):
    """``module.case`` of tests/cases, ``test_module.test_function``, or ``module_test.Name`` of csrc/tests."""
    module, _, function = name.partition(".")
    if module.endswith("_test"):
        paths = (ROOT / "csrc" / "tests").glob(f"*/{module}.cc")
        return any(f"TEST({function})" in path.read_text() for path in paths)
    if module.startswith("test_"):
        path = ROOT / "tests" / f"{module}.py"
        return path.exists() and re.search(rf"^def {function}\(", path.read_text(), re.MULTILINE) is not None
    return (ROOT / "tests" / "cases" / f"{module}.py").exists() and function in cases_of(module)


def test_compatibility_rows_are_tested():
    rows = compatibility_rows()
    assert len(rows) > 60 and all(len(row) == 4 for row in rows)
    for feature, _, _, tests in rows:
        names = re.findall(r"`([^`]+)`", tests)
        assert names and tests == ", ".join(f"`{name}`" for name in names), feature
        assert not [name for name in names if not exists(name)], feature


def test_compatibility_words():
    """A cell starts with a word that the page explains, or says in full what both libraries do."""
    for feature, horovod, ours, _ in compatibility_rows():
        both = horovod.partition(",")[0] == ours.partition(",")[0]
        for cell in (horovod, ours):
            assert both or re.match(r"(works|differs|refused|fails|hangs)\b", cell) or cell == "run twice", feature


def test_all_cases_of_the_compatibility_module_are_in_the_page():
    page = (ROOT / "docs" / "compatibility.md").read_text()
    assert not [name for name in cases_of("compatibility") if f"`compatibility.{name}`" not in page]


def case_rows():
    """Cells of all tables of the page of cases."""
    lines = (ROOT / "docs" / "cases.md").read_text().splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("| ")]
    return [row for row in rows if row[0] not in ("case", "---")]


def test_cases_are_tested_or_say_what_they_wait_for():
    rows = case_rows()
    numbers = [int(row[0]) for row in rows]
    assert len(numbers) >= 40 and len(set(numbers)) == len(numbers)
    for number, _, reported, tests in rows:
        named, _, waits = tests.partition("waits for ")
        names = re.findall(r"`([^`]+)`", named)
        assert named.removesuffix("; ") == ", ".join(f"`{name}`" for name in names) and (names or waits), number
        assert not [name for name in names if not exists(name)], number
        assert "#" in reported or "sources" in reported, number


def test_cases_that_tests_and_sources_speak_of_are_in_the_page():
    numbers = {row[0] for row in case_rows()}
    sources = [
        path
        for folder, kind in (("tests", "*.py"), ("csrc", "*.cc"), ("csrc", "*.h"))
        for path in (ROOT / folder).rglob(kind)
    ]
    spoken = {number for path in sources for number in re.findall(r"cases\.md (\d+)", path.read_text())}
    assert spoken and spoken <= numbers, spoken - numbers


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_somewhere(path):
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", path.read_text()):
        assert target.startswith("https://") or (path.parent / target).exists(), target

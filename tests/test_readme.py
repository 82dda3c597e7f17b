"""What the documents show: the README's example runs and prints what stands there, and computed tables are computed right."""

import inspect
import re
from pathlib import Path

import pytest

import poseidon_hvd as hvd
from harness.launch import launch

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()
DOCUMENTS = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")] + sorted((ROOT / "docs").glob("*.md"))


def block(language):
    found = re.findall(rf"^```{language}\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
    assert len(found) == 1, f"{len(found)} {language} blocks in the README"
    return found[0]


def test_example_runs_and_prints_what_the_readme_shows(tmp_path):
    script = tmp_path / "readme.py"
    script.write_text(block("python"))
    output = launch(2, [str(script)], seconds=120, env={"POSEIDON_POLICY": "bytes"}).expect_success().output
    printed = [line.partition("<stdout>:")[2].rstrip() for line in output.splitlines() if line.startswith("[0]<stdout>:")]
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


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_somewhere(path):
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", path.read_text()):
        assert target.startswith("https://") or (path.parent / target).exists(), target

"""The pages "Add a ..." of CONTRIBUTING.md name files that are there, and registries that have such lines."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGE = (ROOT / "CONTRIBUTING.md").read_text()


def sections():
    found = re.findall(r"^## (Add a [^\n]+)\n(.*?)(?=^## )", PAGE, re.MULTILINE | re.DOTALL)
    return dict(found)


def paths(body):
    for cell in re.findall(r"^\| (`[^|]+) \|", body, re.MULTILINE):
        for path in re.findall(r"`([^`]+)`", cell):
            name, _, endings = path.partition("{")
            yield from [name + ending for ending in endings.rstrip("}").split(",")] if endings else [path]


def test_there_are_such_sections():
    assert {"Add a case", "Add a knob", "Add a scheme"} <= set(sections())


@pytest.mark.parametrize("title", sections())
def test_files_exist(title):
    listed = list(paths(sections()[title]))
    assert listed
    for path in listed:
        pattern = path.replace("NAME", "*").replace("MODULE", "*")
        assert list(ROOT.glob(pattern)), path


@pytest.mark.parametrize("registry", ["csrc/core/schemes/registry.cc", "csrc/torch/routes/registry.cc"])
def test_a_scheme_is_a_line_in_each_registry(registry):
    assert registry in sections()["Add a scheme"]
    own = {"csrc/core/schemes/registry.cc": "Sfb", "csrc/torch/routes/registry.cc": '"sfb"'}[registry]
    lines = [line for line in (ROOT / registry).read_text().splitlines() if own in line]
    assert len(lines) == 1, lines

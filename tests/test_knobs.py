"""One knob is one field of the configuration; the rest follows from it, or a test here says what is missing."""

import dataclasses
import importlib.util
import inspect
import re
from pathlib import Path

import pytest

import poseidon_hvd
from poseidon_hvd import _parsers as parsers
from poseidon_hvd._knobs import knob
from poseidon_hvd._native import _C
from poseidon_hvd.config import Config

ROOT = Path(__file__).resolve().parent.parent
KNOBS = Config.knobs()


def load_tool():
    spec = importlib.util.spec_from_file_location("configuration", ROOT / "tools" / "configuration.py")
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    return tool


TOOL = load_tool()


@dataclasses.dataclass(frozen=True)
class More(Config):
    """One field more."""

    colour: str = knob(
        "red",
        parse=parsers.choice("red", "green"),
        variable="POSEIDON_COLOUR",
        shown_default="`red`",
        values="`red` or `green`: of everything",
    )


# ---- What follows from the field


def test_a_new_field_is_an_argument_and_a_variable(monkeypatch):
    assert More.resolve().colour == "red"
    assert More.resolve(colour="green").colour == "green"
    monkeypatch.setenv("POSEIDON_COLOUR", "green")
    assert More.resolve().colour == "green"
    assert More.resolve().sources["colour"] == "POSEIDON_COLOUR"
    assert More.resolve(colour="red").colour == "red"


def test_a_bad_value_of_it_names_its_source(monkeypatch):
    with pytest.raises(ValueError, match=r"^colour: 'blue' is none of red, green\.$"):
        More.resolve(colour="blue")
    monkeypatch.setenv("POSEIDON_COLOUR", "blue")
    with pytest.raises(ValueError, match=r"^POSEIDON_COLOUR: 'blue' is none of red, green\.$"):
        More.resolve()
    monkeypatch.setenv("POSEIDON_COLOUR", b"\xff".decode(errors="surrogateescape"))
    with pytest.raises(ValueError, match="^POSEIDON_COLOUR: .* is not UTF-8"):
        More.resolve()


def test_ranks_compare_it_and_the_session_gets_it():
    plain = Config.resolve().in_session(["w", "b"], 0)
    more = More.resolve(colour="green").in_session(["w", "b"], 0)
    assert dict(more.options) == {**plain.options, "colour": "green"}
    assert dict(more.agreed) == {**plain.agreed, "colour": "green"}


def test_the_session_refuses_it_while_it_has_no_reader():
    options = More.resolve().in_session([], 0).options
    known = {"names": [], "params": [], "op": 0, "process_set": 0, "rank": 0, "size": 1, "tag": "", "settings": ""}
    with pytest.raises(TypeError, match=r"there is no option colour\."):
        _C.Session(None, **known, **options)
    with pytest.raises(TypeError, match=r"the option tag is missing\."):
        _C.Session(None, **{name: value for name, value in known.items() if name != "tag"})
    with pytest.raises(TypeError, match=r"the option policy cannot be made of a list\."):
        _C.Session(None, **{**known, **Config.resolve().in_session([], 0).options, "policy": []})


def test_it_has_a_row_of_the_page():
    rows = TOOL.table(More).splitlines()
    assert rows[:-1] == TOOL.table(Config).splitlines()
    assert rows[-1] == "| `colour` | `POSEIDON_COLOUR` | `red` | `red` or `green`: of everything |"


# ---- What holds of all of them


def test_the_page_has_the_table():
    page = TOOL.PAGE.read_text()
    assert page == TOOL.with_table(page, Config), "run python tools/configuration.py"


def test_arguments_are_those_of_the_factory():
    parameters = inspect.signature(poseidon_hvd.DistributedOptimizer).parameters.values()
    ours = [p.name for p in parameters if p.kind is inspect.Parameter.KEYWORD_ONLY]
    assert ours == [name for name, each in KNOBS.items() if each.argument]


def test_an_unknown_argument_is_an_error():
    for unknown in ({"polcy": "sfb"}, {"log_plans": True}):  # a typing error; a knob that is a variable only
        with pytest.raises(TypeError, match=f"no argument '{next(iter(unknown))}'"):
            Config.resolve(**unknown)


def test_shown_defaults_are_the_defaults():
    for name, each in KNOBS.items():
        text = each.shown_default.strip("`")
        if each.shown_default.startswith("`") and each.variable is not None:
            parsed = (each.parse_text or each.parse)(each.variable, text)
            assert parsed == getattr(Config(), name), name


def test_settings_apply_where_they_can():
    config = Config.resolve(uneven_steps=True, schemes={"w*": "sfb"})
    assert config.in_session(["w1", "b"], 0).options["uneven_steps"] is True
    assert config.in_session(["w1", "b"], 1).options["uneven_steps"] is False  # hvd.join() is of all ranks
    assert config.in_session(["w1", "b"], 0).options["schemes"] == ["sfb", "auto"]
    assert config.in_session(["w1", "b"], 0).agreed["schemes"] == "w1:sfb"
    assert "log_plans" not in config.in_session(["w1", "b"], 0).agreed


# ---- The list in CONTRIBUTING

# File -> the text that each knob has in it, or None where that knob has no part in the file.
MENTIONS = {
    "poseidon_hvd/config.py": lambda name, each: f"    {name}: ",
    "poseidon_hvd/distribute.py": lambda name, each: f"        {name}: " if each.argument else None,
    "csrc/torch/options.h": lambda name, each: "struct SessionOptions {" if each.option else None,
    "csrc/python/session.cc": lambda name, each: f'    {{"{name}", ' if each.option else None,
    "docs/configuration.md": lambda name, each: f"`{each.variable}` |",
}


def listed_files():
    page = (ROOT / "CONTRIBUTING.md").read_text()
    section = re.search(r"^## Add a knob\n(.*?)(?=^## |\Z)", page, re.MULTILINE | re.DOTALL)
    return re.findall(r"^\| `([\w./]+)` \|", section.group(1), re.MULTILINE)


def test_the_list_names_the_files_of_a_knob():
    assert listed_files() == list(MENTIONS)


@pytest.mark.parametrize("file", list(MENTIONS))
def test_listed_files_mention_every_knob(file):
    text = (ROOT / file).read_text()
    for name, each in KNOBS.items():
        mention = MENTIONS[file](name, each)
        assert mention is None or mention in text, f"{file} lacks {mention!r} of the knob {name}"


def test_the_extension_reads_what_the_configuration_gives():
    assert {name for name, each in KNOBS.items() if each.option} <= set(_C.Session.option_names())

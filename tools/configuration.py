"""Writes the table of knobs in docs/configuration.md from poseidon_hvd/config.py: ``python tools/configuration.py``."""

from pathlib import Path

from poseidon_hvd._knobs import Knobs
from poseidon_hvd.config import Config

PAGE = Path(__file__).resolve().parent.parent / "docs" / "configuration.md"

BEGIN = "<!-- begin: tools/configuration.py -->\n"
END = "<!-- end -->\n"
HEADER = ("argument", "variable", "default", "values")


def table(settings: type[Knobs]) -> str:
    lines = [HEADER, ("---",) * len(HEADER)]
    for name, knob in settings.knobs().items():
        argument = f"`{name}`" if knob.argument else ""
        variable = f"`{knob.variable}`" if knob.variable else ""
        lines.append((argument, variable, knob.shown_default, knob.values))
    return "".join("|" + "|".join(f" {cell} " if cell else " " for cell in cells) + "|\n" for cells in lines)


def with_table(page: str, settings: type[Knobs]) -> str:
    """The page with the table in its place."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    assert rest and after, f"{PAGE.name} lacks the lines {BEGIN.strip()} and {END.strip()}"
    return before + BEGIN + "\n" + table(settings) + "\n" + END + after


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text(), Config))

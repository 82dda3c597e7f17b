"""Pictures of results, drawn without a display."""

import pathlib
from typing import List, Mapping, Optional, Sequence

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402

# Distinct also in grey; ours stands out, what has no network is pale.
COLORS = {"none": "#c8ccd0", "horovod": "#8296aa", "ddp": "#5f7186", "ddp-powersgd": "#b9a58c"}
OURS = "#d4581f"


def color_of(system: str) -> str:
    """The same colour for a system in every picture."""
    return COLORS.get(system, OURS)


def bar_panels(path: pathlib.Path, title: str, panels: Sequence["Panel"], footnote: str = "") -> pathlib.Path:
    """Panels side by side, a horizontal bar for each system.

    Args:
        path: of the PNG.
        title: above all panels.
        panels: what to draw; the first one names the systems.
        footnote: small, under the panels.
    """
    longest = max(len(panel.values) for panel in panels)
    figure, axes = plt.subplots(1, len(panels), figsize=(4.6 * len(panels), 1.5 + 0.5 * longest), squeeze=False, layout="constrained")
    for axis, panel in zip(axes[0], panels):
        panel.draw(axis, named=axis is axes[0][0])
    figure.suptitle(title, fontsize=11)
    if footnote:
        figure.supxlabel(footnote, fontsize=7.5, color="#555555")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    plt.close(figure)
    return path


class Panel:
    """One quantity of several systems.

    Args:
        label: of the axis, with the unit.
        values: system -> value; None where there is none.
        spread: system -> (low, high), drawn as an error bar.
        notes: system -> text behind the bar, instead of the value.
    """

    def __init__(self, label: str, values: Mapping[str, Optional[float]], *, spread: Mapping[str, Sequence[float]] = {},
                 notes: Mapping[str, str] = {}):
        self.label = label
        self.values = dict(values)
        self.spread = dict(spread)
        self.notes = dict(notes)

    def draw(self, axis, *, named: bool) -> None:
        systems: List[str] = list(self.values)
        lengths = [self.values[s] or 0.0 for s in systems]
        places = range(len(systems))
        axis.barh(places, lengths, color=[color_of(s) for s in systems], height=0.65)
        ends = list(lengths)
        for place, system in enumerate(systems):
            if system in self.spread:
                low, high = self.spread[system]
                axis.plot([low, high], [place, place], color="black", linewidth=1.2, solid_capstyle="butt")
                ends[place] = max(ends[place], high)
        reach = max(ends) or 1.0
        for place, system in enumerate(systems):
            text = self.notes.get(system, "-" if self.values[system] is None else f"{self.values[system]:.3g}")
            axis.text(ends[place] + 0.02 * reach, place, text, va="center", fontsize=8.5)
        axis.set_xlim(0, 1.38 * reach)
        axis.set_yticks(list(places), systems if named else [""] * len(systems))
        axis.invert_yaxis()
        axis.set_xlabel(self.label, fontsize=9)
        axis.tick_params(axis="y", length=0)
        axis.tick_params(axis="x", labelsize=8)
        for side in ("top", "right"):
            axis.spines[side].set_visible(False)

"""Pictures of results, drawn without a display."""

import pathlib
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any, Optional

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402

# Distinct also in grey; ours stands out, what has no network is pale.
COLORS = {
    "none": "#c8ccd0",
    "horovod": "#8296aa",
    "horovod-sparse": "#9fb3a4",
    "ddp": "#5f7186",
    "ddp-powersgd": "#b9a58c",
}
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
    figure, axes = plt.subplots(
        1, len(panels), figsize=(4.6 * len(panels), 1.5 + 0.5 * longest), squeeze=False, layout="constrained"
    )
    for axis, panel in zip(axes[0], panels):
        panel.draw(axis, named=axis is axes[0][0])
    return _save(figure, path, title, footnote)


def _save(figure, path: pathlib.Path, title: str, footnote: str) -> pathlib.Path:
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

    def __init__(
        self,
        label: str,
        values: Mapping[str, Optional[float]],
        *,
        spread: Mapping[str, Sequence[float]] = {},
        notes: Mapping[str, str] = {},
    ):
        self.label = label
        self.values = dict(values)
        self.spread = dict(spread)
        self.notes = dict(notes)

    def draw(self, axis, *, named: bool) -> None:
        systems: list[str] = list(self.values)
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


Place = tuple[Any, Any]  # (y, x)


class HeatMap:
    """Ratios over two axes, some with a letter.

    Args:
        title: above the map.
        values: place -> log2 of a ratio.
        marks: place -> letter.
        framed: places to look at.
        absent: places for which there cannot be a value, as opposed to those nobody asked for.
    """

    def __init__(
        self,
        title: str,
        *,
        values: Mapping[Place, float],
        marks: Mapping[Place, str],
        framed: AbstractSet[Place],
        absent: AbstractSet[Place],
    ):
        self.title = title
        self.values = dict(values)
        self.marks = dict(marks)
        self.framed = set(framed)
        self.absent = set(absent)

    def draw(self, axis, ys: Sequence[Any], xs: Sequence[Any], reach: float):
        grid = [[self.values.get((y, x), float("nan")) for x in xs] for y in ys]
        image = axis.imshow(grid, cmap="RdBu", vmin=-reach, vmax=reach, aspect="auto", origin="lower")
        for row, y in enumerate(ys):
            for column, x in enumerate(xs):
                at = y, x
                if at in self.absent:
                    axis.add_patch(
                        plt.Rectangle((column - 0.5, row - 0.5), 1, 1, facecolor="#e4e4e4", edgecolor="none")
                    )
                if at in self.marks:
                    dark = abs(self.values[at]) > 0.6 * reach
                    axis.text(
                        column,
                        row,
                        self.marks[at],
                        ha="center",
                        va="center",
                        fontsize=7.5,
                        color="white" if dark else "black",
                    )
                if at in self.framed:
                    axis.add_patch(
                        plt.Rectangle(
                            (column - 0.44, row - 0.44), 0.88, 0.88, fill=False, edgecolor="black", linewidth=1.6
                        )
                    )
        axis.set_title(self.title, fontsize=9)
        axis.set_xticks(range(len(xs)), xs, fontsize=7.5)
        axis.set_yticks(range(len(ys)), ys, fontsize=7.5)
        axis.tick_params(length=0)
        return image


def heat_maps(
    path: pathlib.Path,
    title: str,
    maps: Sequence[Sequence[HeatMap]],
    *,
    ys: Sequence[Any],
    xs: Sequence[Any],
    label: str,
    xlabel: str,
    footnote: str = "",
) -> pathlib.Path:
    """Maps in rows and columns with the same axes and colours; a ratio of 1 is white.

    Args:
        path: of the PNG.
        title: above all maps.
        maps: rows of maps.
        ys: places on the vertical axis, from below.
        xs: places on the horizontal axis.
        label: what the ratio is.
        xlabel: what the horizontal axis is.
        footnote: small, under the maps.
    """
    size = max(7.5, 1.2 + 2.6 * len(maps[0])), 1.2 + (0.6 + 0.2 * len(ys)) * len(maps)
    figure, axes = plt.subplots(
        len(maps), len(maps[0]), figsize=size, sharex=True, sharey=True, squeeze=False, layout="constrained"
    )
    values = [abs(value) for row in maps for each in row for value in each.values.values()]
    reach = min(max([1.0, *values]), 5.0)  # beyond 32 times the colour says enough
    for row, line in zip(axes, maps):
        for axis, each in zip(row, line):
            image = each.draw(axis, ys, xs, reach)
    for axis in axes[-1]:
        axis.set_xlabel(xlabel, fontsize=8)
    ticks = range(-int(reach), int(reach) + 1)
    bar = figure.colorbar(image, ax=axes, shrink=0.8, ticks=list(ticks))
    bar.ax.set_yticklabels([f"{2**tick}" if tick >= 0 else f"1/{2**-tick}" for tick in ticks], fontsize=7.5)
    bar.set_label(label, fontsize=8)
    return _save(figure, path, title, footnote)

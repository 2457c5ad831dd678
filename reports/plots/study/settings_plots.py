"""Figures of the trials of a study over their settings; each takes a frame and returns a `Figure`."""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from reports.document import Size
from reports.plots.figure import MARGIN_NAMES, MARGIN_RIGHT, PALETTE, label_axis, new_figure, styled, tick_number
from reports.plots.hovers import add_hovers
from reports.plots.series_names import name_rows
from reports.plots.study.outcome_marks import draw_outcomes, name_outcomes
from reports.plots.study.setting_axis import (
    Array,
    ends_of,
    is_choice,
    left_margin,
    padded_limits,
    places_of,
    setting_axis,
    shorten,
    unit_places,
)
from reports.plots.study.spread_marks import side_by_side, spread_places
from reports.study import Knob


def settings_map(frame: pd.DataFrame, x: Knob, y: Knob, size: Size) -> Figure:
    """Every trial by two of its settings, marked by its outcome. frame: x, y, outcome, number, text.

    Trials with the same two choices lie side by side in their cell, with their numbers if there is room.
    """
    with styled():
        figure, [axes] = new_figure(size, gridspec_kw=left_margin(y, size))
        setting_axis(axes, "x", x, frame["x"], size)
        setting_axis(axes, "y", y, frame["y"], size)
        at_x, at_y = _spread(axes, x, y, frame, size)
        _limit_axes(axes, (x, y), (frame["x"], frame["y"]), (at_x, at_y))
        at_x = _beside(axes, at_x, at_y, np.full(len(frame), MARK_PIXELS / 2))
        draw_outcomes(axes, frame.assign(x=at_x, y=at_y), "x", "y")
        if is_choice(x, frame["x"]) and is_choice(y, frame["y"]):
            _number_marks(axes, at_x, at_y, frame["number"])
        axes.set_xlabel(x.name)
        label_axis(axes, y.name)
        name_outcomes(axes, frame, size)
        return figure


def _spread(axes: Axes, x: Knob, y: Knob, frame: pd.DataFrame, size: Size) -> tuple[Array, Array]:
    """The places of marks, and lines between the cells of choices in place of lines through their middle."""
    choices = is_choice(x, frame["x"]), is_choice(y, frame["y"])
    box, counts = axes.get_position(), [len(axes.get_xticks()), len(axes.get_yticks())]
    for is_drawn, count, line in zip(choices, counts, (axes.axvline, axes.axhline), strict=True):
        for level in range(1, count if is_drawn else 0):
            line(level - 0.5, color=PALETTE["grid"], linewidth=0.8, zorder=0)
    if choices[1]:
        axes.grid(visible=False, axis="y")
    shape = (box.width * size.width / counts[0]) / (box.height * size.height / counts[1])
    return spread_places(places_of(x, frame["x"]), places_of(y, frame["y"]), choices, shape)


def _limit_axes(
    axes: Axes, knobs: tuple[Knob, Knob], columns: "tuple[pd.Series[Any], pd.Series[Any]]", places: tuple[Array, Array]
) -> None:
    """Limits with a margin on the axes of numbers; those of choices have theirs."""
    x, y = (padded_limits(knob, own) for knob, own in zip(knobs, places, strict=True))
    if not is_choice(knobs[0], columns[0]):
        axes.set_xlim(x)
    if not is_choice(knobs[1], columns[1]):
        axes.set_ylim(y)


MARK_PIXELS, RING_PIXELS = 10.0, 18.0
"""Width of a mark, and of the ring around the winner, with the space around them."""
MAX_MOVED_MARKS = 3
"""Longest move of a mark in widths of a mark, if the next value of its setting is near."""


def _beside(axes: Axes, x: Array, y: Array, radius: Array) -> Array:
    """The x of marks, of which those that would touch lie side by side, nearer to their own value than to the next."""
    pixels = np.asarray(axes.transData.transform(np.column_stack((x, y))), dtype=np.float64)
    levels = np.unique(pixels[:, 0].round())
    gap = float(np.diff(levels).min()) if len(levels) > 1 else axes.bbox.width / 2
    moved = side_by_side(pixels, radius, max(MAX_MOVED_MARKS * MARK_PIXELS, 0.45 * gap))
    found: Array = axes.transData.inverted().transform(moved)[:, 0]
    return found


MIN_NUMBER_PIXELS = 26
"""Smallest distance between two marks in pixels with room for the number of a trial."""


def _number_marks(axes: Axes, x: Array, y: Array, numbers: "pd.Series[int]") -> None:
    """Write the number of each trial at the right of its mark, if the marks are far enough from each other."""
    places = axes.transData.transform(np.column_stack((x, y)))
    if not _have_room(places):
        return
    for left, low, number in zip(x, y, numbers, strict=True):
        axes.annotate(
            f"{number}",
            (left, low),
            xytext=(4.5, 0),
            textcoords="offset points",
            va="center",
            color=PALETTE["muted"],
            fontsize=7.0,
        )


def _have_room(places: Array) -> bool:
    """Whether no two places, [marks, 2] in pixels, are too close in one line of text."""
    for index, (left, low) in enumerate(places):
        near = np.abs(places[index + 1 :, 1] - low) < MIN_NUMBER_PIXELS / 2
        if (np.abs(places[index + 1 :, 0] - left)[near] < MIN_NUMBER_PIXELS).any():
            return False
    return True


def contour(frame: pd.DataFrame, x: Knob, y: Knob, size: Size) -> Figure:
    """The objective over two settings: a dot per trial, larger for a higher value, and contour lines.

    frame: x, y, value, text.

    Contour lines are drawn only for two numeric settings: a choice has no intermediate values.
    """
    with styled():
        figure, [axes] = new_figure(size, gridspec_kw=left_margin(y, size))
        setting_axis(axes, "x", x, frame["x"], size)
        setting_axis(axes, "y", y, frame["y"], size)
        (at_x, at_y), value = _spread(axes, x, y, frame, size), np.asarray(frame["value"], dtype=float)
        if "category" not in (x.scale, y.scale) and _spans_a_plane(at_x, at_y) and np.ptp(value) > 0:
            lines = axes.tricontour(
                at_x, at_y, value, levels=3 if size.is_narrow else 6, colors=[PALETTE["series-0"]], linewidths=0.9
            )
            axes.clabel(lines, fmt=lambda level: tick_number(float(f"{level:.3g}")), fontsize=7.5)
        fraction = (value - value.min()) / (np.ptp(value) or 1.0)
        axes.scatter(at_x, at_y, s=18 + 60 * fraction, color=PALETTE["series-0"], alpha=0.55, linewidths=0)
        add_hovers(axes, at_x, at_y, frame["text"])
        # `tricontour` sets limits without a margin.
        _limit_axes(axes, (x, y), (frame["x"], frame["y"]), (at_x, at_y))
        axes.set_xlabel(x.name)
        label_axis(axes, y.name)
        return figure


def _spans_a_plane(x: Array, y: Array) -> bool:
    places = np.unique(np.column_stack((x, y)), axis=0)
    return len(places) >= 6 and int(np.linalg.matrix_rank(places - places[0])) == 2


def slice_of(frame: pd.DataFrame, knob: Knob, quantity: str, size: Size) -> Figure:
    """The objective against one setting, a mark per trial; marks that would touch lie side by side.

    frame: setting, value, outcome, is_winner, text.
    """
    with styled():
        figure, [axes] = new_figure(size)
        setting_axis(axes, "x", knob, frame["setting"], size)
        at, values = places_of(knob, frame["setting"]), frame["value"].to_numpy(dtype=np.float64)
        if not is_choice(knob, frame["setting"]):
            axes.set_xlim(padded_limits(knob, at, 0.12))
        margin = 0.15 * float(np.ptp(values)) or 0.1 * abs(float(values[0])) or 1.0
        axes.set_ylim(float(values.min()) - margin, float(values.max()) + margin)
        radius = np.where(frame["is_winner"], RING_PIXELS, MARK_PIXELS) / 2
        places = frame.assign(x=_beside(axes, at, values, radius))
        draw_outcomes(axes, places, "x", "value")
        winner = places[places["is_winner"]]
        axes.plot(
            winner["x"], winner["value"], "o", markersize=12, markerfacecolor="none", markeredgecolor=PALETTE["ink"]
        )
        axes.set_xlabel(knob.name)
        axes.yaxis.set_major_formatter(FuncFormatter(tick_number))
        axes.yaxis.set_major_locator(MaxNLocator(5))
        label_axis(axes, quantity)
        name_outcomes(axes, frame, size)
        return figure


def parallel_coordinates(frame: pd.DataFrame, knobs: Sequence[Knob], quantity: str, size: Size) -> Figure:
    """A line per trial through its settings to its objective; better trials are darker, the winner is bold.

    frame: a column per setting, named as its knob; value, is_winner, rank (0 is the worst trial, 1 the best), text.
    """
    with styled():
        bottom = (MARGIN_NAMES if size.is_narrow else 84) / size.height
        left = 24 if size.is_narrow else 96
        figure, [axes] = new_figure(size, gridspec_kw={"bottom": bottom, "left": left / size.width})
        columns = [unit_places(knob, frame[knob.name]) for knob in knobs]
        value = np.asarray(frame["value"], dtype=float)
        columns.append((value - value.min()) / (np.ptp(value) or 1.0))
        lines = np.column_stack(columns)
        for row, (rank, is_winner) in enumerate(zip(frame["rank"], frame["is_winner"], strict=True)):
            colour = PALETTE["ink"] if is_winner else PALETTE["series-0"]
            width, alpha = (2.4, 1.0) if is_winner else (1.2, 0.12 + 0.6 * float(rank))
            axes.plot(range(lines.shape[1]), lines[row], color=colour, alpha=alpha, linewidth=width)
        for place in range(lines.shape[1]):
            marks = _texts_by_height(lines[:, place], frame["text"])
            add_hovers(axes, [place] * len(marks), list(marks), list(marks.values()))
        names = [*(knob.name for knob in knobs), quantity]
        axes.set_xticks(range(len(names)), [shorten(name, 22) for name in names], rotation=90 if size.is_narrow else 20)
        for label in axes.get_xticklabels():
            label.set_horizontalalignment("center" if size.is_narrow else "right")
        axes.set_yticks([])
        axes.grid(visible=True, axis="x")
        axes.set_ylim(-0.09, 1.09)
        for place, (low, high) in enumerate([*(ends_of(knob, frame[knob.name]) for knob in knobs), _value_ends(value)]):
            for text, y, side in ((low, -0.02, "top"), (high, 1.02, "bottom")):
                axes.text(place, y, shorten(text, 10), ha="center", va=side, color=PALETTE["muted"], fontsize=7.5)
        return figure


MAX_TEXTS = 8
"""Largest number of launches in the text over one point of parallel coordinates."""


def _texts_by_height(heights: Array, texts: Iterable[str]) -> dict[float, str]:
    """One text for each height of an axis: the texts of all lines that pass it; empty without texts."""
    found: dict[float, list[str]] = {}
    for height, text in zip(heights.round(3).tolist(), texts, strict=True):
        found.setdefault(height, []).extend([text] if text else [])
    return {
        height: "\n".join(
            [*each[:MAX_TEXTS], *([f"and {len(each) - MAX_TEXTS} more"] if len(each) > MAX_TEXTS else [])]
        )
        for height, each in found.items()
    }


def bars(frame: pd.DataFrame, quantity: str, size: Size) -> Figure:
    """A bar per name, with its interval unless that is NaN. frame: name, value, lo, hi (in percent)."""
    with styled():
        left = MARGIN_RIGHT if size.is_narrow else MARGIN_NAMES + 20
        figure, [axes] = new_figure(size, gridspec_kw={"left": left / size.width})
        rows = frame.iloc[::-1].reset_index(drop=True)
        axes.barh(rows.index, rows["value"], height=0.45, color=PALETTE["series-0"], alpha=0.75, linewidth=0)
        for row, lo, hi in zip(rows.index, rows["lo"], rows["hi"], strict=True):
            if lo == lo and hi == hi:
                axes.plot([lo, hi], [row, row], color=PALETTE["ink"], linewidth=1.4)
        add_hovers(
            axes,
            rows["value"],
            rows.index,
            [f"{name}: {value:.1f} %" for name, value in zip(rows["name"], rows["value"], strict=True)],
        )
        name_rows(axes, [shorten(str(name), 40 if size.is_narrow else 25) for name in rows["name"]], size)
        axes.grid(visible=False, axis="y")
        axes.grid(visible=True, axis="x")
        axes.axvline(0, color=PALETTE["muted"], linewidth=0.8)
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g} %"))
        axes.xaxis.set_major_locator(MaxNLocator(5))
        axes.set_xlabel(quantity)
        return figure


def _value_ends(value: Array) -> tuple[str, str]:
    low, high = (tick_number(float(f"{end:.3g}")) for end in (value.min(), value.max()))
    return low, high

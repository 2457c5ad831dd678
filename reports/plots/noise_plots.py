"""Figures of noise and of a history: runs around their median, effects by pairs, the level of a metric by commit."""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from reports.document import Size, format_number
from reports.plots.comparison_plots import signed_percent
from reports.plots.figure import (
    MARGIN_NAMES,
    MARGIN_RIGHT,
    PALETTE,
    axis_from_zero,
    label_axis,
    new_figure,
    series_colour,
    styled,
    tick_number,
)
from reports.plots.hovers import add_hovers
from reports.plots.series_names import name_rows, name_series

# Of seven characters each; more of them overlap.
MOST_COMMIT_LABELS, COMMIT_CHARACTERS = 6, 7


def run_dots(frame: pd.DataFrame, size: Size) -> Figure:
    """Each run's deviation from the median in percent, a row per metric. frame: metric, run, change."""
    with styled():
        left = MARGIN_RIGHT if size.is_narrow else MARGIN_NAMES
        figure, [axes] = new_figure(size, gridspec_kw={"left": left / size.width})
        names = list(dict.fromkeys(frame["metric"]))[::-1]
        axes.axvline(0, color=PALETTE["muted"], linewidth=0.8)
        for row, name in enumerate(names):
            rows = frame[frame["metric"] == name]
            places = row + (np.linspace(-0.14, 0.14, len(rows)) if len(rows) > 1 else np.zeros(1))
            axes.scatter(rows["change"], places, c=PALETTE["series-0"], s=20, linewidths=0, alpha=0.8)
            texts = [
                f"{name}, run {run}: {signed_percent(change)} %"
                for run, change in zip(rows["run"], rows["change"], strict=True)
            ]
            add_hovers(axes, rows["change"], places, texts)
        name_rows(axes, names, size)
        reach = 1.1 * float(frame["change"].abs().max()) or 1.0
        axes.set_xlim(-reach, reach)
        axes.grid(visible=False, axis="y")
        axes.grid(visible=True, axis="x")
        axes.xaxis.set_major_locator(MaxNLocator(5, symmetric=True))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: signed_percent(value)))
        axes.set_xlabel("difference from the median of the runs, %")
        return figure


def effects_by_pairs(frame: pd.DataFrame, bound: float, size: Size) -> Figure:
    """The regression that pairs find, a line per metric; a dashed line is the smallest effect of interest.

    frame: metric, pairs, effect (percent).
    """
    with styled():
        figure, [axes] = new_figure(size)
        names = list(dict.fromkeys(frame["metric"]))
        for index, name in enumerate(names):
            rows = frame[frame["metric"] == name]
            axes.plot(rows["pairs"], rows["effect"], "o-", color=series_colour(index), markersize=4)
            texts = [
                f"{name}: {pairs:g} pairs find {format_number(effect)} %"
                for pairs, effect in zip(rows["pairs"], rows["effect"], strict=True)
            ]
            add_hovers(axes, rows["pairs"], rows["effect"], texts)
        axes.axhline(bound, color=PALETTE["muted"], linewidth=0.9, linestyle=(0, (4, 3)))
        axis_from_zero(axes, max(float(frame["effect"].max()), bound), headroom=0.05)
        axes.set_xticks(sorted(frame["pairs"].unique()))
        axes.set_xlabel("pairs of runs")
        name_series(axes, names, size)
        label_axis(axes, "%  ↓ better")
        return figure


def level_by_commit(
    labels: Sequence[str], values: Sequence[float], changes: Sequence[tuple[int, bool]], title: str, size: Size
) -> Figure:
    """A metric by commit in the order of the table, the mean of each level, and a line at each change.

    changes: the place of the first commit of a new level, and whether it is worse.
    """
    with styled():
        figure, [axes] = new_figure(size)
        places = np.arange(len(values))
        known = np.asarray(values, dtype=float)
        axes.plot(places, known, "o", color=PALETTE["series-0"], markersize=4)
        ends = [0, *(place for place, _ in changes), len(known)]
        for start, end in pairwise(ends):
            level = float(np.mean(known[start:end]))
            axes.plot([start - 0.4, end - 0.6], [level, level], color=PALETTE["ink"], linewidth=1.4)
        for place, is_worse in changes:
            axes.axvline(place - 0.5, color=PALETTE["bad" if is_worse else "good"], linewidth=1.2)
        texts = [f"{label}: {format_number(float(value))}" for label, value in zip(labels, known, strict=True)]
        add_hovers(axes, places, known, texts)
        step = max(1, -(-len(labels) // (MOST_COMMIT_LABELS // (2 if size.is_narrow else 1))))
        axes.set_xticks(places[::step], [label[:COMMIT_CHARACTERS] for label in labels[::step]])
        axes.set_xlim(-0.6, len(known) - 0.4)
        axes.margins(y=0.15)
        axes.yaxis.set_major_locator(MaxNLocator(5))
        axes.yaxis.set_major_formatter(FuncFormatter(tick_number))
        axes.set_xlabel("commit, in the order of the table")
        label_axis(axes, title)
        return figure

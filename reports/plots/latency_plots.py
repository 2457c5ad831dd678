"""Figures of the latencies of requests: their distribution, against a length, and over time."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

from reports.document import Size, format_number
from reports.plots.figure import PALETTE, label_axis, new_figure, series_colour, styled, tick_number
from reports.plots.hovers import add_hovers
from reports.plots.series_names import name_series

MAX_POINTS = 700
"""Dots per run in a figure of full width."""
TITLE_PIXELS, LABEL_PIXELS = 118, 96
"""Widths of the axis title and of the label of a percentile."""
MARKED_PERCENTILES = (50.0, 95.0, 99.0)
"""Percentiles with a dot, and with a label in a figure of one run."""
HOVERED_PERCENTILES = (1.0, *(float(each) for each in range(5, 96, 5)), 99.0)
"""Percentiles whose value is shown while the pointer is over the curve."""


class _RunSeries(NamedTuple):
    """One run of a figure: `rows` are those of the frame with this `label`."""

    label: str
    colour: str
    rows: pd.DataFrame


def _named_runs(axes: Axes, frame: pd.DataFrame, size: Size) -> list[_RunSeries]:
    """The runs of the frame in their order, with their names above the axes."""
    groups = enumerate(frame.groupby("run", sort=False))
    runs = [_RunSeries(str(label), series_colour(index), rows) for index, (label, rows) in groups]
    name_series(axes, [run.label for run in runs], size)
    return runs


def distribution(frame: pd.DataFrame, quantity: str, size: Size) -> Figure:
    """The fraction of values at or below x, x in milliseconds, with labelled percentiles.

    frame: run, fraction, value_ms, values in ascending order within a run.
    """
    with styled():
        figure, [axes] = new_figure(size)
        runs = _named_runs(axes, frame, size)
        for label, colour, rows in runs:
            axes.plot(rows["value_ms"], rows["fraction"], color=colour, drawstyle="steps-post")
            _hover_percentiles(axes, rows, f"{label}, " if len(runs) > 1 else "")
            marked = _percentiles(rows, MARKED_PERCENTILES)
            for percentile, value in zip(MARKED_PERCENTILES, marked, strict=True):
                axes.plot([value], [percentile / 100], "o", color=colour, markersize=4.5)
        scale = value_axis(axes, frame["value_ms"])
        if len(runs) == 1:
            _label_percentiles(axes, runs[0].rows)
        axes.set_xlabel(f"{quantity}, ms{scale}   ← better")
        axes.set_ylim(0, 1.02)
        axes.yaxis.set_major_formatter(FuncFormatter(lambda fraction, _: f"{100 * fraction:.0f} %"))
        label_axis(axes, "fraction at or below")
        return figure


def _percentiles(rows: pd.DataFrame, percentiles: Sequence[float]) -> list[float]:
    """The value at each percentile of a distribution, in ms."""
    fractions = np.array(percentiles) / 100
    return [float(value) for value in np.interp(fractions, rows["fraction"], rows["value_ms"])]


def _hover_percentiles(axes: Axes, rows: pd.DataFrame, prefix: str) -> None:
    values = _percentiles(rows, HOVERED_PERCENTILES)
    texts = [
        f"{prefix}p{percentile:g}: {format_number(value)} ms"
        for percentile, value in zip(HOVERED_PERCENTILES, values, strict=True)
    ]
    add_hovers(axes, values, np.array(HOVERED_PERCENTILES) / 100, texts)


def _label_percentiles(axes: Axes, rows: pd.DataFrame) -> None:
    """Label each marked percentile: right of its dot and below the curve, or left of it where the right has no room.

    The label of p99 is above the curve: left of its dot if the title of the axis leaves the room, else right of it.
    """
    title_end = (TITLE_PIXELS + LABEL_PIXELS) / axes.get_window_extent().width
    for percentile, value in zip(MARKED_PERCENTILES, _percentiles(rows, MARKED_PERCENTILES), strict=True):
        x, _ = axes.transAxes.inverted().transform(axes.transData.transform((value, percentile / 100)))
        is_left = x >= (title_end if percentile > 95 else 0.62)
        axes.annotate(
            f"p{percentile:g}  {format_number(value)} ms",
            (value, percentile / 100),
            xytext=(-9 if is_left else 9, 8 if percentile > 95 else -4 if is_left else -12),
            textcoords="offset points",
            ha="right" if is_left else "left",
            color=PALETTE["ink"],
        )


def value_axis(axes: Axes, values: "pd.Series[float]") -> str:
    """Set up an x axis with plain numbers, logarithmic if the values span more than a factor of four.

    Returns the suffix of the axis title.
    """
    low, high = float(values.quantile(0.001)), float(values.max())
    axes.xaxis.set_major_formatter(FuncFormatter(tick_number))
    if high <= 4 * low:
        pad = 0.06 * (high - low) or 0.5 * high
        axes.set_xlim(low - pad, high + pad)
        axes.xaxis.set_major_locator(MaxNLocator(5))
        return ""
    axes.set_xscale("log")
    axes.set_xlim(low / 1.12, high * 1.25)
    axes.xaxis.set_major_locator(LogLocator(10, subs=(1.0,) if high > 200 * low else (1.0, 2.0, 5.0)))
    axes.xaxis.set_major_formatter(FuncFormatter(tick_number))
    axes.xaxis.set_minor_formatter(NullFormatter())
    return " (log scale)"


def against_length(frame: pd.DataFrame, quantity: str, length: str, size: Size) -> Figure:
    """A latency against a number of tokens: one dot per request, and the medians of ten length groups.

    frame: run, tokens, value_ms. Every n-th request is drawn if a run has more than MAX_POINTS.
    """
    with styled():
        figure, [axes] = new_figure(size)
        runs = _named_runs(axes, frame, size)
        for _, colour, rows in runs:
            shown = _even_selection(rows, size)
            _draw_requests(axes, shown["tokens"], shown["value_ms"], colour, alpha=0.28)
            _hover_requests(axes, shown, "tokens", "{:.0f} tokens", size)
            medians = _binned_medians(rows)
            axes.plot(medians["tokens"], medians["value_ms"], color=colour, linewidth=2.0)
            if len(runs) == 1 and len(medians):
                last = medians.iloc[-1]
                axes.annotate(
                    "median",
                    (float(last["tokens"]), float(last["value_ms"])),
                    xytext=(-2, 9),
                    textcoords="offset points",
                    ha="right",
                    color=colour,
                    fontweight="bold",
                )
        _cap_outliers(axes, frame["value_ms"])
        axes.set_xlim(left=0)
        axes.set_xlabel(f"{length}, tokens")
        axes.xaxis.set_major_formatter(FuncFormatter(tick_number))
        axes.xaxis.set_major_locator(MaxNLocator(4 if size.is_narrow else 7))
        label_axis(axes, f"{quantity}, ms  ↓ better")
        return figure


def _even_selection(rows: pd.DataFrame, size: Size) -> pd.DataFrame:
    """Every n-th row, about MAX_POINTS of them, or half as many in a narrow figure."""
    max_points = MAX_POINTS // 2 if size.is_narrow else MAX_POINTS
    return rows.iloc[:: max(1, len(rows) // max_points)]


def _draw_requests(
    axes: Axes, x: "pd.Series[float]", values_ms: "pd.Series[float]", colour: str, *, alpha: float
) -> None:
    axes.plot(x, values_ms, "o", color=colour, markersize=2.6, alpha=alpha, markeredgewidth=0)


def _hover_requests(axes: Axes, shown: pd.DataFrame, column: str, place: str, size: Size) -> None:
    """Show the values of each dot. A narrow figure has no texts: its dots are too dense, and a phone has no pointer."""
    if size.is_narrow:
        return
    texts = [
        f"{place.format(x)}: {format_number(float(value))} ms"
        for x, value in zip(shown[column], shown["value_ms"], strict=True)
    ]
    add_hovers(axes, shown[column], shown["value_ms"], texts)


def _binned_medians(rows: pd.DataFrame) -> pd.DataFrame:
    """The medians of up to ten length groups of equal size; empty if there is only one group."""
    bins = pd.qcut(rows["tokens"], 10, duplicates="drop") if rows["tokens"].nunique() > 1 else rows["tokens"]
    medians = rows.groupby(bins, observed=True)[["tokens", "value_ms"]].median()
    return medians if len(medians) > 1 else medians.iloc[:0]


def _cap_outliers(axes: Axes, values: "pd.Series[float]") -> None:
    """Limit the axis a little above the 99.5th percentile, and label the number of values above."""
    top = float(values.quantile(0.995)) * 1.25 if len(values) else 1.0
    above = int((values > top).sum())
    axes.set_ylim(0, top if top > 0 else 1.0)
    axes.yaxis.set_major_locator(MaxNLocator(5))
    axes.yaxis.set_major_formatter(FuncFormatter(tick_number))
    if above:
        text = f"{above} above {format_number(top)} ms"
        axes.text(0.01, 0.98, text, transform=axes.transAxes, va="top", color=PALETTE["muted"])


def over_time(frame: pd.DataFrame, quantity: str, windows: Sequence[tuple[float, float]], size: Size) -> Figure:
    """A latency of each request by its start, to show drift and bursts.

    frame: run, t_s (seconds since the run's start), value_ms.
    windows: the start and end of each run's measured phase, in the same seconds; the rest is shaded.
    """
    with styled():
        figure, [axes] = new_figure(size)
        for _, colour, rows in _named_runs(axes, frame, size):
            shown = _even_selection(rows, size)
            _draw_requests(axes, shown["t_s"], shown["value_ms"], colour, alpha=0.4)
            _hover_requests(axes, shown, "t_s", "{:.1f} s", size)
        _cap_outliers(axes, frame["value_ms"])
        start, end = min(first for first, _ in windows), max(last for _, last in windows)
        last = float(frame["t_s"].max()) or 1.0
        for left, right in ((0.0, min(start, last)), (end, last)):
            if right > left:
                axes.axvspan(left, right, color=PALETTE["shade"], linewidth=0, zorder=0)
        axes.set_xlim(0, last)
        axes.set_xlabel("start of the request, seconds since the run's start")
        label_axis(axes, f"{quantity}, ms  ↓ better")
        return figure

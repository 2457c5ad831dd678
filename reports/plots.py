"""Figures: one function each, frame in, `Figure` out. Nothing here saves or reads a run.

Colours are those of `PALETTE`, each unique, so that a renderer can replace them for another theme.
"""

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import matplotlib as mpl
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

from reports.document import format_number


@dataclass(frozen=True, slots=True)
class Size:
    """Width and height of a figure in CSS pixels at its natural scale."""

    width: int
    height: int
    is_narrow: bool = False


WIDE = Size(960, 380)
HALF = Size(560, 340)
NARROW = Size(360, 330, is_narrow=True)

PALETTE = MappingProxyType(
    {
        "ink": "#1c2128",
        "muted": "#5d6770",
        "grid": "#e3e6e9",
        "shade": "#eef0f2",
        "series-0": "#2563c9",
        "series-1": "#bd4b15",
        "series-2": "#1f7a51",
        "series-3": "#8a4fc0",
        "series-4": "#8c6600",
        "series-5": "#0a7482",
        "good": "#1d7f4f",
        "bad": "#c3322b",
    }
)
PIXELS_PER_INCH = 100
MAX_POINTS = 700

# Percentiles that a distribution names.
MARKS = (50.0, 95.0)
CHARACTER_PIXELS = 7.2

STYLE: dict[str, Any] = {
    "figure.dpi": PIXELS_PER_INCH,
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    "savefig.facecolor": "white",
    "savefig.transparent": False,
    "font.size": 8.5,
    "axes.labelsize": 8.5,
    "axes.titlesize": 8.5,
    "xtick.labelsize": 8.0,
    "ytick.labelsize": 8.0,
    "text.color": PALETTE["ink"],
    "axes.labelcolor": PALETTE["muted"],
    "axes.edgecolor": PALETTE["grid"],
    "xtick.color": PALETTE["grid"],
    "ytick.color": PALETTE["grid"],
    "xtick.labelcolor": PALETTE["muted"],
    "ytick.labelcolor": PALETTE["muted"],
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "grid.color": PALETTE["grid"],
    "grid.linewidth": 0.8,
    "axes.linewidth": 0.8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.spines.left": False,
    "ytick.major.size": 0,
    "xtick.major.size": 3,
    "lines.linewidth": 1.7,
    "lines.solid_capstyle": "round",
    "legend.frameon": False,
    "svg.fonttype": "none",
    "svg.hashsalt": "tgi-bench",
    "path.simplify": True,
    "text.parse_math": False,
}


@contextmanager
def styled() -> Iterator[None]:
    """The drawing and saving of figures under the product's style.

    Labels may hold characters that the bundled font lacks; a browser has them, a PNG shows boxes.
    """
    settings: Any = STYLE
    with mpl.rc_context(settings), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from")
        yield


# Pixels around the axes: left for tick labels, below for those and the axis' name, above for the title row.
MARGIN_LEFT, MARGIN_RIGHT, MARGIN_BOTTOM, MARGIN_TOP = 48, 12, 46, 32
MARGIN_NAMES = 150


def new_figure(size: Size, rows: int = 1, **grid: Any) -> tuple[Figure, list[Axes]]:
    """A figure of fixed margins, so that axes of figures side by side align (and no layout pass is needed)."""
    figure = Figure(figsize=(size.width / PIXELS_PER_INCH, size.height / PIXELS_PER_INCH))
    margins = {
        "left": MARGIN_LEFT / size.width,
        "right": 1 - MARGIN_RIGHT / size.width,
        "bottom": MARGIN_BOTTOM / size.height,
        "top": 1 - MARGIN_TOP / size.height,
        "hspace": 0.36,
    }
    axes = figure.subplots(rows, 1, squeeze=False, gridspec_kw=margins | grid.pop("gridspec_kw", {}), **grid)
    return figure, [each[0] for each in axes]


def tick_number(value: float, _: object = None) -> str:
    """A tick label that fits the margin."""
    return f"{value / 1e3:,.6g}k" if abs(value) >= 1e4 else f"{value:,.6g}"


def series_colour(index: int) -> str:
    return PALETTE[f"series-{index % 6}"]


def timeline(frame: pd.DataFrame, windows: Sequence[tuple[float, float]], size: Size) -> Figure:
    """Output tokens per second above requests in flight, per second of the run.

    frame: run, t_s, output_tokens_per_s, in_flight. The first run's warm-up and drain are shaded.
    """
    with styled():
        figure, (top, bottom) = new_figure(size, 2, sharex=True, height_ratios=(3, 2))
        runs = list(frame.groupby("run", sort=False))
        for index, (_, rows) in enumerate(runs):
            colour = series_colour(index)
            middle = rows["t_s"] + 0.5
            top.plot(middle, rows["output_tokens_per_s"], color=colour)
            bottom.step(rows["t_s"], rows["in_flight"], where="post", color=colour)
            if len(runs) == 1:
                top.fill_between(middle, rows["output_tokens_per_s"], color=colour, alpha=0.10, linewidth=0)
                bottom.fill_between(rows["t_s"], rows["in_flight"], step="post", color=colour, alpha=0.10, linewidth=0)
        name_series(bottom if size.is_narrow else top, [str(label) for label, _ in runs], size)
        label_axis(top, "output tokens/s  ↑ better")
        label_axis(bottom, "requests in flight")
        bottom.set_xlabel("seconds since the run's start")
        for axes in (top, bottom):
            axes.set_ylim(bottom=0)
            axes.yaxis.set_major_locator(MaxNLocator(4, integer=axes is bottom))
            axes.yaxis.set_major_formatter(FuncFormatter(tick_number))
            axes.set_xlim(0, float(frame["t_s"].max()) + 1)
        _shade_outside(top, bottom, windows[0], float(frame["t_s"].max()) + 1, size)
        return figure


def _shade_outside(top: Axes, bottom: Axes, window: tuple[float, float], last: float, size: Size) -> None:
    """Grey out what is not measured, and say what it is."""
    for start, end, name in ((0.0, window[0], "warm-up"), (window[1], last, "drain")):
        if end - start <= 0:
            continue
        for axes in (top, bottom):
            axes.axvspan(start, end, color=PALETTE["shade"], linewidth=0, zorder=0)
        if (end - start) / last * size.width > 65:
            place = ((start + end) / 2, 0.985)
            top.text(*place, name, transform=top.get_xaxis_transform(), ha="center", va="top", color=PALETTE["muted"])


def label_axis(axes: Axes, text: str) -> None:
    """An axis title above the axis, at its left: read horizontally, and no room is lost at the side."""
    axes.set_title(text, loc="left", color=PALETTE["muted"], pad=8)


def name_series(axes: Axes, labels: Sequence[str], size: Size, colours: Sequence[str] = ()) -> None:
    """The series' names in their colours, in one row above the axes, at the right; a single one needs none."""
    if len(labels) < 2:
        return
    colours = colours or [series_colour(index) for index in range(len(labels))]
    room = (size.width - 180) / CHARACTER_PIXELS
    fits = sum(len(label) + 2 for label in labels) <= room
    most = max(4, int(room / len(labels)) - 2)
    offset = 0.0
    for index in reversed(range(len(labels))):
        text = labels[index] if fits or len(labels[index]) <= most else labels[index][: most - 1] + "…"
        axes.annotate(
            text,
            (1.0, 1.0),
            xycoords="axes fraction",
            xytext=(-offset * 72 / PIXELS_PER_INCH, 9),
            textcoords="offset points",
            ha="right",
            color=colours[index],
            fontweight="bold",
        )
        offset += (len(text) + 2) * CHARACTER_PIXELS


def distribution(frame: pd.DataFrame, quantity: str, size: Size) -> Figure:
    """The share of values at or below x, x in milliseconds, with named percentiles.

    frame: run, share, value_ms, values in ascending order within a run.
    """
    with styled():
        figure, [axes] = new_figure(size)
        runs = list(frame.groupby("run", sort=False))
        name_series(axes, [str(label) for label, _ in runs], size)
        for index, (_, rows) in enumerate(runs):
            colour = series_colour(index)
            axes.plot(rows["value_ms"], rows["share"], color=colour, drawstyle="steps-post")
            for mark in MARKS:
                value = float(np.interp(mark / 100, rows["share"], rows["value_ms"]))
                axes.plot([value], [mark / 100], "o", color=colour, markersize=4.5)
        scale = _value_axis(axes, frame["value_ms"])
        if len(runs) == 1:
            _name_percentiles(axes, runs[0][1])
        axes.set_xlabel(f"{quantity}, ms{scale}   ← better")
        axes.set_ylim(0, 1.02)
        axes.yaxis.set_major_formatter(FuncFormatter(lambda share, _: f"{share:.0%}"))
        label_axis(axes, "share at or below")
        return figure


def _name_percentiles(axes: Axes, rows: pd.DataFrame) -> None:
    """Write each percentile beside its dot: to the right below the curve, or to the left above it near the edge."""
    for mark in MARKS:
        value = float(np.interp(mark / 100, rows["share"], rows["value_ms"]))
        x, _ = axes.transAxes.inverted().transform(axes.transData.transform((value, mark / 100)))
        axes.annotate(
            f"p{mark:g}  {format_number(value)} ms",
            (value, mark / 100),
            xytext=(9, -12) if x < 0.62 else (-9, 1),
            textcoords="offset points",
            ha="left" if x < 0.62 else "right",
            color=PALETTE["ink"],
        )


def _value_axis(axes: Axes, values: "pd.Series[float]") -> str:
    """An x axis with plain numbers, logarithmic where the values span more than a factor of four.

    Returns what to add to the axis' name.
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
    """A latency against a number of tokens: every request a dot, and the median of each tenth of the lengths.

    frame: run, tokens, value_ms. Of more than MAX_POINTS requests per run an even selection is drawn.
    """
    with styled():
        figure, [axes] = new_figure(size)
        runs = list(frame.groupby("run", sort=False))
        name_series(axes, [str(label) for label, _ in runs], size)
        for index, (_, rows) in enumerate(runs):
            colour = series_colour(index)
            shown = rows.iloc[:: max(1, len(rows) // (MAX_POINTS // (2 if size.is_narrow else 1)))]
            axes.plot(
                shown["tokens"], shown["value_ms"], "o", color=colour, markersize=2.6, alpha=0.28, markeredgewidth=0
            )
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


def _binned_medians(rows: pd.DataFrame) -> pd.DataFrame:
    bins = pd.qcut(rows["tokens"], 10, duplicates="drop") if rows["tokens"].nunique() > 1 else rows["tokens"]
    medians = rows.groupby(bins, observed=True)[["tokens", "value_ms"]].median()
    return medians if len(medians) > 1 else medians.iloc[:0]


def _cap_outliers(axes: Axes, values: "pd.Series[float]") -> None:
    """Show up to the 99.5th percentile with some air, and say how many values lie above."""
    top = float(values.quantile(0.995)) * 1.25 if len(values) else 1.0
    above = int((values > top).sum())
    axes.set_ylim(0, top if top > 0 else 1.0)
    axes.yaxis.set_major_locator(MaxNLocator(5))
    axes.yaxis.set_major_formatter(FuncFormatter(tick_number))
    if above:
        text = f"{above} above {format_number(top)} ms"
        axes.text(0.01, 0.98, text, transform=axes.transAxes, va="top", color=PALETTE["muted"])


def over_time(frame: pd.DataFrame, quantity: str, windows: Sequence[tuple[float, float]], size: Size) -> Figure:
    """A latency of each request by its start, so that drift and bursts can be seen.

    frame: run, t_s, value_ms.
    """
    with styled():
        figure, [axes] = new_figure(size)
        runs = list(frame.groupby("run", sort=False))
        name_series(axes, [str(label) for label, _ in runs], size)
        for index, (_, rows) in enumerate(runs):
            colour = series_colour(index)
            shown = rows.iloc[:: max(1, len(rows) // (MAX_POINTS // (2 if size.is_narrow else 1)))]
            axes.plot(shown["t_s"], shown["value_ms"], "o", color=colour, markersize=2.6, alpha=0.4, markeredgewidth=0)
        _cap_outliers(axes, frame["value_ms"])
        start, end = windows[0]
        last = max(float(frame["t_s"].max()), 1.0)
        for left, right in ((0.0, min(start, last)), (end, last)):
            if right > left:
                axes.axvspan(left, right, color=PALETTE["shade"], linewidth=0, zorder=0)
        axes.set_xlim(0, last)
        axes.set_xlabel("start of the request, seconds since the run's start")
        label_axis(axes, f"{quantity}, ms  ↓ better")
        return figure


def server_gauges(frame: pd.DataFrame, size: Size) -> Figure:
    """What the server said of itself over time, a line per gauge.

    frame: name, t_s, value.
    """
    with styled():
        figure, [axes] = new_figure(size)
        gauges = list(frame.groupby("name", sort=False))
        name_series(axes, [str(name) for name, _ in gauges], size)
        for index, (_, rows) in enumerate(gauges):
            axes.step(rows["t_s"], rows["value"], where="post", color=series_colour(index))
        axes.set_ylim(bottom=0, top=max(float(frame["value"].max()) * 1.1, 1.0))
        axes.set_xlim(0, float(frame["t_s"].max()))
        axes.yaxis.set_major_locator(MaxNLocator(5, integer=True))
        axes.set_xlabel("seconds since the run's start")
        label_axis(axes, "requests")
        return figure


def pair_dots(frame: pd.DataFrame, bound: float, size: Size) -> Figure:
    """Every pair's change in percent, a row per metric; better and worse by colour and shape, +-bound as a grey band.

    frame: metric, pair, change, worse.
    """
    with styled():
        left = MARGIN_RIGHT if size.is_narrow else MARGIN_NAMES
        figure, [axes] = new_figure(size, gridspec_kw={"left": left / size.width})
        names = list(dict.fromkeys(frame["metric"]))[::-1]
        axes.axvspan(-bound, bound, color=PALETTE["shade"], linewidth=0, zorder=0)
        axes.axvline(0, color=PALETTE["muted"], linewidth=0.8)
        for row, name in enumerate(names):
            rows = frame[frame["metric"] == name]
            spread = np.linspace(-0.14, 0.14, len(rows)) if len(rows) > 1 else np.zeros(1)
            is_worse = np.asarray(rows["worse"], dtype=np.bool_)
            for chosen, colour, mark in ((~is_worse, "good", "o"), (is_worse, "bad", "D")):
                places = rows["change"][chosen], (row + spread)[chosen]
                axes.scatter(*places, c=PALETTE[colour], s=20, marker=mark, linewidths=0, alpha=0.85)
            middle = float(rows["change"].median())
            axes.plot([middle, middle], [row - 0.24, row + 0.24], color=PALETTE["ink"], linewidth=1.6)
        name_rows(axes, names, size)
        reach = max(2 * bound, 1.1 * float(frame["change"].abs().max()))
        axes.set_xlim(-reach, reach)
        axes.grid(visible=False, axis="y")
        axes.xaxis.set_major_locator(MaxNLocator(5 if size.is_narrow else 9, symmetric=True))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:+g} %" if value else "0"))
        axes.set_xlabel("change of B against A")
        label_axis(axes, "green circles: better, red diamonds: worse; line: median")
        return figure


def name_rows(axes: Axes, names: Sequence[str], size: Size) -> None:
    """Row names at the left, or, where there is no room for that, above each row."""
    axes.set_ylim(-0.5, len(names) - (0.25 if size.is_narrow else 0.5))
    if not size.is_narrow:
        axes.set_yticks(range(len(names)), names)
        return
    axes.set_yticks([])
    for row, name in enumerate(names):
        axes.text(0.0, row + 0.32, name, transform=axes.get_yaxis_transform(), color=PALETTE["muted"])

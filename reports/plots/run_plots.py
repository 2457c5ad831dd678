"""Figures of a run and of a comparison: each function takes a frame and returns a `Figure`."""

from collections.abc import Sequence

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

from reports.document import Size, format_number, signed
from reports.plots.figure import (
    MARGIN_NAMES,
    MARGIN_RIGHT,
    PALETTE,
    add_hovers,
    axis_from_zero,
    label_axis,
    name_rows,
    name_series,
    new_figure,
    series_colour,
    styled,
    tick_number,
)

MAX_POINTS = 700

# Percentiles that are labelled in a distribution.
MARKS = (50.0, 95.0)


def timeline(frame: pd.DataFrame, windows: Sequence[tuple[float, float]], size: Size) -> Figure:
    """Output tokens per second over the run.

    frame: run, t_s, output_tokens_per_s, in_flight, ttft_p50_ms, ttft_p95_ms, failed; one row per `bin_s` seconds. The
    time outside every window is shaded.
    """
    with styled():
        figure, [axes] = new_figure(size)
        runs = list(frame.groupby("run", sort=False))
        for index, (label, rows) in enumerate(runs):
            colour, middle = series_colour(index), rows["t_s"] + rows["bin_s"] / 2
            axes.plot(middle, rows["output_tokens_per_s"], color=colour)
            if len(runs) == 1:
                axes.fill_between(middle, rows["output_tokens_per_s"], color=colour, alpha=0.10, linewidth=0)
            _hover_rows(axes, rows, middle, "output_tokens_per_s", str(label) if len(runs) > 1 else "")
        _over_seconds(axes, frame, windows, [str(label) for label, _ in runs], size)
        axis_from_zero(axes, float(frame["output_tokens_per_s"].max()), 3, headroom=LABEL_ROOM)
        label_axis(axes, "output tokens/s  ↑ better")
        axes.set_xlabel("seconds since the run's start")
        return figure


def load_timeline(frame: pd.DataFrame, windows: Sequence[tuple[float, float]], size: Size) -> Figure:
    """Requests in flight with failures, above TTFT p50 and p95 of the requests that started in each bin.

    frame: as in `timeline`.
    """
    with styled():
        figure, (top, bottom) = new_figure(size, 2, sharex=True)
        runs = list(frame.groupby("run", sort=False))
        for index, (_, rows) in enumerate(runs):
            colour, middle = series_colour(index), rows["t_s"] + rows["bin_s"] / 2
            top.step(rows["t_s"], rows["in_flight"], where="post", color=colour)
            failed = rows[rows["failed"] > 0]
            top.plot(failed["t_s"] + failed["bin_s"] / 2, failed["in_flight"], "X", color=PALETTE["bad"], markersize=6)
            known = rows["ttft_p50_ms"].notna()
            bottom.plot(middle[known], rows.loc[known, "ttft_p50_ms"], color=colour)
            bottom.plot(
                middle[known], rows.loc[known, "ttft_p95_ms"], color=colour, linewidth=1.1, linestyle=(0, (4, 2))
            )
            _hover_rows(top, rows, middle, "in_flight", "")
            _hover_rows(bottom, rows[known], middle[known], "ttft_p95_ms", "")
        _over_seconds(top, frame, windows, [str(label) for label, _ in runs], size)
        _over_seconds(bottom, frame, windows, [], size, has_names=False)
        axis_from_zero(top, float(frame["in_flight"].max()), headroom=LABEL_ROOM, is_count=True)
        slowest = float(frame["ttft_p95_ms"].max())
        axis_from_zero(bottom, slowest if slowest == slowest else 0.0)
        label_axis(top, "requests in flight")
        label_axis(bottom, "TTFT, ms: line p50, dashed p95  ↓ better")
        bottom.set_xlabel("seconds since the run's start")
        return figure


# Room above a line for the names of the shaded times, as a fraction of its highest value.
LABEL_ROOM = 0.22


def _over_seconds(
    axes: Axes,
    frame: pd.DataFrame,
    windows: Sequence[tuple[float, float]],
    names: Sequence[str],
    size: Size,
    *,
    has_names: bool = True,
) -> None:
    """A time axis with the times outside every window shaded, and named if there is room."""
    last = float((frame["t_s"] + frame["bin_s"]).max())
    axes.set_xlim(0, last)
    name_series(axes, names, size)
    first, end = min(start for start, _ in windows), max(stop for _, stop in windows)
    for start, stop, name in ((0.0, first, "warm-up"), (end, last, "drain")):
        if stop - start <= 0:
            continue
        axes.axvspan(start, stop, color=PALETTE["shade"], linewidth=0, zorder=0)
        if has_names and (stop - start) / last * size.width > 65:
            place = ((start + stop) / 2, 0.97)
            axes.text(*place, name, transform=axes.get_xaxis_transform(), ha="center", va="top", color=PALETTE["muted"])


HOVERED = {
    "output_tokens_per_s": ("output tokens/s", 1),
    "in_flight": ("in flight", 1),
    "ttft_p50_ms": ("ms TTFT p50", 1),
    "ttft_p95_ms": ("ms TTFT p95", 1),
    "failed": ("failed", 0),
}


def _hover_rows(axes: Axes, rows: pd.DataFrame, middle: "pd.Series[float]", column: str, label: str) -> None:
    """All values of each bin over its part of the axes."""
    texts = []
    for row in rows.to_dict("records"):
        values = [
            f"{format_number(float(row[name]) if decimals else int(row[name]))} {title}"
            for name, (title, decimals) in HOVERED.items()
            if row[name] == row[name] and (decimals or row[name])
        ]
        texts.append(", ".join([f"{label + ', ' if label else ''}{row['t_s']:g} s: {values[0]}", *values[1:]]))
    half = float(rows["bin_s"].iloc[0]) / 2 if len(rows) else 0.5
    add_hovers(axes, middle, rows[column], texts, half)


def distribution(frame: pd.DataFrame, quantity: str, size: Size) -> Figure:
    """The fraction of values at or below x, x in milliseconds, with labelled percentiles.

    frame: run, fraction, value_ms, values in ascending order within a run.
    """
    with styled():
        figure, [axes] = new_figure(size)
        runs = list(frame.groupby("run", sort=False))
        name_series(axes, [str(label) for label, _ in runs], size)
        for index, (_, rows) in enumerate(runs):
            colour = series_colour(index)
            axes.plot(rows["value_ms"], rows["fraction"], color=colour, drawstyle="steps-post")
            for mark in MARKS:
                value = float(np.interp(mark / 100, rows["fraction"], rows["value_ms"]))
                axes.plot([value], [mark / 100], "o", color=colour, markersize=4.5)
        scale = _value_axis(axes, frame["value_ms"])
        if len(runs) == 1:
            _name_percentiles(axes, runs[0][1])
        axes.set_xlabel(f"{quantity}, ms{scale}   ← better")
        axes.set_ylim(0, 1.02)
        axes.yaxis.set_major_formatter(FuncFormatter(lambda fraction, _: f"{fraction:.0%}"))
        label_axis(axes, "fraction at or below")
        return figure


def _name_percentiles(axes: Axes, rows: pd.DataFrame) -> None:
    """Label each percentile beside its dot: at the right below the curve, or near the edge at the left above it."""
    for mark in MARKS:
        value = float(np.interp(mark / 100, rows["fraction"], rows["value_ms"]))
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
    """An x axis with plain numbers, logarithmic if the values span more than a factor of four.

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

    frame: run, tokens, value_ms. Of more than MAX_POINTS requests per run, an even selection is drawn.
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
        start, end = min(first for first, _ in windows), max(last for _, last in windows)
        last = max(float(frame["t_s"].max()), 1.0)
        for left, right in ((0.0, min(start, last)), (end, last)):
            if right > left:
                axes.axvspan(left, right, color=PALETTE["shade"], linewidth=0, zorder=0)
        axes.set_xlim(0, last)
        axes.set_xlabel("start of the request, seconds since the run's start")
        label_axis(axes, f"{quantity}, ms  ↓ better")
        return figure


def pair_dots(frame: pd.DataFrame, bound: float, size: Size) -> Figure:
    """The change of every pair in percent, a row per metric; colour and shape show better and worse, the band ±bound.

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


# Up to this many workers have their own lines; of more, the range is shown.
MAX_LINES = 6


def panels(frame: pd.DataFrame, window: tuple[float, float], last_s: float, size: Size) -> Figure:
    """Gauges over time, one panel per unit, with a common time axis.

    frame: panel, name, t_s, value; one or several names per panel. The time outside the window is grey.
    """
    with styled():
        groups = list(frame.groupby("panel", sort=False))
        figure, axes_of = new_figure(size, len(groups), sharex=True, gridspec_kw={"hspace": 0.52})
        for axes, (panel, rows) in zip(axes_of, groups, strict=True):
            lines = list(rows.groupby("name", sort=False))
            for index, (_, line) in enumerate(lines):
                axes.step(line["t_s"], line["value"], where="post", color=series_colour(index), linewidth=1.4)
            name_series(axes, [str(name) for name, _ in lines], size)
            axes.set_ylim(bottom=0, top=max(1.12 * float(rows["value"].max()), 1e-9))
            label_axis(axes, str(panel))
            is_whole = bool((rows["value"] % 1 == 0).all())
            _clock(axes, window, last_s, len(groups), is_whole=is_whole)
        axes_of[-1].set_xlabel("seconds since the run's start")
        return figure


def _clock(
    axes: Axes, window: tuple[float, float], last_s: float, panels_shown: int, *, is_whole: bool = False
) -> None:
    axes.set_xlim(0, last_s)
    axes.yaxis.set_major_locator(MaxNLocator(4 if panels_shown < 3 else 3, integer=is_whole))
    axes.yaxis.set_major_formatter(FuncFormatter(tick_number))
    for start, end in ((0.0, window[0]), (window[1], last_s)):
        if end > start:
            axes.axvspan(start, end, color=PALETTE["shade"], linewidth=0, zorder=0)


def workers(frame: pd.DataFrame, bounds: Sequence[float], window: tuple[float, float], size: Size) -> Figure:
    """CPU use and longest loop lag of each worker, per second. frame: worker, t_s, cpu_percent, lag_ms.

    Above `bounds` the run is degraded: CPU in percent, lag in ms.
    """
    with styled():
        figure, axes_of = new_figure(size, 2, sharex=True, gridspec_kw={"hspace": 0.52})
        titles = {"cpu_percent": "CPU of each worker, %", "lag_ms": "longest event-loop lag of each worker, ms"}
        last_s = float(frame["t_s"].max()) + 1
        for axes, (column, title), bound in zip(axes_of, titles.items(), bounds, strict=True):
            _worker_lines(axes, frame, column)
            top = 1.12 * float(frame[column].max())
            if bound <= 3 * top:
                axes.axhline(bound, color=PALETTE["bad"], linewidth=0.9, linestyle=(0, (4, 3)))
                top = max(top, 1.12 * bound)
            axes.set_ylim(0, max(top, 1e-9))
            label_axis(axes, title)
            _clock(axes, window, last_s, 2)
        names = [f"worker {worker:.0f}" for worker in frame["worker"].unique()]
        if len(names) <= MAX_LINES:
            name_series(axes_of[0], names, size)
        axes_of[-1].set_xlabel("seconds since the run's start")
        return figure


def _worker_lines(axes: Axes, frame: pd.DataFrame, column: str) -> None:
    lines = list(frame.groupby("worker", sort=False))
    if len(lines) <= MAX_LINES:
        for index, (_, rows) in enumerate(lines):
            axes.step(rows["t_s"], rows[column], where="post", color=series_colour(index), linewidth=1.3)
        return
    spread = frame.groupby("t_s")[column].agg(["min", "median", "max"])
    axes.fill_between(spread.index, spread["min"], spread["max"], color=series_colour(0), alpha=0.2, linewidth=0)
    axes.plot(spread.index, spread["median"], color=series_colour(0))


def forest(frame: pd.DataFrame, bound: float, unit: str, size: Size) -> Figure:
    """The change of each quantity with its interval, one row each; the smallest effect of interest as a band.

    frame: name, value, lo, hi, worse, decided, from the first row down. Missing bounds are NaN; `unit` is that of all.
    """
    with styled():
        left = MARGIN_RIGHT if size.is_narrow else MARGIN_NAMES
        figure, [axes] = new_figure(size, gridspec_kw={"left": left / size.width})
        rows = frame.iloc[::-1].reset_index(drop=True)
        axes.axvspan(-bound, bound, color=PALETTE["shade"], linewidth=0, zorder=0)
        axes.axvline(0, color=PALETTE["muted"], linewidth=0.8)
        colours = [
            PALETTE["muted"] if not decided else PALETTE["bad" if worse else "good"]
            for worse, decided in zip(rows["worse"], rows["decided"], strict=True)
        ]
        axes.hlines(rows.index, rows["lo"], rows["hi"], colors=colours, linewidth=2.0)
        axes.scatter(rows["value"], rows.index, c=colours, s=34, zorder=3)
        texts = [
            f"{name}: {signed_percent(value)} ({signed_percent(lo)} to {signed_percent(hi)}) {unit}"
            for name, value, lo, hi in rows[["name", "value", "lo", "hi"]].itertuples(index=False)
        ]
        add_hovers(axes, rows["value"], rows.index, texts)
        ends = np.concatenate([rows[["value", "lo", "hi"]].to_numpy(dtype=float).ravel(), [-1.6 * bound, 1.6 * bound]])
        ends = ends[np.isfinite(ends)]
        pad = 0.06 * (ends.max() - ends.min())
        axes.set_xlim(ends.min() - pad, ends.max() + pad)
        name_rows(axes, [str(name) for name in rows["name"]], size)
        axes.grid(visible=False, axis="y")
        axes.grid(visible=True, axis="x")
        axes.xaxis.set_major_locator(MaxNLocator(5))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: signed_percent(value)))
        axes.set_xlabel(f"change of B against A, {unit}")
        return figure


def signed_percent(value: float) -> str:
    """`+4.2`, `−1.5`, `0`."""
    return signed(format_number(float(f"{value:.2g}")), is_change=True)

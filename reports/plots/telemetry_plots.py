"""Figures of gauges over time: of the server, of accelerators and of the load generator's workers."""

from collections.abc import Sequence

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from reports.document import Size, format_number
from reports.plots.figure import PALETTE, label_axis, new_figure, series_colour, styled, tick_number
from reports.plots.hovers import add_hovers
from reports.plots.series_names import name_series

MAX_LINES = 6
"""More workers than this are drawn as their range and median instead of a line each."""


def panels(frame: pd.DataFrame, window: tuple[float, float], last_s: float, size: Size) -> Figure:
    """Gauges over time, one panel per unit, with a common time axis.

    frame: panel, name, t_s, value; one or several names per panel. window: start and end of the measured phase, in
    seconds; the rest is shaded.
    """
    with styled():
        groups = list(frame.groupby("panel", sort=False))
        figure, axes_of = new_figure(size, len(groups), sharex=True, gridspec_kw={"hspace": 0.52})
        for axes, (panel, rows) in zip(axes_of, groups, strict=True):
            lines = list(rows.groupby("name", sort=False))
            for index, (_, line) in enumerate(lines):
                axes.step(line["t_s"], line["value"], where="post", color=series_colour(index), linewidth=1.4)
            _hover_samples(axes, rows)
            name_series(axes, [str(name) for name, _ in lines], size)
            axes.set_ylim(bottom=0, top=max(1.12 * float(rows["value"].max()), 1e-9))
            label_axis(axes, str(panel))
            is_whole = bool((rows["value"] % 1 == 0).all())
            _time_axis(axes, window, last_s, len(groups), is_whole=is_whole)
        axes_of[-1].set_xlabel("seconds since the run's start")
        return figure


MAX_HOVERED = 400
"""With more samples than this, the band of a sample is too narrow to point at."""


def _hover_samples(axes: Axes, rows: pd.DataFrame) -> None:
    """Show the values of all lines of a panel at each sample."""
    if not 1 < rows["t_s"].nunique() <= MAX_HOVERED:
        return
    samples: dict[float, list[str]] = {}
    ordered = rows.sort_values("t_s", kind="stable")
    for at, name, value in zip(ordered["t_s"], ordered["name"], ordered["value"], strict=True):
        samples.setdefault(float(at), []).append(f"{name} {format_number(float(value))}")
    texts = [f"{at:g} s: {', '.join(values)}" for at, values in samples.items()]
    times = list(samples)
    half = (times[-1] - times[0]) / (len(times) - 1) / 2
    add_hovers(axes, [at + half for at in times], [0.0] * len(times), texts, half)


def _time_axis(
    axes: Axes, window: tuple[float, float], last_s: float, num_panels: int, *, is_whole: bool = False
) -> None:
    axes.set_xlim(0, last_s)
    axes.yaxis.set_major_locator(MaxNLocator(4 if num_panels < 3 else 3, integer=is_whole))
    axes.yaxis.set_major_formatter(FuncFormatter(tick_number))
    for start, end in ((0.0, window[0]), (window[1], last_s)):
        if end > start:
            axes.axvspan(start, end, color=PALETTE["shade"], linewidth=0, zorder=0)


def workers(frame: pd.DataFrame, bounds: Sequence[float], window: tuple[float, float], size: Size) -> Figure:
    """CPU use and longest event-loop lag of each worker, per second. frame: worker, t_s, cpu_percent, lag_ms.

    bounds: CPU in percent and lag in ms; a run above one of them is degraded.
    """
    with styled():
        figure, axes_of = new_figure(size, 2, sharex=True, gridspec_kw={"hspace": 0.52})
        titles = {"cpu_percent": "CPU of each worker, %", "lag_ms": "longest event-loop lag of each worker, ms"}
        last_s = float(frame["t_s"].max()) + 1
        for axes, (column, title), bound in zip(axes_of, titles.items(), bounds, strict=True):
            _worker_lines(axes, frame, column)
            samples = frame.assign(name="worker " + frame["worker"].astype(int).astype(str), value=frame[column])
            if frame["worker"].nunique() <= MAX_LINES:
                _hover_samples(axes, samples)
            top = 1.12 * float(frame[column].max())
            if bound <= 3 * top:
                axes.axhline(bound, color=PALETTE["bad"], linewidth=0.9, linestyle=(0, (4, 3)))
                top = max(top, 1.12 * bound)
            axes.set_ylim(0, max(top, 1e-9))
            label_axis(axes, title)
            _time_axis(axes, window, last_s, 2)
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

"""Figures of the course of a run: throughput, requests in flight, TTFT and failures over time.

Each function takes a frame and returns a `Figure`.
"""

from collections.abc import Sequence

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from reports.document import Size, format_number
from reports.plots.figure import PALETTE, axis_from_zero, label_axis, new_figure, series_colour, styled
from reports.plots.hovers import add_hovers
from reports.plots.series_names import name_series


def timeline(frame: pd.DataFrame, windows: Sequence[tuple[float, float]], size: Size) -> Figure:
    """Output tokens per second over the run.

    frame: run, t_s, bin_s, output_tokens_per_s, in_flight, ttft_p50_ms, ttft_p95_ms, failed; a row per bin of `bin_s`
    seconds that starts at `t_s`. windows: start and end of each run's measured phase, in seconds; the rest is shaded.
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

    frame, windows: as in `timeline`.
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


LABEL_ROOM = 0.22
"""Space above a line for the names of the shaded times, as a fraction of the line's highest value."""


def _over_seconds(
    axes: Axes,
    frame: pd.DataFrame,
    windows: Sequence[tuple[float, float]],
    names: Sequence[str],
    size: Size,
    *,
    has_names: bool = True,
) -> None:
    """Set up a time axis. The times before and after all windows are shaded, and named if there is room."""
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


HOVERED_COLUMNS = {
    "output_tokens_per_s": ("output tokens/s", 1),
    "in_flight": ("in flight", 1),
    "ttft_p50_ms": ("ms TTFT p50", 1),
    "ttft_p95_ms": ("ms TTFT p95", 1),
    "failed": ("failed", 0),
}
"""Title and decimals of each column that is shown under the pointer; a column without decimals is hidden if 0."""


def _hover_rows(axes: Axes, rows: pd.DataFrame, middle: "pd.Series[float]", column: str, label: str) -> None:
    """Show all values of a bin while the pointer is over its band of the axes."""
    texts = []
    for row in rows.to_dict("records"):
        values = [
            f"{format_number(float(row[name]) if decimals else int(row[name]))} {title}"
            for name, (title, decimals) in HOVERED_COLUMNS.items()
            if row[name] == row[name] and (decimals or row[name])
        ]
        texts.append(", ".join([f"{label + ', ' if label else ''}{row['t_s']:g} s: {values[0]}", *values[1:]]))
    half = float(rows["bin_s"].iloc[0]) / 2 if len(rows) else 0.5
    add_hovers(axes, middle, rows[column], texts, half)

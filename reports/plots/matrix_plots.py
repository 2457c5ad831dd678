"""Figures of a sweep over two settings; each takes a frame and returns a `Figure`."""

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullLocator

from reports.document import Size, format_number
from reports.plots.figure import PALETTE, label_axis, new_figure, series_colour, styled, tick_number
from reports.plots.hovers import add_hovers
from reports.plots.series_names import name_series


def facets(frame: pd.DataFrame, column: str, title: str, load: str, size: Size) -> Figure:
    """A panel for each value of the other setting, one below the other, on one load axis.

    frame: facet, load, `column`, is_valid. Invalid points are hollow.
    """
    names = list(dict.fromkeys(frame["facet"]))
    with styled():
        figure, panels = new_figure(size, len(names), sharex=True)
        for index, (axes, name) in enumerate(zip(panels, names, strict=True)):
            rows = frame[(frame["facet"] == name) & frame[column].notna()]
            axes.plot(rows["load"], rows[column], color=series_colour(index), linewidth=1.2)
            _dots(axes, rows["load"], rows[column], rows["is_valid"], index)
            texts = [
                f"{name}, {at:g} {load}: {format_number(value)} {title.rstrip(' ↑↓')}"
                for at, value in rows[["load", column]].to_numpy(dtype=float).tolist()
            ]
            add_hovers(axes, rows["load"], rows[column], texts)
            axes.set_ylim(bottom=0, top=1.15 * float(rows[column].max()) if len(rows) else 1.0)
            axes.yaxis.set_major_locator(MaxNLocator(3))
            axes.yaxis.set_major_formatter(FuncFormatter(tick_number))
            label_axis(axes, f"{name}: {title}" if index == 0 else name)
        _load_axis(panels[-1], frame, load)
        return figure


def speed_front(frame: pd.DataFrame, size: Size) -> Figure:
    """Tokens/s of one user against tokens/s of all, a line for each front; points below their front are hollow.

    frame: facet, load, output_tokens_per_s, user_tokens_per_s, is_front.
    """
    names = list(dict.fromkeys(frame["facet"]))
    with styled():
        figure, [axes] = new_figure(size)
        for index, name in enumerate(names):
            rows = frame[frame["facet"] == name]
            ahead = rows[rows["is_front"]].sort_values("output_tokens_per_s")
            axes.plot(
                ahead["output_tokens_per_s"], ahead["user_tokens_per_s"], color=series_colour(index), linewidth=1.2
            )
            _dots(axes, rows["output_tokens_per_s"], rows["user_tokens_per_s"], rows["is_front"], index)
            texts = [
                f"{name}, load {at:g}: {format_number(own)} tokens/s per user, {format_number(total)} in total"
                for at, total, own in rows[["load", "output_tokens_per_s", "user_tokens_per_s"]]
                .to_numpy(dtype=float)
                .tolist()
            ]
            add_hovers(axes, rows["output_tokens_per_s"], rows["user_tokens_per_s"], texts)
            for row in ahead.itertuples():
                axes.annotate(
                    f"{row.load:g}",
                    (float(str(row.output_tokens_per_s)), float(str(row.user_tokens_per_s))),
                    xytext=(5, 4),
                    textcoords="offset points",
                    color=PALETTE["muted"],
                )
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_formatter(FuncFormatter(tick_number))
        axes.xaxis.set_major_locator(MaxNLocator(4 if size.is_narrow else 7))
        axes.set_xlim(left=0, right=1.1 * float(frame["output_tokens_per_s"].max()))
        axes.set_ylim(bottom=0, top=1.12 * float(frame["user_tokens_per_s"].max()))
        axes.set_xlabel("output tokens/s in total  → better")
        label_axis(axes, "tokens/s per user  ↑ better")
        name_series(axes, names, size)
        return figure


def _dots(axes: Axes, x: "pd.Series[float]", y: "pd.Series[float]", is_filled: "pd.Series[bool]", index: int) -> None:
    for filled, face in ((True, series_colour(index)), (False, "white")):
        chosen = is_filled == filled
        axes.plot(x[chosen], y[chosen], "o", color=series_colour(index), markerfacecolor=face, markersize=4.5)


def _load_axis(axes: Axes, frame: pd.DataFrame, load: str) -> None:
    """Set up the x axis: logarithmic with a tick at each load if the loads span more than a factor of four."""
    loads = sorted(set(frame["load"]))
    if loads[-1] > 4 * loads[0]:
        axes.set_xscale("log", base=2)
        axes.xaxis.set_minor_locator(NullLocator())
        axes.set_xticks(loads)
    axes.xaxis.set_major_formatter(FuncFormatter(tick_number))
    axes.set_xlabel(load)

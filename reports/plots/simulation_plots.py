"""Figures of predictions: a map of two settings, and fleets by rate, attainment and hour."""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from reports.document import Size, format_number, format_percent
from reports.plots.figure import PALETTE, label_axis, new_figure, series_colour, styled, tick_number
from reports.plots.hovers import add_cell_hovers, add_hovers
from reports.plots.series_names import name_series
from reports.plots.study.setting_axis import is_whole, left_margin, setting_axis, setting_number
from reports.study import Knob

Array = npt.NDArray[np.float64]

MAX_CELLS = 12
"""Cells of a map in each direction."""
MIN_PER_CELL = 4
"""Mean number of predictions per cell of a map, so that few cells are empty."""
HOURS = 24


def cells(frame: pd.DataFrame, x: Knob, y: Knob) -> tuple[Array, Array, Array, Array]:
    """The plane of two numeric settings in cells, with the value and the excess of each cell's best prediction.

    frame: x, y, value, excess; an excess above 1 exceeds a limit. The best prediction of a cell has the highest value
    within the limits, or the smallest excess if none is within.
    Returns x edges, y edges, values and excesses: [cells of y, cells of x], NaN in a cell without predictions.
    """
    known = frame[frame["x"].notna() & frame["y"].notna()]
    side = int(np.clip(np.sqrt(len(known) / MIN_PER_CELL), 2, MAX_CELLS))
    edges, places = [], []
    for knob, name in ((x, "x"), (y, "y")):
        values = known[name].to_numpy(dtype=np.float64)
        low, high = float(values.min()), float(values.max())
        space = np.geomspace if knob.scale == "log" and low > 0 else np.linspace
        ends = space(low, high, side + 1)
        edges.append(np.asarray(ends, dtype=np.float64))
        places.append(np.clip(np.searchsorted(ends, values, side="right") - 1, 0, side - 1))
    best, excess = np.full((side, side), np.nan), np.full((side, side), np.nan)
    ordered = known.assign(column=places[0], row=places[1], miss=known["excess"].clip(lower=1.0))
    first = ordered.sort_values(["miss", "value"], ascending=[True, False]).groupby(["row", "column"], sort=False)
    chosen = first.head(1)
    at = chosen["row"].to_numpy(), chosen["column"].to_numpy()
    best[at], excess[at] = chosen["value"], chosen["excess"]
    return edges[0], edges[1], best, excess


def heat_map(frame: pd.DataFrame, x: Knob, y: Knob, quantity: str, size: Size) -> Figure:
    """The best objective over two numeric settings. Every prediction beyond the red line exceeds a limit.

    frame: as for `cells`.
    """
    x_edges, y_edges, best, excess = cells(frame, x, y)
    with styled():
        figure, [axes] = new_figure(size, gridspec_kw=left_margin(y, size))
        known = frame[frame["x"].notna() & frame["y"].notna()]
        setting_axis(axes, "x", x, known["x"], size)
        setting_axis(axes, "y", y, known["y"], size)
        colours = LinearSegmentedColormap.from_list("best", [PALETTE["shade"], PALETTE["series-0"]])
        mesh = axes.pcolormesh(x_edges, y_edges, best, cmap=colours, rasterized=True)
        bar = figure.colorbar(mesh, ax=axes, pad=0.03)
        bar.ax.yaxis.set_major_formatter(FuncFormatter(tick_number))
        bar.ax.yaxis.set_major_locator(MaxNLocator(5))
        bar.outline.set_visible(False)
        _label_bar(bar.ax, quantity, size)
        axes.set_xlim(x_edges[0], x_edges[-1])
        axes.set_ylim(y_edges[0], y_edges[-1])
        if np.nanmin(excess) <= 1 < np.nanmax(excess):
            _outline(axes, x_edges, y_edges, excess <= 1)
        wholes = (is_whole(known["x"].to_numpy()), is_whole(known["y"].to_numpy()))
        add_cell_hovers(axes, _cell_hovers(x_edges, y_edges, best, excess, (x.name, y.name, quantity), wholes))
        axes.grid(visible=False)
        axes.set_xlabel(x.name)
        label_axis(axes, y.name)
        return figure


def _label_bar(axes: Axes, quantity: str, size: Size) -> None:
    """Write the quantity above the colour bar; in a narrow figure it ends at the right edge of the bar."""
    if size.is_narrow:
        axes.set_title(quantity, loc="right", color=PALETTE["muted"], pad=8)
    else:
        label_axis(axes, quantity)


def _outline(axes: Axes, x_edges: Array, y_edges: Array, inside: npt.NDArray[np.bool_]) -> None:
    """A line around the cells that are inside, along their edges."""
    padded = np.pad(inside, 1)
    style: dict[str, Any] = {"color": PALETTE["bad"], "linewidth": 1.8}
    for row, column in zip(*np.nonzero(padded[:, 1:] != padded[:, :-1]), strict=True):
        axes.plot([x_edges[column]] * 2, y_edges[row - 1 : row + 1], clip_on=False, **style)
    for row, column in zip(*np.nonzero(padded[1:] != padded[:-1]), strict=True):
        axes.plot(x_edges[column - 1 : column + 1], [y_edges[row]] * 2, clip_on=False, **style)


def _cell_hovers(
    x_edges: Array,
    y_edges: Array,
    best: Array,
    excess: Array,
    names: tuple[str, str, str],
    wholes: tuple[bool, bool],
) -> Iterator[tuple[float, float, float, float, str]]:
    """The text of each cell with a prediction. wholes: whether each setting has only whole numbers."""
    x_name, y_name, quantity = names
    for row, column in zip(*np.nonzero(~np.isnan(best)), strict=True):
        x_span, y_span = x_edges[column : column + 2], y_edges[row : row + 2]
        within = "within every limit" if excess[row, column] <= 1 else "beyond a limit"
        spans = f"{x_name} {_span(x_span, wholes[0])}, {y_name} {_span(y_span, wholes[1])}"
        yield (*x_span, *y_span, f"{spans}: {quantity} {format_number(float(best[row, column]))}, {within}")


def _span(ends: Array, is_integer: bool) -> str:
    """The range of a cell as values of its setting.

    >>> _span(np.array([1448.2, 8192.0]), True), _span(np.array([0.5, 1.25893]), False)
    ('1448–8192', '0.5–1.259')
    """
    return "–".join(setting_number(round(end) if is_integer else float(f"{end:.4g}")) for end in ends)


def replicas_over_rate(frame: pd.DataFrame, size: Size) -> Figure:
    """Replicas that reach the target at each rate, by policy; the band shows the error of the cost model.

    frame: rate, policy, replicas, low, high.
    """
    with styled():
        figure, [axes] = new_figure(size)
        names = list(dict.fromkeys(frame["policy"]))
        for index, name in enumerate(names):
            rows = frame[frame["policy"] == name].sort_values("rate")
            colour = series_colour(index)
            axes.fill_between(rows["rate"], rows["low"], rows["high"], color=colour, alpha=0.15, linewidth=0)
            axes.plot(rows["rate"], rows["replicas"], "o-", color=colour, markersize=5)
            texts = [
                f"{name}, {row.rate:g} requests/s: {row.replicas:g} replicas ({row.low:g}–{row.high:g})"
                for row in rows.itertuples()
            ]
            add_hovers(axes, rows["rate"], rows["replicas"], texts)
        axes.set_ylim(bottom=0)
        axes.set_xticks(sorted(frame["rate"].unique()))
        axes.xaxis.set_major_formatter(FuncFormatter(tick_number))
        axes.yaxis.set_major_locator(MaxNLocator(6, integer=True))
        axes.set_xlabel("requests/s")
        name_series(axes, names, size)
        label_axis(axes, "replicas  ↓ better")
        return figure


def cost_over_attainment(frame: pd.DataFrame, target: float, unit: str, size: Size) -> Figure:
    """The cost of each fleet over its fraction of requests within every limit; a line marks the target.

    frame: attainment, cost, policy, rate; the fleets of one rate and policy are joined.
    """
    with styled():
        figure, [axes] = new_figure(size)
        names = list(dict.fromkeys(frame["policy"]))
        for (name, _), rows in frame.groupby(["policy", "rate"], sort=False):
            colour = series_colour(names.index(str(name)))
            axes.plot(100 * rows["attainment"], rows["cost"], "o-", color=colour, markersize=5, linewidth=1.0)
            texts = [
                f"{row.policy}, {row.rate:g} requests/s: {format_percent(float(str(row.attainment)))} within, "
                f"{unit} {row.cost:g}"
                for row in rows.itertuples()
            ]
            add_hovers(axes, 100 * rows["attainment"], rows["cost"], texts)
        for rate in frame["rate"].unique():
            rows = frame[frame["rate"] == rate]
            top = rows.sort_values("cost").iloc[-1]
            place = (100 * float(top["attainment"]), float(top["cost"]))
            axes.annotate(
                f"{rate:g}",
                place,
                xytext=(0, 6),
                textcoords="offset points",
                ha="center",
                color=PALETTE["muted"],
                fontsize=7,
            )
        axes.axvline(100 * target, color=PALETTE["muted"], linewidth=0.9)
        axes.set_ylim(0, 1.12 * float(frame["cost"].max()))
        axes.margins(x=0.06)
        axes.yaxis.set_major_formatter(FuncFormatter(tick_number))
        axes.set_xlabel("requests within every limit, %")
        name_series(axes, names, size)
        label_axis(axes, f"{unit}  ↓ better")
        return figure


def day_profile(frame: pd.DataFrame, totals: Mapping[str, float], size: Size) -> Figure:
    """Replicas over a day, needed and running; `totals` are replica-hours by series.

    frame: hour, and a column of replicas for each series of `totals`.
    """
    with styled():
        figure, [axes] = new_figure(size)
        hours = np.append(frame["hour"].to_numpy(dtype=np.float64), HOURS)
        for index, name in enumerate(totals):
            steps = np.append(frame[name].to_numpy(dtype=np.float64), frame[name].iloc[-1])
            axes.step(hours, steps, where="post", color=series_colour(index))
        values = frame[list(totals)].to_dict("records")
        texts = [
            f"{hour:g} h: " + ", ".join(f"{name} {value:g}" for name, value in row.items())
            for hour, row in zip(frame["hour"], values, strict=True)
        ]
        add_hovers(axes, frame["hour"] + 0.5, [0.0] * len(frame), texts, 0.5)
        axes.set_xlim(0, HOURS)
        axes.set_ylim(bottom=0)
        axes.set_xticks(range(0, HOURS + 1, 6 if size.is_narrow else 3))
        axes.yaxis.set_major_locator(MaxNLocator(6, integer=True))
        axes.set_xlabel("hour of the day")
        name_series(axes, [f"{name} {hours:.0f} h" for name, hours in totals.items()], size)
        label_axis(axes, "replicas")
        return figure

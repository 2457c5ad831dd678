"""Figures of requests and their parts: heat map by lengths, Gantt chart of the slowest, time breakdown."""

from collections.abc import Hashable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import FuncFormatter, MaxNLocator

from reports.document import Size, format_number
from reports.plots.figure import (
    CHARACTER_PIXELS,
    MARGIN_NAMES,
    MARGIN_RIGHT,
    MARGIN_TOP,
    PALETTE,
    PIXELS_PER_INCH,
    label_axis,
    new_figure,
    styled,
    tick_number,
)
from reports.plots.hovers import add_cell_hovers, add_hovers
from reports.plots.series_names import name_rows

PART_COLOURS: Mapping[str, str] = MappingProxyType(
    {
        "client wait": PALETTE["series-3"],
        "waiting": PALETTE["series-3"],
        "network": PALETTE["series-5"],
        "validation": PALETTE["series-4"],
        "queue": PALETTE["series-1"],
        "prefill": PALETTE["series-2"],
        "to first token": PALETTE["series-2"],
        "decode": PALETTE["series-0"],
        "inference": PALETTE["series-0"],
        "streaming": PALETTE["series-0"],
        "unexplained": PALETTE["muted"],
    }
)
"""The parts of a request's time in their order, and the colour of each part in every figure."""
MAX_ALPHA = 0.6
"""Opacity of the slowest cell of a heat map; the number in it stays readable."""
LINE_PIXELS = 15


def heat_map(frame: pd.DataFrame, size: Size) -> Figure:
    """The median of a latency, and the number of requests, in each cell of input and output lengths.

    frame: column, row, column_name, row_name, value_ms, count. Darker is slower; cells without requests are empty.
    """
    with styled():
        figure, [axes] = new_figure(size, gridspec_kw={"left": 78 / size.width})
        low, high = float(frame["value_ms"].min()), float(frame["value_ms"].max())
        for cell in frame.itertuples():
            x, y, value = float(cell.column), float(cell.row), float(cell.value_ms)  # type: ignore[arg-type]
            fraction = (value - low) / (high - low) if high > low else 0.5
            colour = PALETTE["series-1"]
            axes.add_patch(
                Rectangle(
                    (x - 0.48, y - 0.46), 0.96, 0.92, color=colour, alpha=0.06 + fraction * MAX_ALPHA, linewidth=0
                )
            )
            axes.text(x, y + 0.02, format_number(value), ha="center", va="bottom", color=PALETTE["ink"], fontsize=8.0)
            axes.text(x, y - 0.06, f"n {cell.count}", ha="center", va="top", color=PALETTE["ink"], fontsize=6.5)
        add_cell_hovers(axes, map(_cell, frame.to_dict("records")))
        _named_cells(axes, frame, size)
        axes.grid(visible=False)
        axes.set_xlabel("input tokens")
        meaning = "median ms" if size.is_narrow else "each cell: median ms, darker is slower"
        label_axis(axes, f"output tokens; {meaning}")
        return figure


def _cell(cell: Mapping[Hashable, Any]) -> tuple[float, float, float, float, str]:
    """The edges of a cell and its text: `12–64 input, 8–16 output tokens: median 31.2 ms of 14 requests`."""
    lengths = f"{cell['column_name']} input, {cell['row_name']} output tokens"
    text = f"{lengths}: median {format_number(float(cell['value_ms']))} ms of {cell['count']:,} requests"
    return cell["column"] - 0.5, cell["column"] + 0.5, cell["row"] - 0.5, cell["row"] + 0.5, text


def _named_cells(axes: Axes, frame: pd.DataFrame, size: Size) -> None:
    columns = frame.drop_duplicates("column").sort_values("column")
    rows = frame.drop_duplicates("row").sort_values("row")
    axes.set_xticks(list(columns["column"]), list(columns["column_name"]), fontsize=6.5 if size.is_narrow else 8.0)
    axes.set_yticks(list(rows["row"]), list(rows["row_name"]))
    axes.set_xlim(-0.5, float(frame["column"].max()) + 0.5)
    axes.set_ylim(-0.5, float(frame["row"].max()) + 0.5)


def gantt(frame: pd.DataFrame, size: Size) -> Figure:
    """Requests as bars over time, a colour per part.

    frame: row, name, part, start_s (since the run's start), seconds.
    """
    with styled():
        left = MARGIN_RIGHT if size.is_narrow else MARGIN_NAMES
        parts = list(dict.fromkeys(frame["part"]))
        figure, [axes] = new_figure(size, gridspec_kw={"left": left / size.width})
        for part, rows in frame.groupby("part", sort=False):
            colour = PART_COLOURS[str(part)]
            for start, seconds, row in zip(rows["start_s"], rows["seconds"], rows["row"], strict=True):
                axes.add_patch(Rectangle((start, row - 0.34), seconds, 0.68, color=colour, linewidth=0))
            texts = [
                f"{name}: {part} {format_number(1e3 * seconds)} ms"
                for name, seconds in zip(rows["name"], rows["seconds"], strict=True)
            ]
            add_hovers(axes, rows["start_s"] + rows["seconds"] / 2, rows["row"], texts)
        names = frame.drop_duplicates("row").sort_values("row")
        axes.set_ylim(float(frame["row"].max()) + 0.7, -0.7)
        if size.is_narrow:
            axes.set_yticks([])
        else:
            axes.set_yticks(list(names["row"]), list(names["name"]), fontsize=7.5)
        start, end = float(frame["start_s"].min()), float((frame["start_s"] + frame["seconds"]).max())
        axes.set_xlim(start - 0.02 * (end - start), end + 0.02 * (end - start))
        _horizontal_axis(axes, size)
        axes.set_xlabel("seconds since the run's start")
        name_parts(axes, parts, size)
        return figure


def time_stack(frame: pd.DataFrame, size: Size) -> Figure:
    """The mean time breakdown: a bar per run, a colour per part. frame: run, part, value_ms, total_ms."""
    with styled():
        runs = list(dict.fromkeys(frame["run"]))
        parts = list(dict.fromkeys(frame["part"]))
        lines = len(_lines(parts, size))
        left = MARGIN_RIGHT if size.is_narrow or len(runs) == 1 else MARGIN_NAMES
        top = 1 - (MARGIN_TOP + LINE_PIXELS * (lines - 1)) / size.height
        figure, [axes] = new_figure(size, gridspec_kw={"left": left / size.width, "top": top})
        ends = dict.fromkeys(runs, 0.0)
        for run, part, value in zip(frame["run"], frame["part"], frame["value_ms"], strict=True):
            row = len(runs) - 1 - runs.index(run)
            axes.barh([row], [value], left=[ends[run]], height=0.5, color=PART_COLOURS[part], linewidth=0)
            text = f"{run + ', ' if len(runs) > 1 else ''}{part}: {format_number(float(value))} ms"
            add_hovers(axes, [ends[run] + value / 2], [float(row)], [text])
            ends[run] += value
        most, totals = max(ends.values()), frame.groupby("run")["total_ms"].first()
        for run, end in ends.items():
            row, text = len(runs) - 1 - runs.index(run), f"{format_number(float(totals[run]))} ms"
            axes.text(end + 0.01 * most, row, text, va="center", color=PALETTE["ink"])
        axes.set_xlim(0, most * (1.25 if size.is_narrow else 1.12))
        if len(runs) > 1:
            name_rows(axes, runs[::-1], size)
        else:
            axes.set_yticks([])
            axes.set_ylim(-0.6, 0.6)
        _horizontal_axis(axes, size)
        axes.set_xlabel("ms of an average request   ← better")
        name_parts(axes, parts, size)
        return figure


def _horizontal_axis(axes: Axes, size: Size) -> None:
    """The axis of horizontal bars: vertical grid lines and plain numbers."""
    axes.grid(visible=False, axis="y")
    axes.grid(visible=True, axis="x")
    axes.xaxis.set_major_locator(MaxNLocator(4 if size.is_narrow else 8))
    axes.xaxis.set_major_formatter(FuncFormatter(tick_number))


def name_parts(axes: Axes, parts: Sequence[str], size: Size) -> None:
    """Write the names of the parts in their colours above the axes, in one or more lines."""
    lines = _lines(parts, size)
    for number, line in enumerate(reversed(lines)):
        offset = 0.0
        for part in line:
            axes.annotate(
                part,
                (0.0, 1.0),
                xycoords="axes fraction",
                xytext=(offset * 72 / PIXELS_PER_INCH, 9 + number * LINE_PIXELS * 72 / PIXELS_PER_INCH),
                textcoords="offset points",
                color=PART_COLOURS[part],
                fontweight="bold",
            )
            offset += (len(part) + 2) * CHARACTER_PIXELS


def _lines(parts: Sequence[str], size: Size) -> list[list[str]]:
    lines: list[list[str]] = [[]]
    room = size.width - (2 * MARGIN_RIGHT if size.is_narrow else MARGIN_NAMES + MARGIN_RIGHT)
    for part in parts:
        if lines[-1] and sum((len(each) + 2) * CHARACTER_PIXELS for each in (*lines[-1], part)) > room:
            lines.append([])
        lines[-1].append(part)
    return lines


def cells(frame: pd.DataFrame, max_cells: int = 6) -> pd.DataFrame:
    """The cells of a heat map: at most `max_cells` in each direction, with edges at quantiles of the requests.

    frame: input_tokens, output_tokens, value_ms.
    Returns column, row, column_name, row_name, value_ms (the median), count.
    """
    column, column_names = _bands(frame["input_tokens"], max_cells)
    row, row_names = _bands(frame["output_tokens"], max_cells)
    values = frame["value_ms"].to_numpy(dtype=np.float64)
    places, cell, counts = np.unique(column * len(row_names) + row, return_inverse=True, return_counts=True)
    columns, rows = np.divmod(places, len(row_names))
    return pd.DataFrame(
        {
            "column": columns,
            "row": rows,
            "column_name": [column_names[each] for each in columns],
            "row_name": [row_names[each] for each in rows],
            "value_ms": [float(np.median(values[cell == each])) for each in range(len(places))],
            "count": counts,
        }
    )


def _bands(lengths: "pd.Series[float]", most: int) -> tuple[npt.NDArray[np.int64], list[str]]:
    """The band of each request, and the names of the bands: at most `most`, with about equal numbers of requests."""
    found = lengths.to_numpy(dtype=np.float64)
    edges = np.unique(np.quantile(found, np.linspace(0, 1, most + 1)).round())
    inner = edges[1:-1] if len(edges) > 2 else edges[:0]
    filled, band = np.unique(np.searchsorted(inner, found, side="right"), return_inverse=True)
    parts = (found[band == each] for each in range(len(filled)))
    return band, [_span(float(part.min()), float(part.max())) for part in parts]


def _span(low: float, high: float) -> str:
    return f"{low:,.0f}" if low == high else f"{low:,.0f}–{high:,.0f}"

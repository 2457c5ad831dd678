"""The base of every figure: sizes, colours and style, labels of axes and colours of series.

Figures use only the colours of `PALETTE`. Each colour is unique, so a renderer can replace it for another theme.
"""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from reports.document import Size

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
CHARACTER_PIXELS = 7.2
"""Mean width of a character of a series name."""

STYLE: dict[str, Any] = {
    "figure.dpi": PIXELS_PER_INCH,
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    "savefig.facecolor": "white",
    "savefig.transparent": False,
    "font.size": 8.5,
    "axes.labelsize": 8.5,
    "axes.titlesize": 8.5,
    # Fixed: otherwise each save measures the tick labels to keep the title away from labels above the axes. There are
    # no such labels.
    "axes.titley": 1.0,
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
    """Draw and save figures in the style of the reports.

    A label may contain characters that the bundled font lacks: a browser shows them, and a PNG shows boxes.
    """
    settings: Any = STYLE
    with mpl.rc_context(settings), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from")
        yield


MARGIN_LEFT, MARGIN_RIGHT, MARGIN_BOTTOM, MARGIN_TOP = 48, 18, 46, 32
"""Pixels around the axes: tick labels at the left, tick labels and the axis title below, the title row above."""
MARGIN_NAMES = 150
"""Pixels at the left of the axes for the names of rows."""


def new_figure(size: Size, rows: int = 1, **grid: Any) -> tuple[Figure, list[Axes]]:
    """A figure with fixed margins, so that figures side by side align and no layout pass is needed."""
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
    """A tick label that fits into the margin."""
    return f"{value / 1e3:,.6g}k" if abs(value) >= 1e4 else f"{value:,.6g}"


def axis_from_zero(
    axes: Axes, top: float, num_ticks: int = 4, *, headroom: float = 0.0, is_count: bool = False
) -> None:
    """A vertical axis from zero to the first tick above `top`, with room for labels as a fraction of `top`."""
    steps = MaxNLocator(num_ticks, integer=is_count, steps=[1, 2, 2.5, 5, 10], min_n_ticks=2)
    highest = top * (1 + headroom) if top > 0 else 1.0
    ticks = [float(tick) for tick in steps.tick_values(0, highest) if tick >= 0]
    if ticks[-1] < highest:
        ticks.append(2 * ticks[-1] - ticks[-2])
    axes.set_yticks(ticks)
    axes.set_ylim(0, ticks[-1])
    axes.yaxis.set_major_formatter(FuncFormatter(tick_number))


def series_colour(index: int) -> str:
    return PALETTE[f"series-{index % 6}"]


def label_axis(axes: Axes, text: str) -> None:
    """Write the title of the y axis above the axes, at the left."""
    axes.set_title(text, loc="left", color=PALETTE["muted"], pad=8)

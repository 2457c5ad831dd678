"""The base of every figure: sizes, colours and style, labels of axes and series, and saving as SVG and PNG.

Colours are those of `PALETTE`, each unique, so that a renderer can replace them for another theme.
"""

import dataclasses
import io
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from reports.document import Plot, Report, Size

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
    """Draw and save figures in the style of the reports.

    Labels may hold characters that the bundled font lacks: a browser shows them, a PNG shows boxes.
    """
    settings: Any = STYLE
    with mpl.rc_context(settings), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from")
        yield


# Pixels around the axes: left for tick labels, below for tick labels and the axis title, above for the title row.
MARGIN_LEFT, MARGIN_RIGHT, MARGIN_BOTTOM, MARGIN_TOP = 48, 12, 46, 32


MARGIN_NAMES = 150


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


def series_colour(index: int) -> str:
    return PALETTE[f"series-{index % 6}"]


def label_axis(axes: Axes, text: str) -> None:
    """A horizontal axis title above the axes, at the left."""
    axes.set_title(text, loc="left", color=PALETTE["muted"], pad=8)


def name_series(axes: Axes, labels: Sequence[str], size: Size, colours: Sequence[str] = ()) -> None:
    """The names of the series in their colours, in one row above the axes at the right; none for a single series."""
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


def name_rows(axes: Axes, names: Sequence[str], size: Size) -> None:
    """Row names at the left; in a narrow figure above each row."""
    axes.set_ylim(-0.5, len(names) - (0.25 if size.is_narrow else 0.5))
    if not size.is_narrow:
        axes.set_yticks(range(len(names)), names)
        return
    axes.set_yticks([])
    for row, name in enumerate(names):
        axes.text(0.0, row + 0.32, name, transform=axes.get_yaxis_transform(), color=PALETTE["muted"])


PNG_SCALE = 2


@dataclass(frozen=True, slots=True)
class Drawn:
    """One figure as files: SVG at both widths, and a PNG."""

    wide_svg: str
    narrow_svg: str
    png: bytes


def draw_all(report: Report) -> dict[str, Drawn]:
    """Every figure of a report, by name."""
    return {plot.name: _draw(plot) for plot in report.plots}


def _draw(plot: Plot) -> Drawn:
    size, narrow = (_scaled(each, plot.height) for each in (WIDE if plot.is_full_width else HALF, NARROW))
    wide = plot.draw(size)
    return Drawn(_saved(wide, "svg").decode(), _saved(plot.draw(narrow), "svg").decode(), _saved(wide, "png"))


def _scaled(size: Size, height: float) -> Size:
    return dataclasses.replace(size, height=round(size.height * height))


def _saved(figure: Figure, kind: str) -> bytes:
    target = io.BytesIO()
    metadata = {"Date": None, "Creator": None} if kind == "svg" else {"Software": None}
    with styled():
        figure.savefig(
            target, format=kind, dpi=PIXELS_PER_INCH * (PNG_SCALE if kind == "png" else 1), metadata=metadata
        )
    return target.getvalue()

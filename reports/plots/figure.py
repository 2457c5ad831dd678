"""The base of every figure: sizes, colours and style, labels of axes and series, and saving as SVG and PNG.

Figures use only the colours of `PALETTE`. Each colour is unique, so a renderer can replace it for another theme.
"""

import dataclasses
import io
import math
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any
from xml.sax.saxutils import escape

import matplotlib as mpl
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from reports.document import Plot, Report, Size
from reports.text import legible

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
    # Fixed: else each save measures the tick labels, to keep the title clear of labels above the axes; there are none.
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


class HoverArtist(Artist):
    """Texts that a page shows while the pointer is over a shape of a figure. Draws nothing."""

    def draw(self, renderer: Any) -> None:
        """Draw nothing; `elements` returns the shapes."""

    def elements(self) -> Iterator[str]:
        """The invisible SVG shapes, each with a title; lengths are in typographic points."""
        raise NotImplementedError

    def placed(self) -> tuple[Axes, float, float]:
        """The axes, typographic points per pixel, and the height of the figure in pixels."""
        axes, figure = self.axes, self.get_figure(root=True)
        assert isinstance(axes, Axes), "not added to axes"
        assert figure is not None, "not added to a figure"
        return axes, 72 / figure.dpi, figure.bbox.height


class Hovers(HoverArtist):
    """Texts over points. With `half_width`, over a band as high as the axes. An empty text has no shape."""

    def __init__(self, x: Iterable[float], y: Iterable[float], texts: Iterable[str], half_width: float = 0.0) -> None:
        super().__init__()
        self.points = [(float(left), float(low), text) for left, low, text in zip(x, y, texts, strict=True)]
        self.half_width = half_width

    def elements(self) -> Iterator[str]:
        """A shape for each point inside the axes."""
        axes, scale, height = self.placed()
        box = axes.get_window_extent()
        for x, y, text in self.points:
            if not text:
                continue
            left, low = axes.transData.transform((x, y))
            is_inside = box.x0 <= left <= box.x1 and (bool(self.half_width) or box.y0 <= low <= box.y1)
            if not (math.isfinite(left) and math.isfinite(low) and is_inside):
                continue
            title = f"<title>{escape(legible(text))}</title>"
            if self.half_width:
                start, _ = axes.transData.transform((x - self.half_width, y))
                shape = f'<rect x="{start * scale:.1f}" y="{(height - box.y1) * scale:.1f}" '
                shape += f'width="{2 * (left - start) * scale:.1f}" height="{box.height * scale:.1f}"'
                yield f"{shape}>{title}</rect>"
            else:
                yield f'<circle cx="{left * scale:.1f}" cy="{(height - low) * scale:.1f}" r="6">{title}</circle>'


class CellHovers(HoverArtist):
    """Texts over cells. A cell: left, right, low and high, and its text."""

    def __init__(self, cells: Iterable[tuple[float, float, float, float, str]]) -> None:
        super().__init__()
        self.cells = tuple(cells)

    def elements(self) -> Iterator[str]:
        """A rectangle for each cell."""
        axes, scale, height = self.placed()
        for left, right, low, high, text in self.cells:
            (x0, y0), (x1, y1) = axes.transData.transform([(left, low), (right, high)])
            shape = f'<rect x="{x0 * scale:.1f}" y="{(height - y1) * scale:.1f}" '
            shape += f'width="{(x1 - x0) * scale:.1f}" height="{(y1 - y0) * scale:.1f}"'
            yield f"{shape}><title>{escape(legible(text))}</title></rect>"


def add_cell_hovers(axes: Axes, cells: Iterable[tuple[float, float, float, float, str]]) -> None:
    """Show a text over each cell of the figure in a page. A cell: left, right, low and high, and its text."""
    axes.add_artist(CellHovers(cells))


def add_hovers(
    axes: Axes, x: Iterable[float], y: Iterable[float], texts: Iterable[str], half_width: float = 0.0
) -> None:
    """Show a text over each point of the figure in a page."""
    axes.add_artist(Hovers(x, y, texts, half_width))


def _with_hovers(figure: Figure, svg: bytes) -> bytes:
    """The SVG, and a group of the invisible shapes over which a text is shown."""
    shapes = [
        shape
        for axes in figure.axes
        for each in axes.artists
        if isinstance(each, HoverArtist)
        for shape in each.elements()
    ]
    if not shapes:
        return svg
    group = f'<g fill="none" stroke="none" pointer-events="all">{"".join(shapes)}</g>'
    start, end, rest = svg.decode().rpartition("</svg>")
    return f"{start}{group}{end}{rest}".encode()


def series_colour(index: int) -> str:
    return PALETTE[f"series-{index % 6}"]


def label_axis(axes: Axes, text: str) -> None:
    """Write the title of the y axis above the axes, at the left."""
    axes.set_title(text, loc="left", color=PALETTE["muted"], pad=8)


NAME_LINE_PIXELS = 15


def name_series(axes: Axes, labels: Sequence[str], size: Size, colours: Sequence[str] = ()) -> None:
    """Write the names of the series in their colours, in one row above the axes at the right.

    A single series is not named. Names that do not fit are cut, or in a narrow figure put in rows above the axis title.
    """
    if len(labels) < 2:
        return
    colours = colours or [series_colour(index) for index in range(len(labels))]
    room = (size.width - 180) / CHARACTER_PIXELS
    fits = sum(len(label) + 2 for label in labels) <= room
    if size.is_narrow and not fits:
        _name_above(axes, labels, size, colours)
        return
    most = max(4, int(room / len(labels)) - 2)
    offset = 0.0
    for index in reversed(range(len(labels))):
        text = labels[index] if fits else _shortened(labels[index], most)
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


def _shortened(text: str, most: int) -> str:
    return text if len(text) <= most else text[: most - 1] + "…"


def _name_above(axes: Axes, labels: Sequence[str], size: Size, colours: Sequence[str]) -> None:
    """Write the names in rows above the axis title, and make the axes lower by the height of these rows."""
    room = size.width - 90
    labels = [_shortened(label, int(room / CHARACTER_PIXELS)) for label in labels]
    lines = _name_lines(labels, room)
    box, line = axes.get_position(), NAME_LINE_PIXELS / size.height
    axes.set_position((box.x0, box.y0, box.width, box.height - line * (1 + max(row for row, _ in lines))))
    for label, colour, (row, offset) in zip(labels, colours, lines, strict=True):
        axes.annotate(
            label,
            (0.0, 1.0),
            xycoords="axes fraction",
            xytext=(offset * 72 / PIXELS_PER_INCH, (28 + NAME_LINE_PIXELS * row) * 72 / PIXELS_PER_INCH),
            textcoords="offset points",
            color=colour,
            fontweight="bold",
            fontsize=8.0,
        )


def _name_lines(names: Sequence[str], room: float) -> list[tuple[int, float]]:
    """Line number (0 is next to the axes) and offset in pixels of each name above a narrow figure."""
    row, offset, found = 0, 0.0, []
    for name in names:
        width = len(name) * CHARACTER_PIXELS
        if offset and offset + width > room:
            row, offset = row + 1, 0.0
        found.append((row, offset))
        offset += width + 1.5 * CHARACTER_PIXELS
    return found


def name_rows(axes: Axes, names: Sequence[str], size: Size) -> None:
    """Write the names of rows at the left; in a narrow figure, above each row."""
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
    """The files of one figure: SVG at both widths, and a PNG. `png` is empty if only a page is written."""

    wide_svg: str
    narrow_svg: str
    png: bytes


def draw_all(report: Report, *, has_png: bool = True) -> dict[str, Drawn]:
    """Every figure of a report, by name."""
    return {plot.name: _draw(plot, has_png=has_png) for plot in report.plots}


def _draw(plot: Plot, *, has_png: bool) -> Drawn:
    size, narrow = (_scaled(each, plot.height) for each in (WIDE if plot.is_full_width else HALF, NARROW))
    wide = plot.draw(size)
    png = _saved(wide, "png") if has_png else b""
    return Drawn(_saved(wide, "svg").decode(), _saved(plot.draw(narrow), "svg").decode(), png)


def _scaled(size: Size, height: float) -> Size:
    return dataclasses.replace(size, height=round(size.height * height))


def _saved(figure: Figure, kind: str) -> bytes:
    target = io.BytesIO()
    metadata = {"Date": None, "Creator": None} if kind == "svg" else {"Software": None}
    with styled():
        figure.savefig(
            target, format=kind, dpi=PIXELS_PER_INCH * (PNG_SCALE if kind == "png" else 1), metadata=metadata
        )
    return _with_hovers(figure, target.getvalue()) if kind == "svg" else target.getvalue()

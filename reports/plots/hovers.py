"""Texts that a page shows while the pointer is over a shape of a figure."""

import math
from collections.abc import Iterable, Iterator
from typing import Any
from xml.sax.saxutils import escape

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from reports.text import legible


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


def with_hovers(figure: Figure, svg: bytes) -> bytes:
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

"""Draws the figures of a report: SVG at two widths, and a PNG."""

import dataclasses
import io
from dataclasses import dataclass

from matplotlib.figure import Figure

from reports.document import Plot, Report, Size
from reports.plots.figure import HALF, NARROW, PIXELS_PER_INCH, WIDE, styled
from reports.plots.hovers import with_hovers

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
    png = saved(wide, "png") if has_png else b""
    return Drawn(saved(wide, "svg").decode(), saved(plot.draw(narrow), "svg").decode(), png)


def _scaled(size: Size, height: float) -> Size:
    return dataclasses.replace(size, height=round(size.height * height))


def saved(figure: Figure, kind: str) -> bytes:
    """A figure as the bytes of a file. kind: svg or png."""
    target = io.BytesIO()
    metadata = {"Date": None, "Creator": None} if kind == "svg" else {"Software": None}
    with styled():
        figure.savefig(
            target, format=kind, dpi=PIXELS_PER_INCH * (PNG_SCALE if kind == "png" else 1), metadata=metadata
        )
    return with_hovers(figure, target.getvalue()) if kind == "svg" else target.getvalue()

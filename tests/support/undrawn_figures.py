"""Reports without saved figures: each figure is drawn once, and its files stay empty.

Saving a figure three times takes most of the time of a report. Tests of commands compare files and numbers; tests of
reports, and the commands that tests start as processes, save the figures.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from reports.document import Report
from reports.plots.drawn_figures import Drawn
from reports.plots.figure import HALF
from reports.renderers import write

EMPTY = '<svg width="1" height="1" viewBox="0 0 1 1"></svg>'


@contextmanager
def undrawn_figures() -> Iterator[None]:
    """Reports of this process have empty figures."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(write, "draw_all", empty_figures)
        yield


def empty_figures(report: Report, *, has_png: bool = True) -> dict[str, Drawn]:
    """As `draw_all`: a figure that cannot be drawn still fails."""
    for plot in report.plots:
        plot.draw(HALF)
    return {plot.name: Drawn(EMPTY, EMPTY, b"PNG" if has_png else b"") for plot in report.plots}

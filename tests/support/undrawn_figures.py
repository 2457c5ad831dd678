"""Reports without saved figures: the first figure of a name is drawn, and all files stay empty.

Drawing a figure and saving it three times takes most of the time of a report. Tests of commands compare files and
numbers; tests of reports, and the commands that tests start as processes, save all figures.
"""

import functools
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
    """Reports of this process have empty figures; the first of each name is drawn."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(write, "draw_all", functools.partial(empty_figures, drawn=set()))
        yield


def empty_figures(report: Report, *, has_png: bool = True, drawn: set[str] | None = None) -> dict[str, Drawn]:
    """As `draw_all`: a figure that cannot be drawn still fails. drawn: names of figures that are not drawn again."""
    done = drawn if drawn is not None else set()
    for plot in report.plots:
        if plot.name not in done:
            plot.draw(HALF)
            done.add(plot.name)
    return {plot.name: Drawn(EMPTY, EMPTY, b"PNG" if has_png else b"") for plot in report.plots}

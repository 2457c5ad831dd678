"""Trials marked by their outcome, in shape and in colour, and the names of the outcomes."""

from collections.abc import Sequence

import pandas as pd
from matplotlib.axes import Axes

from reports.document import Size
from reports.plots.figure import (
    CHARACTER_PIXELS,
    PALETTE,
    PIXELS_PER_INCH,
    add_hovers,
    name_series,
)
from reports.study import TrialOutcome

OUTCOME_STYLE = {
    TrialOutcome.FEASIBLE: ("o", PALETTE["good"]),
    TrialOutcome.VIOLATED: ("D", PALETTE["series-4"]),
    TrialOutcome.NOT_SERVED: ("X", PALETTE["bad"]),
    TrialOutcome.FAILED: ("s", PALETTE["muted"]),
}
"""Shape and colour of each outcome."""
SHORT_OUTCOME = {
    TrialOutcome.FEASIBLE: "within limits",
    TrialOutcome.VIOLATED: "beyond a limit",
    TrialOutcome.NOT_SERVED: "could not serve",
    TrialOutcome.FAILED: "not measured",
}


def draw_outcomes(axes: Axes, frame: pd.DataFrame, x: str, y: str) -> None:
    """Draw a mark for each trial; a page shows the trial's text while the pointer is over the mark."""
    add_hovers(axes, frame[x], frame[y], frame["text"])
    for outcome, (marker, colour) in OUTCOME_STYLE.items():
        rows = frame[frame["outcome"] == outcome]
        axes.plot(rows[x], rows[y], marker, color=colour, markersize=6, alpha=0.85, markeredgewidth=0, linestyle="none")


def name_outcomes(axes: Axes, frame: pd.DataFrame, size: Size) -> None:
    """Write the outcomes in their colours beside the axis title, or above it in a narrow figure."""
    shown = [outcome for outcome in OUTCOME_STYLE if (frame["outcome"] == outcome).any()]
    if len(shown) < 2:
        return
    names, colours = [SHORT_OUTCOME[each] for each in shown], [OUTCOME_STYLE[each][1] for each in shown]
    if not size.is_narrow:
        name_series(axes, names, size, colours)
        return
    lines = _name_lines(names, size)
    box, line = axes.get_position(), 15 / size.height
    axes.set_position((box.x0, box.y0, box.width, box.height - line * (1 + max(row for row, _ in lines))))
    for name, colour, (row, offset) in zip(names, colours, lines, strict=True):
        axes.annotate(
            name,
            (0.0, 1.0),
            xycoords="axes fraction",
            xytext=(offset * 72 / PIXELS_PER_INCH, (26 + 15 * row) * 72 / PIXELS_PER_INCH),
            textcoords="offset points",
            color=colour,
            fontweight="bold",
            fontsize=8.0,
        )


def _name_lines(names: Sequence[str], size: Size) -> list[tuple[int, float]]:
    """Line number (0 is next to the axes) and offset in pixels of each name above a narrow figure."""
    room, row, offset, found = size.width - 90, 0, 0.0, []
    for name in names:
        width = len(name) * CHARACTER_PIXELS
        if offset and offset + width > room:
            row, offset = row + 1, 0.0
        found.append((row, offset))
        offset += width + 1.5 * CHARACTER_PIXELS
    return found

"""Trials marked by their outcome, in shape and in colour, and the names of the outcomes."""

import pandas as pd
from matplotlib.axes import Axes

from reports.document import Size
from reports.plots.figure import PALETTE
from reports.plots.hovers import add_hovers
from reports.plots.series_names import name_series
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
    """Write the outcomes in their colours after the axis title, or above it in a narrow figure."""
    shown = [outcome for outcome in OUTCOME_STYLE if (frame["outcome"] == outcome).any()]
    name_series(axes, [SHORT_OUTCOME[each] for each in shown], size, [OUTCOME_STYLE[each][1] for each in shown])

"""The intervals of a run that ended because an interval was narrow enough: `--converge`.

Such an end selects runs whose intervals are narrow by chance, and so short of their value. All intervals of the run are
therefore wider, by a factor chosen by simulation (docs/intervals.md, "Repeated looks").
"""

from reports.metrics.measured import Measured

CONVERGED = "converged"
"""The stop reason of a run that ended because its intervals were narrow enough."""
CONVERGED_FACTOR = 1.35
"""The length of each side of its intervals, divided by that in a run of a planned length."""


def interval_factor(measured: Measured) -> float:
    return CONVERGED_FACTOR if measured.window.stop_reason == CONVERGED else 1.0

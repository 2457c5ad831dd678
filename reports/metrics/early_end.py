"""The intervals of a run that ended because an interval was narrow enough: `--converge`.

Such an end selects runs whose intervals are narrow by chance, and so short of their value. All intervals of the run are
therefore wider, by a factor chosen by simulation (docs/intervals.md, "Repeated looks").
"""

import math

from reports.metrics.measured import Measured
from reports.metrics.run_metrics import RunMetric
from reports.metrics.titles import FRACTIONS
from reports.stats.estimators import Interval

CONVERGED = "converged"
"""The stop reason of a run that ended because its intervals were narrow enough."""
CONVERGED_FACTOR = 1.35
"""The length of each side of its intervals, divided by that in a run of a planned length."""


def interval_factor(measured: Measured) -> float:
    return CONVERGED_FACTOR if measured.window.stop_reason == CONVERGED else 1.0


def run_interval(metric: RunMetric, measured: Measured) -> Interval:
    """The value of a metric of the whole run, with the interval that the end of the run permits."""
    most = 1.0 if metric.name in FRACTIONS else math.inf
    return metric.function(measured).widened(interval_factor(measured), most=most)

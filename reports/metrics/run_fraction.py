"""The fraction of requests that meet a condition, with the interval that the ends of their runs permit."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from reports.metrics.early_end import DECIDED, DECISION_PROBABILITY, interval_factor
from reports.metrics.measured import Measured
from reports.metrics.requests.request_series import run_dependence
from reports.stats.estimators import Interval
from reports.stats.fraction_intervals import pooled_fraction


def run_fraction(measured: Measured, met: npt.NDArray[np.bool_]) -> Interval:
    """The fraction of the requests started in the window for which `met` holds. met: [these requests]."""
    return runs_fraction([(measured, met)])


def runs_fraction(runs: Sequence[tuple[Measured, npt.NDArray[np.bool_]]]) -> Interval:
    """The same over several runs; the run with the longest interval determines the rule.

    If a run ended by a decision, the interval is that of the decision. Longer sides of the usual interval do not
    suffice: if almost all requests meet the condition, the bound falls faster than the quantile grows.
    """
    dependent = [(met, run_dependence(measured, met)) for measured, met in runs]
    if any(measured.window.stop_reason in DECIDED for measured, _ in runs):
        return pooled_fraction(dependent, DECISION_PROBABILITY).interval
    factor = max(interval_factor(measured) for measured, _ in runs)
    return pooled_fraction(dependent).interval.widened(factor, most=1.0)

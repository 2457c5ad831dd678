"""The intervals of a run that ended because of its own values.

`--converge` ends runs whose intervals are narrow by chance, so that these often miss the true value.
`--stop-at-attainment` and `--stop-when-missed` end runs whose values are far from a target by chance. All intervals of
such a run are therefore wider (docs/intervals.md, "Repeated looks").
"""

import math

from reports.metrics.measured import Measured
from reports.metrics.requests.request_series import QUEUE_METRICS, QUEUE_PARTS
from reports.stats.estimators import Interval

CONVERGED = "converged"
"""The stop reason of a run that ended because its intervals were narrow enough."""
CONVERGED_FACTOR = 1.35
"""The length of each side of its intervals, divided by that in a run of a planned length."""
CONVERGED_WAIT_FACTOR = 1.7
"""The same for the upper side of a wait: an interval is narrow by chance if few requests waited."""

DECIDED = frozenset(("objective_met", "objective_missed", "limit_missed"))
"""The stop reasons of a run that ended because a value was decided, in up to 15 looks."""
DECISION_PROBABILITY = 1 - 0.05 / 15 / 2
"""The confidence of each bound of a decision on a fraction: two-sided 5 % over 15 looks, from 50 requests doubled to
800,000, by Bonferroni's inequality. The run's own fractions have the same bounds."""
DECIDED_FACTOR = 1.5
"""The length of each side of its other intervals: the normal quantile of that confidence by that of 95 %."""

WAITS = QUEUE_METRICS | {"ttfat_s", "ttfb_s"}


def interval_factor(measured: Measured) -> float:
    """The length of each side of an interval, divided by that in a run of a planned length."""
    reason = measured.window.stop_reason
    return CONVERGED_FACTOR if reason == CONVERGED else DECIDED_FACTOR if reason in DECIDED else 1.0


def latency_interval(found: Interval, measured: Measured, column: str) -> Interval:
    """An interval of a latency; it is widened if the run ended because of its own values."""
    if measured.window.stop_reason != CONVERGED:
        return found.widened(interval_factor(measured))
    is_blocking = measured.manifest.config.get("stream") is False
    is_wait = column in WAITS or (is_blocking and column in QUEUE_PARTS)
    return converged_interval(found, is_wait=is_wait)


def converged_interval(found: Interval, *, is_wait: bool = False, most: float = math.inf) -> Interval:
    """The interval in a run that ended because it was narrow. is_wait: of a latency that is mostly a wait."""
    return found.widened(CONVERGED_FACTOR, CONVERGED_WAIT_FACTOR if is_wait else CONVERGED_FACTOR, most=most)

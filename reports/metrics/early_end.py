"""The intervals of a run that ended because an interval was narrow enough: `--converge`.

Such an end selects runs whose intervals are narrow by chance, so that these often miss the true value. All intervals of
the run are therefore wider, by factors chosen by simulation (docs/intervals.md, "Repeated looks").
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

WAITS = QUEUE_METRICS | {"ttfat_s", "ttfb_s"}


def interval_factor(measured: Measured) -> float:
    return CONVERGED_FACTOR if measured.window.stop_reason == CONVERGED else 1.0


def latency_interval(found: Interval, measured: Measured, column: str) -> Interval:
    """An interval of a latency; it is widened if the run ended because its intervals were narrow."""
    is_blocking = measured.manifest.config.get("stream") is False
    is_wait = column in WAITS or (is_blocking and column in QUEUE_PARTS)
    return converged_interval(found, is_wait=is_wait) if measured.window.stop_reason == CONVERGED else found


def converged_interval(found: Interval, *, is_wait: bool = False, most: float = math.inf) -> Interval:
    """The interval in a run that ended because it was narrow. is_wait: of a latency that is mostly a wait."""
    return found.widened(CONVERGED_FACTOR, CONVERGED_WAIT_FACTOR if is_wait else CONVERGED_FACTOR, most=most)

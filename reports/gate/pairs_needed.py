"""The number of pairs with which a comparison finds a clear regression, estimated from the noise of its pairs."""

import math
from bisect import bisect_left

from reports.gate.comparison import CompareOptions, Comparison, MetricResult
from reports.gate.decide import Evidence, GateDecision
from reports.stats.estimators import student_quantile

MAX_PAIRS = 10_000


def pairs_needed(comparison: Comparison) -> int | None:
    """The number of pairs with which 80 % of comparisons find a clear regression in every undecided gated metric.

    A clear regression is `CLEAR_EFFECT` times the smallest effect of interest. None for stored runs, if these pairs are
    enough, or if more than `MAX_PAIRS` are needed.
    """
    undecided = [metric for metric in comparison.gated if metric.decision is GateDecision.INCONCLUSIVE]
    if comparison.is_stored or not undecided:
        return None
    needed = max(_pairs_of(metric, comparison.options) for metric in undecided)
    return needed if comparison.num_pairs < needed <= MAX_PAIRS else None


def _pairs_of(metric: MetricResult, options: CompareOptions) -> int:
    """The pairs that one metric needs; more than `MAX_PAIRS` if they cannot be estimated."""
    count, half = len(metric.d), metric.mean.hi - metric.mean.value
    if count < 2 or not half < math.inf:
        return MAX_PAIRS + 1
    error = half / student_quantile(1 - options.levels.bounds_level, count - 1)
    level, clear = options.claim_level(is_gated=True), metric.clear_limit

    def is_enough(pairs: int) -> bool:
        with_pairs = Evidence(0.0, error * math.sqrt(count / pairs), pairs - 1)
        return with_pairs.detectable(level, metric.limit) <= clear

    candidates = range(2, MAX_PAIRS + 1)
    return 2 + bisect_left(candidates, True, key=is_enough)

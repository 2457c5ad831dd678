"""Load points of one server: the knee, and the highest load within the objectives."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cached_property

import numpy as np
import numpy.typing as npt

from reports.metrics.checks.findings import Level, is_overloaded
from reports.metrics.early_end import interval_factor
from reports.metrics.requests.per_request import meets_objectives
from reports.metrics.requests.request_series import run_dependence
from reports.metrics.run_fraction import runs_fraction
from reports.metrics.summary import Analysis, metric_value
from reports.stats.capacity import Capacity, RunEvidence
from reports.stats.estimators import Interval

STOPPED_BY_OVERLOAD = "overload"
SHORT_OF_REQUESTS = ("completions", "steady_state")
"""Checks that fail for a run that is too short for its load. If one of them is invalid, the run's requests are
ignored."""
MIN_BEND = 0.1
"""Smallest distance of a knee above the straight line, in the unit square."""
MIN_POINTS = 4


class SloDecision(StrEnum):
    """The 95 % interval of a point's SLO attainment, compared with the target."""

    WITHIN = "within"
    BEYOND = "beyond"
    UNDECIDED = "undecided"


@dataclass(frozen=True)
class LoadPoint:
    """One load, a concurrency or a rate, and its runs."""

    load: float
    analyses: tuple[Analysis, ...]

    @property
    def first(self) -> Analysis:
        return self.analyses[0]

    @property
    def is_valid(self) -> bool:
        return all(each.summary["verdict"]["status"] != Level.INVALID for each in self.analyses)

    @property
    def is_overloaded(self) -> bool:
        """Whether a run overloaded the server: its queue grew, or it refused requests."""
        return any(_is_overloaded(each) for each in self.analyses)

    @cached_property
    def attainment(self) -> Interval | None:
        """Fraction of requests that meet every objective, over all runs of the point; None without objectives.

        Bounds are NaN for too few requests. They are further apart if a run ended because of its own values.
        """
        runs = [(each.measured, met) for each in self.analyses if (met := _meets(each)) is not None]
        return runs_fraction(runs) if runs else None

    @property
    def evidence(self) -> tuple[RunEvidence, ...]:
        """The evidence of each run on the capacity; none without objectives."""
        return tuple(_evidence(self.load, each, met) for each in self.analyses if (met := _meets(each)) is not None)

    def slo_decision(self, target: float) -> SloDecision | None:
        """The decision on the attainment at this load; None without objectives."""
        fraction = self.attainment
        if fraction is None:
            return None
        if fraction.lo >= target:
            return SloDecision.WITHIN
        return SloDecision.BEYOND if fraction.hi < target else SloDecision.UNDECIDED

    def value(self, name: str) -> float | None:
        """A metric of the first run, by its name in limits."""
        return metric_value(self.first.summary, name, self.first.run.manifest.is_open_loop)


def _meets(analysis: Analysis) -> npt.NDArray[np.bool_] | None:
    manifest = analysis.run.manifest
    met = meets_objectives(analysis.measured.judged, manifest.objectives, manifest.is_open_loop)
    return None if met is None else np.asarray(met, dtype=np.bool_)


def _evidence(load: float, analysis: Analysis, met: npt.NDArray[np.bool_]) -> RunEvidence:
    measured, verdict = analysis.measured, analysis.summary["verdict"]
    checks = {reason["check"]: reason["level"] for reason in verdict["reasons"]}
    is_short = any(checks.get(check) == Level.INVALID for check in SHORT_OF_REQUESTS)
    known = met[:0] if is_short else met
    found = RunEvidence.of(load, known, run_dependence(measured, met), measured.window.end_s, _is_overloaded(analysis))
    return replace(found, effective=found.effective / interval_factor(measured) ** 2)


def _is_overloaded(analysis: Analysis) -> bool:
    """Whether a run overloaded the server. A run that ended because of overload may be invalid for too few requests."""
    return analysis.measured.window.stop_reason == STOPPED_BY_OVERLOAD or is_overloaded(analysis.summary)


def find_knee(loads: Sequence[float], throughput: Sequence[float]) -> int | None:
    """Index of the point beyond which throughput grows less than in proportion to the load; None without such a bend.

    It is the point furthest above the line from the first to the last point, in a curve scaled to the unit square
    (Satopaa et al., "Finding a 'Kneedle' in a Haystack", 2011, without smoothing). Loads ascend.
    """
    if len(loads) < MIN_POINTS:
        return None
    x, y = np.asarray(loads, dtype=np.float64), np.asarray(throughput, dtype=np.float64)
    if np.isnan(y).any() or x[-1] <= x[0] or y.max() <= y.min():
        return None
    above = (y - y.min()) / (y.max() - y.min()) - (x - x[0]) / (x[-1] - x[0])
    best = int(np.argmax(above))
    return best if 0 < best < len(x) - 1 and above[best] >= MIN_BEND else None


def highest_within(points: Sequence[LoadPoint], target: float) -> LoadPoint | None:
    """The highest load such that it and all lower loads reach the target; None if there is none.

    Points ascend by load. The observed attainment is used, not its interval. An overloaded load does not reach the
    target.
    """
    found = None
    for point in points:
        fraction = point.attainment
        if not point.is_valid or point.is_overloaded or fraction is None or fraction.value < target:
            break
        found = point
    return found


@dataclass(frozen=True, slots=True)
class Sweep:
    """Load points of one server in ascending order. quantity: concurrency or rate. target: the required attainment.

    search: level and sentence of the result, for a sweep that was a search; `capacity`: its evidence.
    order: the loads in the order of measurement.
    """

    quantity: str
    points: tuple[LoadPoint, ...]
    target: float
    command: tuple[str, ...] = ()
    search: tuple[str, str] | None = None
    order: tuple[float, ...] = field(default=())
    capacity: Capacity | None = None

    @property
    def knee(self) -> LoadPoint | None:
        """The knee of the valid points."""
        valid = [point for point in self.points if point.is_valid]
        throughput = [point.value("output_tokens_per_s") for point in valid]
        index = find_knee([point.load for point in valid], [value or 0.0 for value in throughput])
        return None if index is None else valid[index]

    @property
    def has_objectives(self) -> bool:
        return bool(self.points[0].first.run.manifest.objectives)

    @property
    def within(self) -> LoadPoint | None:
        """The highest load within the objectives."""
        return highest_within(self.points, self.target) if self.has_objectives else None

    @property
    def invalid(self) -> tuple[LoadPoint, ...]:
        return tuple(point for point in self.points if not point.is_valid)

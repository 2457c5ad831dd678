"""Several load points of one server: the knee, and the highest load within the objectives."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
import pandas as pd

from reports.per_request import meets_objectives
from reports.stats import Interval, proportion
from reports.summary import Analysis, metric_value
from reports.validity import Level

# A curve whose throughput never rises so far above the straight line has no knee.
LEAST_BEND = 0.1
LEAST_POINTS = 4


class Standing(StrEnum):
    """Where a point's share of requests within the objectives lies, by its 95 % interval, against the target."""

    WITHIN = "within"
    BEYOND = "beyond"
    UNDECIDED = "undecided"


@dataclass(frozen=True, slots=True)
class LoadPoint:
    """One load, a concurrency or a rate, and the runs that were made of it."""

    load: float
    analyses: tuple[Analysis, ...]

    @property
    def first(self) -> Analysis:
        return self.analyses[0]

    @property
    def is_valid(self) -> bool:
        return all(each.summary["verdict"]["status"] != Level.INVALID for each in self.analyses)

    @property
    def attainment(self) -> Interval | None:
        """Share of requests that meet every objective, over all runs of the point; None without objectives."""
        indicators = [np.asarray(met, dtype=np.bool_) for each in self.analyses if (met := _meets(each)) is not None]
        return proportion(np.concatenate(indicators)) if indicators else None

    def standing(self, target: float) -> Standing | None:
        """None without objectives."""
        share = self.attainment
        if share is None:
            return None
        if share.lo >= target:
            return Standing.WITHIN
        return Standing.BEYOND if share.hi < target else Standing.UNDECIDED

    def value(self, name: str) -> float | None:
        """A metric of the first run, by the name that limits use."""
        return metric_value(self.first.summary, name, self.first.run.manifest.is_open_loop)


def _meets(analysis: Analysis) -> "pd.Series[bool] | None":
    manifest = analysis.run.manifest
    return meets_objectives(analysis.measured.population, manifest.objectives, manifest.is_open_loop)


def find_knee(loads: Sequence[float], throughput: Sequence[float]) -> int | None:
    """Index of the point where more load stops to bring throughput in proportion; None where the curve has no bend.

    The point furthest above the line from the first to the last of a curve scaled to the unit square (Satopaa et al.,
    "Finding a 'Kneedle' in a Haystack", 2011, without smoothing). Loads ascend.
    """
    if len(loads) < LEAST_POINTS:
        return None
    x, y = np.asarray(loads, dtype=np.float64), np.asarray(throughput, dtype=np.float64)
    if np.isnan(y).any() or x[-1] <= x[0] or y.max() <= y.min():
        return None
    above = (y - y.min()) / (y.max() - y.min()) - (x - x[0]) / (x[-1] - x[0])
    best = int(np.argmax(above))
    return best if 0 < best < len(x) - 1 and above[best] >= LEAST_BEND else None


def highest_within(points: Sequence[LoadPoint], target: float) -> LoadPoint | None:
    """The highest load whose share within the objectives reaches the target with all lower ones; None where none does.

    Points ascend by load; the observed share counts, its interval stands in the table.
    """
    found = None
    for point in points:
        share = point.attainment
        if not point.is_valid or share is None or share.value < target:
            break
        found = point
    return found

"""Whether the speed of a server is constant over a window: finds steps by CUSUM, and slopes.

The errors of both account for the autocorrelation of successive bins. The bounds were chosen by simulation of queues
and of a batching server; `benchmarks/results/steady_state.json` has the false alarms and the detected changes.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from reports.stats.estimators import student_quantile

Array = npt.NDArray[np.float64]

MIN_WINDOW_S = 10.0
FINEST_BINS = 60
BIN_COUNTS = (FINEST_BINS, 30, 20)
VALUES_PER_BIN = 5
BATCHES = 6
"""Number of batches of a latency. Means of long batches are nearly independent under a queue."""
EDGE_BINS = 4
"""Fewest bins on each side of a step."""
STEP_CHANGE, TREND_CHANGE = 0.03, 0.05
"""Smallest step and smallest trend that are reported, relative to the mean."""
MIN_REQUEST_TIMES, USUAL_REQUEST_TIMES = 10, 20
"""Shortest window in mean times of a request: for a check, and for a check with the usual bounds."""


@dataclass(frozen=True, slots=True)
class Strictness:
    """Bounds: the CUSUM statistic of a step, and two-sided error probabilities of the slopes of bins and of batches."""

    step: float
    slope: float
    batch_slope: float


USUAL = Strictness(step=6.0, slope=0.01, batch_slope=0.001)
SHORT = Strictness(step=7.0, slope=0.01, batch_slope=0.0003)
"""For short windows, in which the dependence of bins spans more bins."""


@dataclass(frozen=True, slots=True)
class WindowSeries:
    """The speed of a server over a window.

    tokens: [60], output tokens in equal spans of the window. latencies: by name, values in order of start.
    request_s: mean time of a request. offered: in an open loop, the output tokens of the requests that started in each
    span.
    """

    length_s: float
    request_s: float
    tokens: Array
    latencies: Mapping[str, Array]
    offered: Array | None = None

    @property
    def needed_s(self) -> float:
        """About the shortest window that can be checked; at most `length_s` if this window can be checked."""
        per_bin = float(np.median(_merged(self.tokens, BIN_COUNTS[-1])))
        needs = [MIN_WINDOW_S, MIN_REQUEST_TIMES * self.request_s]
        needs.append(self.length_s * VALUES_PER_BIN / max(per_bin, 0.5))
        needs += [
            self.length_s * BATCHES * VALUES_PER_BIN / len(values) for values in self.latencies.values() if len(values)
        ]
        return max(needs)

    @property
    def is_checkable(self) -> bool:
        return self.needed_s <= self.length_s

    @property
    def bins(self) -> Array:
        """Tokens per bin, with the most bins whose median is large enough."""
        merged = (_merged(self.tokens, count) for count in BIN_COUNTS[:-1])
        filled = (bins for bins in merged if np.median(bins) >= VALUES_PER_BIN)
        return next(filled, _merged(self.tokens, BIN_COUNTS[-1]))

    @property
    def step(self) -> "LevelStep | None":
        """A sudden change of tokens/s; None without one, or if the window cannot be checked."""
        step = find_step(self.bins, self._strictness) if self.is_checkable else None
        if step is None or self.offered is None:
            return step
        offered = LevelStep.at(step.cut, _merged(self.offered, len(self.bins)))
        return None if _explains(offered.change, step.change) else step

    def changes(self) -> dict[str, float]:
        """Significant changes from the window's start to its end, by series; at least -1. Empty if not checkable."""
        if not self.is_checkable:
            return {}
        slopes = {"throughput": self._trend()} if self.step is None else {}
        for name, values in self.latencies.items():
            if len(values):
                means = np.array([part.mean() for part in np.array_split(values, BATCHES)])
                slopes[name] = batch_trend(means, self._strictness)
        found = {name: start_to_end(slope) for name, slope in slopes.items() if slope is not None}
        return found if self.step is None else {"throughput": self.step.change} | found

    def _trend(self) -> float | None:
        change = trend(self.bins, self._strictness)
        if change is None or self.offered is None:
            return change
        return None if _explains(relative_slope(_merged(self.offered, len(self.bins))), change) else change

    @property
    def _strictness(self) -> Strictness:
        return USUAL if self.length_s >= USUAL_REQUEST_TIMES * self.request_s else SHORT


def _merged(tokens: Array, count: int) -> Array:
    merged: Array = tokens.reshape(count, -1).sum(axis=1)
    return merged


def _explains(offered: float, change: float) -> bool:
    """Whether the load explains a change of throughput: the offered tokens changed at least half as much."""
    return offered / change >= 0.5


@dataclass(frozen=True, slots=True)
class LevelStep:
    """A sudden change of level after `cut` bins."""

    cut: int
    before: float
    after: float

    @classmethod
    def at(cls, cut: int, series: Array) -> "LevelStep":
        return cls(cut, float(series[:cut].mean()), float(series[cut:].mean()))

    @property
    def change(self) -> float:
        """Relative to the level before the step."""
        return self.after / self.before - 1 if self.before else math.inf


def find_step(series: Array, strictness: Strictness) -> LevelStep | None:
    """The step at the largest weighted CUSUM; None unless it is significant and one side differs by over 3 %."""
    count, mean = len(series), float(series.mean())
    cuts = np.arange(EDGE_BINS, count - EDGE_BINS + 1)
    if not len(cuts) or mean <= 0:
        return None
    sums = np.cumsum(series - mean)[cuts - 1]
    weighted = np.abs(sums) / np.sqrt(cuts * (1 - cuts / count))
    best = int(np.argmax(weighted))
    step = LevelStep.at(int(cuts[best]), series)
    if max(abs(step.before - mean), abs(step.after - mean)) <= STEP_CHANGE * mean:
        return None
    rest = np.concatenate((series[: step.cut] - step.before, series[step.cut :] - step.after))
    inflation = variance_inflation(rest)
    error = math.sqrt(float(rest @ rest) / (count - 2) * inflation)
    return step if weighted[best] > strictness.step * (1 + 4 * inflation / count) * error else None


def variance_inflation(rest: Array) -> float:
    """The factor by which the first-order autocorrelation of residuals raises the variance of their mean.

    A short series underestimates the correlation, so the estimate is corrected upwards.
    """
    count, energy = len(rest), float(rest @ rest)
    correlation = float(rest[1:] @ rest[:-1]) / energy if energy else 0.0
    correlation += 1.5 * (1 + 4 * correlation) / count
    correlation = min(max(correlation, 0.0), 0.95)
    return (1 + correlation) / (1 - correlation)


def trend(series: Array, strictness: Strictness) -> float | None:
    """The change over a series by its least-squares line, relative to its mean; None without a significant one."""
    return _significant_change(series, strictness.slope, is_correlated=True)


def batch_trend(means: Array, strictness: Strictness) -> float | None:
    """As `trend`, for the means of a few long batches, which are nearly independent."""
    return _significant_change(means, strictness.batch_slope, is_correlated=False)


def relative_slope(series: Array) -> float:
    """The change over a series by its least-squares line, relative to its mean."""
    slope, mean = _line(series)[0], float(series.mean())
    return slope * len(series) / mean if mean > 0 else 0.0


def start_to_end(slope: float) -> float:
    """The change of a line relative to its start. slope: its change relative to the mean.

    The end of the line is at least 0, and its start at least a fortieth of the mean.
    """
    return max(0.0, 1 + slope / 2) / max(0.025, 1 - slope / 2) - 1


def _significant_change(series: Array, probability: float, *, is_correlated: bool) -> float | None:
    change = relative_slope(series)
    if abs(change) <= TREND_CHANGE:
        return None
    slope, rest, weight = _line(series)
    inflation = variance_inflation(rest) if is_correlated else 1.0
    error = math.sqrt(float(rest @ rest) / (len(series) - 2) * inflation / weight)
    freedom = max(3.0, len(series) / inflation - 2)
    return change if abs(slope) > student_quantile(1 - probability / 2, freedom) * error else None


def _line(series: Array) -> tuple[float, Array, float]:
    """The least-squares slope per bin, the residuals, and the sum of squares of the bins' positions."""
    x = np.arange(len(series)) - (len(series) - 1) / 2
    weight = float(x @ x)
    slope = float(x @ series) / weight
    return slope, series - series.mean() - slope * x, weight

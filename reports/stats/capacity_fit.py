"""The load at which stationary attainment equals a target: a logistic curve over load, with its 95 % band.

Each load is weighted by the number of independent requests of its run. The interval is Fieller's set: all loads whose
fitted attainment does not differ significantly from the target.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from reports.stats.estimators import Interval, student_quantile

Array = npt.NDArray[np.float64]

MIN_LOADS = 3
ITERATIONS = 60
PRIOR_FREEDOM = 4.0
"""Weight of the expected scatter around the curve, as a number of loads."""


@dataclass(frozen=True, slots=True)
class LoadShare:
    """The attainment at one load. `effective`: the number of independent requests with the same information."""

    load: float
    share: float
    effective: float


@dataclass(frozen=True, slots=True)
class CapacityFit:
    """logit(attainment) = intercept + slope * (load / scale - 1).

    information: [2, 2], of intercept and slope. dispersion: variance of the shares, divided by that of independent
    requests. quantile: Student's, for the 95 % bands.
    """

    intercept: float
    slope: float
    scale: float
    information: Array
    dispersion: float
    quantile: float
    target: float

    @staticmethod
    def of(shares: Sequence[LoadShare], target: float) -> "CapacityFit | None":
        """The maximum-likelihood curve; None for fewer than three loads."""
        if len({each.load for each in shares}) < MIN_LOADS:
            return None
        loads, observed, size = (
            np.array([getattr(each, name) for each in shares]) for name in ("load", "share", "effective")
        )
        # Half a request that met and half a request that missed are added, so that the curve is finite (Haldane and
        # Anscombe). They are spread over all loads: half a request for each run would lower the curve.
        added = 1 / len(size)
        observed, size = (observed * size + added / 2) / (size + added), size + added
        scale = float(np.median(loads))
        design = np.column_stack((np.ones(len(loads)), loads / scale - 1))
        beta = _maximum_likelihood(design, observed, size)
        fitted = _logistic(design @ beta)
        variance = np.maximum(fitted * (1 - fitted), 1e-12)
        freedom = len(loads) - 2
        scatter = float((size * (observed - fitted) ** 2 / variance).sum())
        dispersion = max(1.0, (scatter + PRIOR_FREEDOM) / (freedom + PRIOR_FREEDOM))
        information = design.T @ (design * (size * variance)[:, None])
        quantile = student_quantile(0.975, freedom + PRIOR_FREEDOM)
        return CapacityFit(float(beta[0]), float(beta[1]), scale, information, dispersion, quantile, target)

    @property
    def capacity(self) -> Interval:
        """The load at the target; the bounds are NaN if the points do not bound it, all is NaN for a rising curve."""
        if self.slope >= 0:
            return Interval(math.nan, math.nan, math.nan)
        distance = self.intercept - _logit(self.target)
        value = -distance / self.slope
        covariance = (self.quantile**2 * self.dispersion * np.linalg.pinv(self.information)).tolist()
        # Roots of (distance + slope * x)^2 = variance of the curve at x.
        second = self.slope**2 - covariance[1][1]
        first = 2 * (distance * self.slope - covariance[0][1])
        zeroth = distance**2 - covariance[0][0]
        root = first**2 - 4 * second * zeroth
        if second <= 0 or root < 0:
            return Interval(self.scale * (1 + value), math.nan, math.nan)
        lo, hi = (self.scale * (1 + (-first + sign * math.sqrt(root)) / (2 * second)) for sign in (-1, 1))
        return Interval(self.scale * (1 + value), lo, hi)

    def attainment(self, load: float) -> Interval:
        """The curve at a load, with its 95 % band."""
        place = self._place(load)
        middle = float(place @ (self.intercept, self.slope))
        half = self.quantile * math.sqrt(self.dispersion * float(place @ np.linalg.pinv(self.information) @ place))
        value, lo, hi = (float(_logistic(np.float64(each))) for each in (middle, middle - half, middle + half))
        return Interval(value, lo, hi)

    def variance_with(self, load: float, effective: float) -> float:
        """The relative variance of the capacity after `effective` more independent requests at `load`."""
        share, place = self.attainment(load).value, self._place(load)
        information = self.information + effective * share * (1 - share) * np.outer(place, place)
        root = self._place(self.capacity.value)
        return float(root @ np.linalg.pinv(information) @ root) / self.slope**2

    def _place(self, load: float) -> Array:
        return np.array((1.0, load / self.scale - 1))


def _maximum_likelihood(design: Array, observed: Array, size: Array) -> Array:
    """Intercept and slope by Newton's method; a step is halved until it does not lower the likelihood."""
    beta = np.array((_logit(float(np.average(observed, weights=size))), 0.0))
    best = _log_likelihood(beta, design, observed, size)
    for _ in range(ITERATIONS):
        fitted = _logistic(design @ beta)
        gradient = design.T @ (size * (observed - fitted))
        hessian = design.T @ (design * (size * np.maximum(fitted * (1 - fitted), 1e-9))[:, None])
        step = np.linalg.pinv(hessian) @ gradient
        while np.abs(step).max() > 1e-9:
            value = _log_likelihood(beta + step, design, observed, size)
            if value >= best:
                break
            step = step / 2
        beta, best = beta + step, _log_likelihood(beta + step, design, observed, size)
        if np.abs(step).max() <= 1e-9:
            break
    return beta


def _log_likelihood(beta: Array, design: Array, observed: Array, size: Array) -> float:
    place = design @ beta
    return float((size * (observed * place - np.logaddexp(0, place))).sum())


def _logistic(place: "Array | np.float64") -> Array:
    found: Array = 1 / (1 + np.exp(-np.clip(place, -500, 500)))
    return found


def _logit(share: float) -> float:
    return math.log(share / (1 - share))

"""Repeated looks at Student's t: how strict each look must be, and what a number of pairs can show."""

import math
from functools import lru_cache

import numpy as np
import numpy.typing as npt
from scipy import special

from reports.stats import student

SIMULATED_PATHS = 100_000
SEED = 20_240_229


@lru_cache(maxsize=256)
def nominal_level(looks: tuple[int, ...], alpha: float) -> float:
    """The one-sided level of each look with which all looks together err in `alpha` of cases.

    Pocock's constant level (Biometrika 64, 1977) for Student's t of normal differences; `looks` are numbers of pairs.

    >>> nominal_level((8,), 0.05)
    0.05
    """
    return alpha if len(looks) == 1 else float(np.quantile(_smallest_p(looks), alpha))


@lru_cache(maxsize=8)
def _smallest_p(looks: tuple[int, ...]) -> npt.NDArray[np.float64]:
    """The smallest p-value over the looks, of simulated paths of differences without an effect; the seed is fixed."""
    values = np.random.default_rng(SEED).standard_normal((SIMULATED_PATHS, looks[-1]))
    sums, squares = np.cumsum(values, axis=1), np.cumsum(values**2, axis=1)
    smallest = np.full(SIMULATED_PATHS, 1.0)
    for look in looks:
        mean = sums[:, look - 1] / look
        variance = (squares[:, look - 1] - look * mean**2) / (look - 1)
        smallest = np.minimum(smallest, special.stdtr(look - 1, -mean / np.sqrt(variance / look)))
    return smallest


def smallest_effect(deviation: float, pairs: int, level: float = 0.05) -> float:
    """The mean of d that pairs of deviation s_d show in four of five cases: (t_(1-level) + t_0.8) * s_d / sqrt(n)."""
    if pairs < 2:
        return math.inf
    return (student(1 - level, pairs - 1) + student(0.8, pairs - 1)) * deviation / math.sqrt(pairs)

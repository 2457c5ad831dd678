"""Splits the noise of interleaved pairs into launch, drift within a pair, and within run.

The model of a slice's value on the scale of d: level of the pair + launch (of a server) + drift (of a slice pair,
common to both sides) + noise of the slice. The components are moment estimates of a balanced nested analysis of
variance (Searle, Casella and McCulloch, Variance Components, 1992, chapter 4). A constant difference between the sides
has no effect on them.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import attrgetter

import numpy as np
import numpy.typing as npt
import pandas as pd

from reports.gate.side_run import Pair, SideRun, log_degradation
from reports.metrics.titles import percent_title

Array = npt.NDArray[np.float64]
MIN_PAIRS = 2


@dataclass(frozen=True, slots=True)
class NoiseSplit:
    """Variances of one metric's components, in the square of d's unit.

    launch: between launches of one server. drift: between the two halves of a pair, each as long as a run of one side.
    within: of one slice. deviation_d: standard deviation of the d of a pair.
    slices: the number of slices of each side in a pair. pairs: the number of pairs.
    """

    name: str
    launch: float
    drift: float
    within: float
    deviation_d: float
    slices: int
    pairs: int

    @classmethod
    def of(cls, name: str, a: Array, b: Array) -> "NoiseSplit":
        """The components of a metric. a, b: [pairs, slices], the values of both sides on the scale of d."""
        pairs, slices = a.shape
        difference, level = b - a, (a + b) / 2
        own = float(difference.var(axis=1, ddof=1).mean()) / 2
        between = float(difference.mean(axis=1).var(ddof=1))
        half = slices // 2
        moved = float(np.mean((level[:, -half:].mean(axis=1) - level[:, :half].mean(axis=1)) ** 2))
        return cls(
            name,
            launch=max(0.0, between / 2 - own / slices),
            drift=max(0.0, moved / 2 - own / (2 * half)),
            within=own,
            deviation_d=math.sqrt(between),
            slices=slices,
            pairs=pairs,
        )

    def interleaved(self, slices: int) -> float:
        """Standard deviation of the d of an interleaved pair with this number of slices per side."""
        return math.sqrt(2 * (self.launch + self.within / slices))

    def separate(self, slices: int) -> float:
        """Standard deviation of d for two runs of this number of slices, one after the other; includes the drift."""
        return math.sqrt(2 * (self.launch + self.drift + self.within / slices))


def split_noise(pairs: Sequence[Pair], names: Sequence[str]) -> tuple[NoiseSplit, ...]:
    """The components of each metric that every slice has; empty for fewer than two pairs or two slices a side."""
    slices = min((len(pair.slices) for pair in pairs), default=0)
    if len(pairs) < MIN_PAIRS or slices < 2:
        return ()
    found = []
    for name in names:
        a, b = (_values(pairs, name, each, slices) for each in (attrgetter("a"), attrgetter("b")))
        if a is not None and b is not None:
            found.append(NoiseSplit.of(name, a, b))
    return tuple(found)


def _values(pairs: Sequence[Pair], name: str, side: Callable[[Pair], SideRun], slices: int) -> Array | None:
    """The values of one side on the scale of d, [pairs, slices]; None if a slice lacks the metric."""
    values = [side(each).values.get(name) for pair in pairs for each in pair.slices[:slices]]
    scaled = log_degradation(values, name)
    return None if scaled is None else scaled.reshape(len(pairs), slices)


def components_table(found: Sequence[NoiseSplit]) -> pd.DataFrame:
    """A row per metric, in percent: the standard deviation of each component, and of d in both designs of a pair."""
    return pd.DataFrame(
        {
            "metric": percent_title(each.name),
            "launch": 100 * math.sqrt(each.launch),
            "drift within a pair": 100 * math.sqrt(each.drift),
            "within run": 100 * math.sqrt(each.within),
            "pair, separate runs": 100 * each.separate(each.slices),
            "pair, interleaved": 100 * each.deviation_d,
        }
        for each in found
    )

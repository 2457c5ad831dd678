"""The metrics of token events, pooled over requests: gaps between events, and ITL."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from reports.metrics.measured import Array, Measured
from reports.metrics.requests.bursts import inter_token_times
from reports.metrics.requests.per_request import (
    Direction,
)


@dataclass(frozen=True, slots=True)
class PooledMetric:
    """A value per token event or token, pooled over requests.

    `function` returns the values in the order of the requests, and the number of values of each request.
    """

    name: str
    title: str
    unit: str
    direction: Direction
    formula: str
    function: Callable[[Measured], tuple[Array, npt.NDArray[np.int64]]]


def _gaps(measured: Measured) -> tuple[Array, npt.NDArray[np.int64]]:
    gaps = measured.counted_events.gaps
    return gaps.values / 1e9, gaps.sizes


def _itl(measured: Measured) -> tuple[Array, npt.NDArray[np.int64]]:
    return inter_token_times(measured.counted_events)


POOLED = (
    PooledMetric("gap_s", "Gap", "s", Direction.LOWER, "t_event[i] - t_event[i-1]", _gaps),
    PooledMetric(
        "itl_s", "ITL", "s", Direction.LOWER, "time before a burst of events, split evenly over its tokens", _itl
    ),
)

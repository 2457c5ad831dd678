"""Bursts: token events that arrive together, as those of accepted drafts or of a buffer that was released.

A server that accepts three drafted tokens may send one event of four tokens, or four events at once. Both are one burst
of four tokens.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from reports.metrics.measured import Array
from reports.request_columns import TokenEvents

INSIDE_BURST = 0.1
"""A gap below this fraction of the mean gap is inside a burst, if it is also below `MOST_INSIDE_S`."""
MOST_INSIDE_S = 0.001
"""Long stalls raise the mean gap; a server writes the events of one step faster than this."""


def inside_burst_s(gap_ns: npt.NDArray[np.int64] | npt.NDArray[np.int32]) -> float:
    """The bound below which a gap is inside a burst, in seconds; 0 without gaps."""
    return min(INSIDE_BURST * float(gap_ns.mean()) / 1e9, MOST_INSIDE_S) if len(gap_ns) else 0.0


@dataclass(frozen=True, slots=True)
class BurstSize:
    """events: mean number of events in a burst. interval_s: median time between two bursts of an answer."""

    events: float
    interval_s: float


def burst_size(events: TokenEvents) -> BurstSize | None:
    """The bursts of all answers; None without a gap between bursts."""
    gap_ns = events.gaps.values
    between_ns = gap_ns[gap_ns >= 1e9 * inside_burst_s(gap_ns)]
    if not len(between_ns):
        return None
    streams = int((events.gaps.sizes > 0).sum())
    return BurstSize((len(gap_ns) + streams) / (len(between_ns) + streams), float(np.median(between_ns)) / 1e9)


def inter_token_times(events: TokenEvents) -> tuple[Array, npt.NDArray[np.int64]]:
    """The time before each burst, divided evenly among its tokens: a value per token, and values per request.

    The first event of a request has no time before it, so its tokens have no value.
    """
    bound_s = inside_burst_s(events.gaps.values)
    values: list[Array] = []
    sizes = np.zeros(len(events.first_ns), dtype=np.int64)
    for batch in events.batches():
        is_first = np.isnan(batch.gap_s)
        starts = np.flatnonzero(is_first | (batch.gap_s >= bound_s))
        if not len(starts):
            continue
        counted = np.where(is_first, 0, np.maximum(np.rint(batch.tokens), 1)).astype(np.int64)
        time_s = np.add.reduceat(np.nan_to_num(batch.gap_s), starts)
        tokens = np.add.reduceat(counted, starts)
        sizes += np.bincount(batch.request, weights=counted, minlength=len(sizes)).astype(np.int64)
        values.append(np.repeat(time_s / np.maximum(tokens, 1), tokens))
    return np.concatenate(values or [np.empty(0)]), sizes

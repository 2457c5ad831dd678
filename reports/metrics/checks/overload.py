"""Overload in an open loop: the queue grows, or requests are refused. The finding is about the server, not the run."""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from reports.metrics.measured import Array, Measured
from reports.metrics.windows import UNEVEN_MODES
from reports.run_schema import Status

MIN_UNANSWERED = 0.05
"""Smallest share of unanswered arrivals that is an overload."""
SIGNIFICANCE = 2.5
"""Smallest difference between arrivals and departures, in standard errors of Poisson counts."""
MAX_REFUSED = 0.02
"""Largest share of refused requests that is not an overload."""
FIRST_REQUESTS, FIRST_SHARE = 10, 0.1
"""The first requests of a run: this number, or this share of all if that is more."""
FILL_TIMES = 2.0
"""Time in which the server fills up, as a multiple of the longest of its first requests; only later growth counts."""


@dataclass(frozen=True, slots=True)
class Overload:
    """Rates over the window. refused: share of the started requests. is_growing: latencies grow with time."""

    arrivals_per_s: float
    completions_per_s: float
    refused: float
    is_growing: bool

    @property
    def message(self) -> str:
        refused = f", {self.refused:.0%} refused".replace("%", " %") if self.refused > MAX_REFUSED else ""
        return f"overloaded: arrivals {self.arrivals_per_s:.3g}/s, completions {self.completions_per_s:.3g}/s{refused}"

    def to_json(self) -> dict[str, Any]:
        return {
            "arrivals_per_s": self.arrivals_per_s,
            "completions_per_s": self.completions_per_s,
            "refused": self.refused,
            "latencies_grow": self.is_growing,
        }


def find_overload(measured: Measured) -> Overload | None:
    """The overload of an open loop; None if there is none.

    A burst is never an overload. If the rate is not constant, only refused requests count.
    """
    manifest, window = measured.manifest, measured.window
    if not manifest.is_open_loop or manifest.mode == "burst" or window.length_s <= 0 or not measured.started.any():
        return None
    refused = float((measured.population["status"] == Status.OVERLOADED).mean())
    is_growing = manifest.stop_reason == "overload" or (manifest.mode not in UNEVEN_MODES and _is_growing(measured))
    if not is_growing and refused <= MAX_REFUSED:
        return None
    ended_s = measured.requests["t_end_ns"][measured.requests["status"] == Status.OK] / 1e9
    completions = int(window.contains(ended_s).sum())
    return Overload(int(measured.started.sum()) / window.length_s, completions / window.length_s, refused, is_growing)


def _is_growing(measured: Measured) -> bool:
    """Whether the number of requests without a first token, or in flight, grows over the window."""
    requests, window = measured.requests, measured.window
    start_s = np.asarray(requests["start_s"], dtype=np.float64)
    end_s = np.asarray(requests["t_end_ns"] / 1e9, dtype=np.float64)
    answer_s = np.asarray((requests["t_first_ns"] / 1e9).fillna(requests["t_end_ns"] / 1e9), dtype=np.float64)
    return any(is_growing(start_s, leave_s, window.start_s, window.end_s) for leave_s in (answer_s, end_s))


def is_growing(start_s: Array, leave_s: Array, window_start_s: float, window_end_s: float) -> bool:
    """Whether significantly fewer requests left than started. start_s ascends; leave_s is NaN without an end.

    While a server fills up, fewer requests leave than start, too. This time is ignored; it depends on the duration of
    the first requests.
    """
    first = max(FIRST_REQUESTS, math.ceil(FIRST_SHARE * len(start_s)))
    stays = (np.where(np.isnan(leave_s), np.inf, leave_s) - start_s)[:first]
    if not len(stays):
        return False
    filled_s = max(window_start_s, float(start_s[0] + FILL_TIMES * stays.max()))
    if filled_s > window_end_s - (window_end_s - window_start_s) / 3:
        return False
    arrived = int(((start_s > filled_s) & (start_s <= window_end_s)).sum())
    left = int(((leave_s > filled_s) & (leave_s <= window_end_s)).sum())
    return arrived - left > max(MIN_UNANSWERED * arrived, SIGNIFICANCE * math.sqrt(arrived + left))

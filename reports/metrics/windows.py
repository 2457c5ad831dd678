"""The measurement window of a run, and the number of requests in flight over time."""

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pandas as pd

from reports.metrics.steadiness import series_between
from reports.request_columns import TokenEvents
from reports.run_schema import Phase
from reports.run_store import RunManifest
from reports.stats.estimators import Slope, newey_west_slope

Array = npt.NDArray[np.float64]

UNEVEN_MODES = frozenset(("trace", "burst", "stages"))
"""Modes of a load whose rate is not constant; such a run has no steady state."""
COUNTED_ENDS = frozenset(("requests", "end_of_trace"))
"""Stop reasons of a window that ends with the start of its last request."""


@dataclass(frozen=True, slots=True)
class Window:
    """The measurement window in seconds since the run's start.

    warmup_rule: the rule that determined the end of the warm-up. truncation_s: the end of a removed slow start.
    """

    start_s: float
    end_s: float
    warmup_rule: str
    truncation_s: float | None
    drain_s: float | None
    stop_reason: str | None
    is_steady: bool = True

    @property
    def length_s(self) -> float:
        return self.end_s - self.start_s

    def contains(self, t_s: "Array | pd.Series[float]") -> npt.NDArray[np.bool_]:
        """Whether each time is in the window; False for a missing time."""
        moments = np.asarray(t_s, dtype=np.float64)
        return (moments >= self.start_s) & (moments <= self.end_s)


@dataclass(frozen=True, slots=True)
class Concurrency:
    """Requests in flight as a step function: `level[i]` holds from `t_s[i]` to `t_s[i + 1]`."""

    t_s: Array
    level: Array

    @classmethod
    def of(cls, sent_s: Array, end_s: Array) -> "Concurrency":
        """From the times of sends and ends, [requests]. An unsent request is ignored; one without an end never ends."""
        was_sent = ~np.isnan(sent_s)
        starts = sent_s[was_sent]
        ends = end_s[was_sent & ~np.isnan(end_s)]
        moments = np.concatenate((starts, ends))
        changes = np.concatenate((np.ones(len(starts)), -np.ones(len(ends))))
        # At equal times an end precedes a start; otherwise a closed loop would exceed its number of users.
        order = np.lexsort((changes, moments))
        return cls(moments[order], np.cumsum(changes[order]))

    def within(self, start_s: float, end_s: float) -> tuple[Array, Array]:
        """Levels in [start, end], and the duration of each."""
        inside = (self.t_s > start_s) & (self.t_s < end_s)
        before = int(np.searchsorted(self.t_s, start_s, side="right"))
        first = self.level[before - 1] if before else 0.0
        edges = np.concatenate(([start_s], self.t_s[inside], [end_s]))
        return np.concatenate(([first], self.level[inside])), np.diff(edges)

    def mean(self, start_s: float, end_s: float) -> float:
        """The time-weighted mean."""
        levels, durations = self.within(start_s, end_s)
        return float(levels @ durations) / (end_s - start_s) if end_s > start_s else math.nan

    def median(self, start_s: float, end_s: float) -> float:
        """The time-weighted median."""
        levels, durations = self.within(start_s, end_s)
        order = np.argsort(levels)
        passed = np.cumsum(durations[order])
        return float(levels[order][np.searchsorted(passed, passed[-1] / 2)])

    def max(self, start_s: float, end_s: float) -> float:
        levels, durations = self.within(start_s, end_s)
        return float(levels[durations > 0].max(initial=0.0))

    def means(self, edges: Array) -> Array:
        """The time-weighted mean between each pair of successive edges."""
        if not len(self.t_s):
            return np.zeros(len(edges) - 1)
        area = np.concatenate(([0.0], np.cumsum(self.level[:-1] * np.diff(self.t_s))))
        index = np.searchsorted(self.t_s, edges, side="right") - 1
        until = np.where(index >= 0, area[index] + self.level[index] * (edges - self.t_s[index]), 0.0)
        return np.diff(until) / np.diff(edges)


def starts_s(frame: pd.DataFrame, is_open_loop: bool) -> Array:
    """The start of each request in seconds: the intended start in an open loop, the send in a closed loop."""
    intended, sent = frame["t_intended_ns"], frame["t_sent_ns"]
    first, second = (intended, sent) if is_open_loop else (sent, intended)
    return np.asarray(first.fillna(second).fillna(frame["t_dispatch_ns"]) / 1e9, dtype=np.float64)


def phases(frame: pd.DataFrame, manifest: RunManifest) -> "pd.Series[str]":
    """The phase of each request; the phase of a request that started after the window is `drain`.

    The end of the window can reach a worker late, after it recorded later requests with another phase.
    """
    if manifest.window_end_s is None:
        return frame["phase"]
    start_ns = frame["t_intended_ns" if manifest.is_open_loop else "t_dispatch_ns"]
    return frame["phase"].where(~(start_ns >= round(manifest.window_end_s * 1e9)), Phase.DRAIN)


def find_window(frame: pd.DataFrame, events: TokenEvents, manifest: RunManifest) -> Window:
    """The window of a run: from the end of the warm-up to the end of the load.

    The warm-up ends when the configured time has passed, every slot of a closed loop has completed a request, and a
    slow start has ended. frame: requests in the order of their start, with the per-request metrics.

    Without a recorded end (after a crash) the window ends at the last send. If a number of requests ended the load, the
    window includes the last send; if no request had ended by then, as in a burst, it ends with the last response.
    """
    sent_s, end_s = _column_s(frame, "t_sent_ns"), _column_s(frame, "t_end_ns")
    is_measured = np.asarray(frame["phase"] != Phase.DRAIN)
    end = _end_s(sent_s[is_measured], end_s[is_measured], manifest)
    concurrency = Concurrency.of(sent_s, end_s)
    ends = {"configured": manifest.warmup_s, "every slot": _slots_done_s(concurrency, sent_s, end_s, manifest)}
    rule, start = max(ends.items(), key=lambda item: item[1])
    is_steady = start <= end / 2 or start <= manifest.warmup_s
    if not is_steady or start >= end:
        # The report starts at the configured warm-up; the verdict states that the run has no steady state.
        rule, start = "configured", manifest.warmup_s if manifest.warmup_s < end else 0.0
    cut_s = None
    if is_steady and manifest.mode not in UNEVEN_MODES:
        cut_s = _slow_start_s(start, end, frame, events, is_open_loop=manifest.is_open_loop)
    if cut_s is not None:
        rule, start = "step", cut_s
    return Window(start, end, rule, cut_s, manifest.drain_s, manifest.stop_reason, is_steady)


def _slow_start_s(
    start_s: float, end_s: float, frame: pd.DataFrame, events: TokenEvents, *, is_open_loop: bool
) -> float | None:
    """The end of a slow start: a step up of tokens/s in the first third of the window; None without such a step.

    The rest of the window must be long enough for a check. A later step, or a step down, is not a warm-up; the verdict
    names it.
    """
    series = series_between(start_s, end_s, frame, events, is_open_loop=is_open_loop)
    step = series.step
    if step is None or step.change <= 0 or step.cut > len(series.bins) / 3:
        return None
    cut_s = start_s + series.length_s * step.cut / len(series.bins)
    rest = series_between(cut_s, end_s, frame, events, is_open_loop=is_open_loop)
    return cut_s if rest.is_checkable else None


def _end_s(sent_s: Array, end_s: Array, manifest: RunManifest) -> float:
    """The end of the window. sent_s, end_s: of the requests before the drain."""
    end = manifest.window_end_s
    last_sent_s, last_end_s = (float(np.nanmax(t)) if np.any(~np.isnan(t)) else None for t in (sent_s, end_s))
    if last_sent_s is None or last_end_s is None:
        return max(manifest.warmup_s if end is None else end, 0.0)
    if end is None:
        end = last_sent_s
    elif manifest.stop_reason in COUNTED_ENDS:
        end = max(end, last_sent_s)
    is_burst = manifest.mode == "burst" or (manifest.stop_reason in COUNTED_ENDS and not np.any(end_s <= end))
    return max(last_end_s if is_burst else end, 0.0)


def _column_s(frame: pd.DataFrame, name: str) -> Array:
    return np.asarray(frame[name], dtype=np.float64) / 1e9


def _slots_done_s(concurrency: Concurrency, sent_s: Array, end_s: Array, manifest: RunManifest) -> float:
    """The time by which all requests in flight at the first full load of a closed loop ended; 0 in an open loop."""
    if manifest.is_open_loop or not manifest.slots:
        return 0.0
    full = np.flatnonzero(concurrency.level >= manifest.slots)
    first_starts = np.sort(sent_s[~np.isnan(sent_s)])[: manifest.slots]
    if not len(first_starts):
        return 0.0
    # Users with a think time may never be busy all at once; the first request of each user is used instead.
    moment = float(concurrency.t_s[full[0]]) if len(full) else float(first_starts[-1])
    with np.errstate(invalid="ignore"):
        running = (sent_s <= moment) & ~(end_s <= moment)
    ends = end_s[running]
    return float(np.nanmax(ends)) if np.any(~np.isnan(ends)) else 0.0


def slopes(window: Window, start_s: Array, ttft_s: Array, in_flight: tuple[Array, Array]) -> dict[str, Slope | None]:
    """Slopes of TTFT (in s) and of requests in flight over the window, per second. in_flight: times and levels."""
    known = window.contains(start_s) & ~np.isnan(ttft_s)
    order = np.argsort(start_s[known], kind="stable")
    moments, levels = in_flight
    inside = window.contains(moments)
    return {
        "TTFT": newey_west_slope(start_s[known][order], ttft_s[known][order]),
        "requests in flight": newey_west_slope(moments[inside], levels[inside]),
    }

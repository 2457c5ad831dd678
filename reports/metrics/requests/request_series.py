"""The per-request metrics of a run as dependent series, for their intervals."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from reports.metrics.measured import Array, Measured
from reports.stats.dependence import Dependence, state_time
from reports.stats.queue_intervals import QueueSeries, lifetimes

QUEUE_PARTS = {"e2e_s": "ttft_s", "e2e_co_s": "ttft_co_s"}
"""The part of an end-to-end latency that contains the wait in the server's queue."""
QUEUE_METRICS = frozenset(QUEUE_PARTS.values())


@dataclass(frozen=True, slots=True)
class RequestSeries:
    """The requests that started in the window, in order of start.

    state: autocorrelation time of the queue, in requests; None if it is unknown. busy_s: mean E2E latency.
    lifetimes: length of the run in times of its long requests.
    """

    measured: Measured
    state: float | None
    busy_s: float
    lifetimes: float

    @classmethod
    def of(cls, measured: Measured) -> "RequestSeries":
        population, is_open = measured.population, measured.manifest.is_open_loop
        first_token = np.asarray(population["ttft_co_s" if is_open else "ttft_s"].dropna(), dtype=np.float64)
        companions = [first_token, _found_in_flight(measured)] if is_open else [first_token]
        e2e = population["e2e_s"]
        done = population[e2e.notna()]
        served = done["e2e_s"] - done["ttft_s"].fillna(0.0)
        return cls(
            measured,
            state_time(companions),
            float(e2e.mean()) if e2e.notna().any() else 0.0,
            lifetimes(np.asarray(done["start_s"], dtype=np.float64), np.asarray(served, dtype=np.float64)),
        )

    def series(self, name: str, own: npt.NDArray[np.bool_] | None = None) -> QueueSeries:
        """The known values of a per-request metric, by its column. own: the requests to use, [population]; None: all.

        The dependence of a part of the requests is at least that of the queue of the whole run.
        """
        population = self.measured.population if own is None else self.measured.population[own]
        values = population[name].to_numpy(dtype=np.float64)
        known = ~np.isnan(values)
        part = QUEUE_PARTS.get(name)
        queue = None if part is None else population[part].to_numpy(dtype=np.float64)[known]
        if queue is not None and np.isnan(queue).any():
            queue = None  # blocking calls have no first token
        busy_s = self.busy_s if name in QUEUE_METRICS else 0.0
        return QueueSeries.of(values[known], self.state, queue, busy_s, self.lifetimes)


def run_dependence(measured: Measured, met: npt.NDArray[np.bool_]) -> Dependence:
    """The dependence of the run's TTFT; of E2E for blocking calls, which have no first token; else of `met`."""
    series = RequestSeries.of(measured)
    first_token = series.series("ttft_co_s" if measured.manifest.is_open_loop else "ttft_s")
    chosen = first_token if len(first_token.values) else series.series("e2e_s")
    return chosen.dependence if len(chosen.values) else Dependence.of(met.astype(np.float64))


def _found_in_flight(measured: Measured) -> Array:
    """Requests in flight at each start in the window."""
    start_s = np.asarray(measured.requests["start_s"], dtype=np.float64)
    end_s = np.asarray(measured.requests["t_end_ns"], dtype=np.float64) / 1e9
    ends: npt.NDArray[np.float64] = np.sort(end_s[~np.isnan(end_s)])
    found = np.arange(len(start_s)) - np.searchsorted(ends, start_s, side="right")
    return found[measured.started].astype(np.float64)

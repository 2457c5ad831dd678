"""The per-request metrics of a run as dependent series, for their intervals."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from reports.metrics.measured import Measured
from reports.metrics.requests.queue_state import QueueState
from reports.stats.dependence import Dependence
from reports.stats.queue_intervals import QueueSeries

QUEUE_PARTS = {"e2e_s": "ttft_s", "e2e_co_s": "ttft_co_s"}
"""The part of an end-to-end latency that contains the wait in the server's queue."""
QUEUE_METRICS = frozenset(QUEUE_PARTS.values())


@dataclass(frozen=True, slots=True)
class RequestSeries:
    """The requests that started in the window, in order of start, and the state of their queue."""

    measured: Measured
    queue: QueueState

    @classmethod
    def of(cls, measured: Measured) -> "RequestSeries":
        return cls(measured, measured.queue_state)

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
        busy_s = self.queue.busy_s if name in QUEUE_METRICS else 0.0
        return QueueSeries.of(values[known], self.queue.state, queue, busy_s, self.queue.lifetimes)


def run_dependence(measured: Measured, met: npt.NDArray[np.bool_]) -> Dependence:
    """The dependence of the run's TTFT; of E2E for blocking calls, which have no first token; else of `met`."""
    found = measured.queue_state.first_latency
    return Dependence.of(met.astype(np.float64)) if found is None else found

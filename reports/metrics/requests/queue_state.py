"""The state of the server's queue in a run: how long successive requests depend on each other."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pandas as pd

from reports.stats.dependence import Dependence, state_time
from reports.stats.queue_intervals import lifetimes

Array = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class QueueState:
    """The dependence of the requests that started in the window, from the series that show their queue.

    state: autocorrelation time of the queue, in requests; None if it is unknown. busy_s: mean E2E latency.
    lifetimes: length of the run in times of its long requests. first_latency: the dependence of TTFT; of E2E for
    blocking calls, which have no first token; None if no request has either.
    """

    state: float | None
    busy_s: float
    lifetimes: float
    first_latency: Dependence | None

    @classmethod
    def of(cls, requests: pd.DataFrame, started: npt.NDArray[np.bool_], *, is_open_loop: bool) -> "QueueState":
        """requests: all of the run, in order of start. started: [requests], whether each started in the window."""
        first_token, e2e = (_column(requests, name)[started] for name in (_ttft(is_open_loop), "e2e_s"))
        known, done = first_token[~np.isnan(first_token)], ~np.isnan(e2e)
        state = state_time([known, _found_in_flight(requests, started)] if is_open_loop else [known])
        served_s = e2e[done] - np.nan_to_num(_column(requests, "ttft_s")[started][done])
        chosen = known if len(known) else e2e[done]
        return cls(
            state,
            float(requests["e2e_s"][started].mean()) if done.any() else 0.0,
            lifetimes(_column(requests, "start_s")[started][done], served_s),
            Dependence.of(chosen, state) if len(chosen) else None,
        )


def _ttft(is_open_loop: bool) -> str:
    return "ttft_co_s" if is_open_loop else "ttft_s"


def _column(requests: pd.DataFrame, name: str) -> Array:
    return requests[name].to_numpy(dtype=np.float64)


def _found_in_flight(requests: pd.DataFrame, started: npt.NDArray[np.bool_]) -> Array:
    """Requests in flight at each start in the window."""
    start_s, end_s = _column(requests, "start_s"), _column(requests, "t_end_ns") / 1e9
    ends: Array = np.sort(end_s[~np.isnan(end_s)])
    found = np.arange(len(start_s)) - np.searchsorted(ends, start_s, side="right")
    return found[started].astype(np.float64)

"""The requests whose times count in the metrics of a run.

A failed request's time stands in its own row alone. A request that was cut off at the drain limit counts with the time
until then: its latency is at least this. Its mean time per token is unknown.
"""

import numpy as np
import numpy.typing as npt
import pandas as pd

from reports.metrics.per_request import PER_REQUEST
from reports.run_schema import Status

# Delays of the generator, which a failed request has too.
GENERATOR_DELAYS = frozenset(("schedule_lag_s", "limit_wait_s"))
# Latencies with a lower bound for a request that was cut off: where they begin, and the moment that makes them exact.
LOWER_BOUNDS: dict[str, tuple[str, str | None]] = {
    "ttft_s": ("t_sent_ns", "t_first_ns"),
    "ttft_co_s": ("t_intended_ns", "t_first_ns"),
    "ttfat_s": ("t_sent_ns", "t_first_answer_ns"),
    "e2e_s": ("t_sent_ns", None),
    "e2e_co_s": ("t_intended_ns", None),
}
OF_STREAMS = frozenset(("ttft_s", "ttft_co_s", "ttfat_s"))


def counted(requests: pd.DataFrame, *, is_streaming: bool) -> pd.DataFrame:
    """The frame of `derive` with only the values that count."""
    succeeded, cut_off = requests["status"] == Status.OK, is_cut_off(requests)
    columns = {
        metric.name: requests[metric.name].where(succeeded)
        for metric in PER_REQUEST
        if metric.name not in GENERATOR_DELAYS
    }
    for name, (begin, _) in LOWER_BOUNDS.items():
        if is_streaming or name not in OF_STREAMS:
            so_far = (requests["t_end_ns"] - requests[begin]) / 1e9
            columns[name] = columns[name].where(~cut_off, requests[name].fillna(so_far))
    return requests.assign(**columns)


def counted_events(requests: pd.DataFrame) -> npt.NDArray[np.bool_]:
    """The requests whose events count."""
    return np.asarray((requests["status"] == Status.OK) | is_cut_off(requests), dtype=np.bool_)


def is_cut_off(requests: pd.DataFrame) -> "pd.Series[bool]":
    """Requests that were still running at the drain limit."""
    return requests["status"] == Status.UNFINISHED


def least_bound(requests: pd.DataFrame, name: str) -> float:
    """The smallest of the values of a metric that are lower bounds; infinite if all are exact."""
    if name not in LOWER_BOUNDS:
        return np.inf
    _, exact_from = LOWER_BOUNDS[name]
    is_bound = is_cut_off(requests)
    if exact_from is not None:
        is_bound &= requests[exact_from].isna()
    return float(requests.loc[is_bound, name].min()) if requests.loc[is_bound, name].notna().any() else np.inf

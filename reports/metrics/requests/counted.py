"""The requests whose times count in the metrics of a run.

The times of a failed request are in its row, but in no metric. A request that was cut off at the drain limit counts
with the time until then, a lower bound of its latency. Its mean time per token is unknown.
"""

import numpy as np
import numpy.typing as npt
import pandas as pd

from reports.metrics.requests.per_request import PER_REQUEST
from reports.run_schema import Status

GENERATOR_DELAYS = frozenset(("schedule_lag_s", "limit_wait_s"))
"""Delays of the generator: they count for failed requests too."""
LOWER_BOUNDS: dict[str, tuple[str, str | None]] = {
    "ttft_s": ("t_sent_ns", "t_first_ns"),
    "ttft_co_s": ("t_intended_ns", "t_first_ns"),
    "ttfat_s": ("t_sent_ns", "t_first_answer_ns"),
    "e2e_s": ("t_sent_ns", None),
    "e2e_co_s": ("t_intended_ns", None),
}
"""Latencies that are lower bounds for a cut-off request: their start, and the time stamp that makes them exact."""
STREAM_ONLY = frozenset(("ttft_s", "ttft_co_s", "ttfat_s"))


def counted(requests: pd.DataFrame, *, is_streaming: bool) -> pd.DataFrame:
    """The frame of `derive`, with NaN for values that do not count."""
    succeeded, cut_off = requests["status"] == Status.OK, is_cut_off(requests)
    columns = {
        metric.name: requests[metric.name].where(succeeded)
        for metric in PER_REQUEST
        if metric.name not in GENERATOR_DELAYS
    }
    for name, (begin, _) in LOWER_BOUNDS.items():
        if is_streaming or name not in STREAM_ONLY:
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
    """The smallest value of a metric that is a lower bound; infinite if all values are exact."""
    if name not in LOWER_BOUNDS:
        return np.inf
    _, exact_from = LOWER_BOUNDS[name]
    is_bound = is_cut_off(requests)
    if exact_from is not None:
        is_bound &= requests[exact_from].isna()
    return float(requests.loc[is_bound, name].min()) if requests.loc[is_bound, name].notna().any() else np.inf

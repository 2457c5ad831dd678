"""The series that show whether a window of a run is in a steady state: output tokens/s, TTFT and TPOT."""

import numpy as np
import numpy.typing as npt
import pandas as pd

from reports.request_columns import TokenEvents
from reports.stats.steady_state import FINEST_BINS, WindowSeries

LATENCIES = {"TTFT": "ttft_s", "TPOT": "tpot_s"}


def series_between(
    start_s: float, end_s: float, requests: pd.DataFrame, events: TokenEvents, *, is_open_loop: bool
) -> WindowSeries:
    """The series of a window. requests: in the order of their start, with the per-request metrics."""
    started = requests[(requests["start_s"] >= start_s) & (requests["start_s"] <= end_s)]
    request_s = float(started["e2e_s"].mean())
    return WindowSeries(
        end_s - start_s,
        end_s - start_s if np.isnan(request_s) else request_s,
        events.tokens_between(start_s, end_s, FINEST_BINS),
        {name: np.asarray(started[column].dropna(), dtype=np.float64) for name, column in LATENCIES.items()},
        _offered(started, start_s, end_s) if is_open_loop else None,
    )


def _offered(started: pd.DataFrame, start_s: float, end_s: float) -> npt.NDArray[np.float64]:
    """Output tokens by the start of their request; the planned number if the answer has no count."""
    tokens = started["output_tokens"].fillna(started["planned_output_tokens"]).fillna(0)
    return np.histogram(started["start_s"], FINEST_BINS, (start_s, end_s), weights=tokens)[0]

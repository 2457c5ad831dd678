"""A run's records as pandas frames: one row per request, with the derived columns."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd

from reports.metrics import PER_REQUEST, meets_objectives
from reports.results import FIELDS, RequestRecord, RunManifest, TokensSource

TEXT = frozenset(
    (
        "run_id",
        "request_id",
        "prompt_id",
        "session_id",
        "phase",
        "status",
        "error_type",
        "finish_reason",
        "tokens_source",
    )
)
LISTS = frozenset(("gap_ns", "event_tokens"))
FLAGS = frozenset(("conn_reused",))


def requests_frame(records: Sequence[RequestRecord], manifest: RunManifest) -> pd.DataFrame:
    """One row per request: every scalar field, `max_gap_s`, every per-request metric, `itl_exact` and `slo_ok`.

    Numbers are float64 with NaN for what is missing (ns stay exact below 2**53, 104 days). `slo_ok` is None where
    the run has no objectives.
    """
    columns: dict[str, Any] = {}
    for name in FIELDS:
        values = [getattr(record, name) for record in records]
        if name in TEXT or name in FLAGS:
            columns[name] = pd.Series(values, dtype=object)
        elif name not in LISTS:
            columns[name] = np.array([np.nan if value is None else value for value in values], dtype=np.float64)
    longest = [max(record.gap_ns) / 1e9 if record.gap_ns else np.nan for record in records]
    columns["max_gap_s"] = np.array(longest, dtype=np.float64)
    frame = pd.DataFrame(columns)
    for metric in PER_REQUEST:
        frame[metric.name] = metric.function(frame)
    frame["itl_exact"] = frame["tokens_source"] == TokensSource.SERVER_STREAM
    met = meets_objectives(frame, manifest.objectives, manifest.is_open_loop)
    frame["slo_ok"] = pd.Series([None] * len(frame) if met is None else met.tolist(), dtype=object)
    return frame

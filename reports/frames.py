"""A run's records as arrays and frames: one row per request, and every token event of the run."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from reports.results import FIELDS, RequestRecord

TEXT = frozenset(
    (
        *("run_id", "request_id", "prompt_id", "session_id", "phase", "status"),
        *("error_type", "finish_reason", "tokens_source", "conn_reused"),
    )
)
LISTS = frozenset(("gap_ns", "event_tokens"))


def requests_frame(records: Sequence[RequestRecord]) -> pd.DataFrame:
    """One row per request: every scalar field and `max_gap_s`.

    Numbers are float64 with NaN for what is missing (ns stay exact below 2**53, 104 days).
    """
    columns: dict[str, Any] = {}
    for name in FIELDS:
        values = [getattr(record, name) for record in records]
        if name in TEXT:
            columns[name] = pd.Series(values, dtype=object)
        elif name not in LISTS:
            columns[name] = np.array([np.nan if value is None else value for value in values], dtype=np.float64)
    longest = [max(record.gap_ns) / 1e9 if record.gap_ns else np.nan for record in records]
    columns["max_gap_s"] = np.array(longest, dtype=np.float64)
    return pd.DataFrame(columns)


@dataclass(frozen=True, slots=True)
class TokenEvents:
    """Every token event of a run, request after request; all arrays have one element per event.

    `request` is the record's index, `tokens` how many tokens the event carried, `gap_s` the time since the request's
    previous event, NaN for its first. A blocking response is one event, at its end.
    """

    request: npt.NDArray[np.int64]
    t_s: npt.NDArray[np.float64]
    tokens: npt.NDArray[np.float64]
    gap_s: npt.NDArray[np.float64]

    def of(self, chosen: npt.NDArray[np.bool_]) -> "TokenEvents":
        """The events of some requests; `chosen` has one element per record."""
        keep = chosen[self.request]
        return TokenEvents(self.request[keep], self.t_s[keep], self.tokens[keep], self.gap_s[keep])


def token_events(records: Sequence[RequestRecord]) -> TokenEvents:
    """The token events of records, in their order."""
    times: list[npt.NDArray[np.float64]] = []
    gaps: list[npt.NDArray[np.float64]] = []
    tokens: list[npt.NDArray[np.float64]] = []
    counts = []
    for record in records:
        when = _event_times_s(record)
        counts.append(len(when))
        times.append(when)
        gaps.append(np.concatenate(([np.nan], np.asarray(record.gap_ns, dtype=np.float64) / 1e9))[: len(when)])
        tokens.append(_event_tokens(record, len(when)))
    nothing = [np.empty(0)]
    return TokenEvents(
        np.repeat(np.arange(len(records)), counts),
        np.concatenate(times or nothing),
        np.concatenate(tokens or nothing),
        np.concatenate(gaps or nothing),
    )


def _event_times_s(record: RequestRecord) -> npt.NDArray[np.float64]:
    if record.t_first_ns is not None:
        return np.cumsum([record.t_first_ns, *record.gap_ns]) / 1e9
    if record.output_tokens and record.t_end_ns is not None:
        return np.array([record.t_end_ns / 1e9])
    return np.empty(0)


def _event_tokens(record: RequestRecord, num_events: int) -> npt.NDArray[np.float64]:
    """Tokens per event; where only their sum is known, the total is spread evenly."""
    if record.event_tokens is not None and len(record.event_tokens) == num_events:
        return np.asarray(record.event_tokens, dtype=np.float64)
    total = num_events if record.output_tokens is None else record.output_tokens
    return np.full(num_events, total / max(num_events, 1))

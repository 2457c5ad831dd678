"""The requests of a run as columns: scalars in a frame, and concatenated gaps and token counts of events."""

import binascii
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from reports.run_schema import DEFAULTS, FIELDS, LONG_GAP, RequestRecord, decode_gaps

Integers = npt.NDArray[np.int64] | npt.NDArray[np.int32]

TEXT = frozenset(
    (
        *("run_id", "request_id", "prompt_id", "session_id", "phase", "status"),
        *("error_type", "finish_reason", "constraint", "validity", "adapter", "tokens_source", "conn_reused"),
    )
)
LISTS = frozenset(("gap_ns", "event_tokens"))

MAX_VALUES = 4_000_000
"""Values that are copied or computed in one step."""


@dataclass(frozen=True, slots=True, eq=False)
class Ragged:
    """A list of integers for each request: `values` is their concatenation, `sizes` contains their lengths."""

    values: Integers
    sizes: npt.NDArray[np.int64]

    @property
    def starts(self) -> npt.NDArray[np.int64]:
        """The start of each list in `values`."""
        return np.cumsum(self.sizes) - self.sizes

    def part(self, first: int, last: int) -> "Ragged":
        """The lists of the requests in [first, last), without a copy of their values."""
        start, length = int(self.sizes[:first].sum()), int(self.sizes[first:last].sum())
        return Ragged(self.values[start : start + length], self.sizes[first:last])

    def take(self, order: npt.NDArray[np.int64]) -> "Ragged":
        """The lists in the given order."""
        if np.array_equal(order, np.arange(len(self.sizes))):
            return self
        starts, sizes = self.starts[order], self.sizes[order]
        values = np.empty(int(sizes.sum()), dtype=self.values.dtype)
        done = 0
        for first, last in chunks(sizes):
            own = sizes[first:last]
            shift = np.repeat(starts[first:last] - (np.cumsum(own) - own), own)
            values[done : done + len(shift)] = self.values[shift + np.arange(len(shift))]
            done += len(shift)
        return Ragged(values, sizes)

    def where(self, is_kept: npt.NDArray[np.bool_]) -> "Ragged":
        """The same lists, but empty for requests that are not kept."""
        if bool(np.all(is_kept | (self.sizes == 0))):
            return self
        return Ragged(self.values[np.repeat(is_kept, self.sizes)], np.where(is_kept, self.sizes, 0))


def chunks(sizes: npt.NDArray[np.int64]) -> Iterator[tuple[int, int]]:
    """Ranges of requests whose lists have at most MAX_VALUES values together; a longer list is a range by itself."""
    ends = np.cumsum(sizes)
    first = 0
    while first < len(sizes):
        before = int(ends[first - 1]) if first else 0
        last = max(first + 1, int(np.searchsorted(ends, before + MAX_VALUES, side="right")))
        yield first, last
        first = last


@dataclass(frozen=True, slots=True, eq=False)
class RequestColumns:
    """The requests of a run. frame: a row per request with every scalar field and `max_gap_s`.

    Numbers are float64, NaN if missing (ns are exact below 2**53, 104 days). `gap_ns` and `event_tokens` are the lists
    of the record; a list of `event_tokens` is empty if every event had one token.
    """

    frame: pd.DataFrame
    gap_ns: Ragged
    event_tokens: Ragged

    def take(self, order: npt.NDArray[np.int64]) -> "RequestColumns":
        """The requests in the given order."""
        frame = self.frame.iloc[order].reset_index(drop=True)
        return RequestColumns(frame, self.gap_ns.take(order), self.event_tokens.take(order))


def columns_of(records: Sequence[RequestRecord]) -> RequestColumns:
    """The columns of records in memory."""
    return columns_of_rows([{name: getattr(record, name) for name in FIELDS} for record in records])


def columns_of_rows(rows: Sequence[Mapping[str, Any]]) -> RequestColumns:
    """The columns of rows of `RequestRecord.to_json`. Raises KeyError, TypeError or ValueError.

    Gaps may be encoded or lists.
    """
    columns: dict[str, Any] = {}
    for name in FIELDS:
        default = DEFAULTS.get(name)
        values = [row[name] for row in rows] if name not in DEFAULTS else [row.get(name, default) for row in rows]
        if name in TEXT:
            columns[name] = pd.Series([default if value is None else value for value in values], dtype=object)
        elif name not in LISTS:
            missing = np.nan if default is None else default
            columns[name] = np.array([missing if value is None else value for value in values], dtype=np.float64)
    gaps = _joined([_gap_array(row.get("gap_ns")) for row in rows])
    tokens = _joined([np.asarray(row.get("event_tokens") or (), dtype=np.int32) for row in rows])
    columns["max_gap_s"] = longest_gap_s(gaps)
    return RequestColumns(pd.DataFrame(columns), gaps, tokens)


def longest_gap_s(gaps: Ragged) -> npt.NDArray[np.float64]:
    """The longest gap of each request in seconds, [requests]; NaN without gaps."""
    longest = np.full(len(gaps.sizes), np.nan)
    has_any = gaps.sizes > 0
    if has_any.any():
        longest[has_any] = np.maximum.reduceat(gaps.values, gaps.starts[has_any]) / 1e9
    return longest


def _gap_array(gaps: Any) -> Integers:
    """The gaps of one row; encoded gaps become 32-bit integers if all of them fit."""
    if not isinstance(gaps, str):
        return np.asarray(gaps if gaps is not None else (), dtype=np.int64)
    words = np.frombuffer(binascii.a2b_base64(gaps, strict_mode=True), dtype="<i4")
    return np.asarray(decode_gaps(gaps), dtype=np.int64) if LONG_GAP in words else words


def _joined(lists: Sequence[Integers]) -> Ragged:
    sizes = np.array([len(each) for each in lists], dtype=np.int64)
    filled = [each for each in lists if len(each)]
    values: Any = np.concatenate(filled) if filled else np.empty(0, dtype=np.int32)
    return Ragged(values, sizes)


@dataclass(frozen=True, slots=True)
class EventBatch:
    """Token events of some requests, [events].

    request: index of the request. tokens: number of tokens in the event. gap_s: time since the previous event of the
    request; NaN for its first event.
    """

    request: npt.NDArray[np.int64]
    t_s: npt.NDArray[np.float64]
    tokens: npt.NDArray[np.float64]
    gap_s: npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class TokenEvents:
    """Every token event of a run in packed form: one gap per event.

    first_ns: time of each request's first event; NaN without events. A blocking response is one event at its end.
    counts: number of tokens of each event, if the server reported it; otherwise each event of a request has `tokens`.
    """

    first_ns: npt.NDArray[np.float64]
    gaps: Ragged
    counts: Ragged
    tokens: npt.NDArray[np.float64]

    @classmethod
    def of(cls, columns: RequestColumns) -> "TokenEvents":
        """The events of all requests. If only a request's total is known, it is divided evenly among its events."""
        frame = columns.frame
        streamed, total = frame["t_first_ns"].notna(), frame["output_tokens"]
        first_ns = frame["t_first_ns"].fillna(frame["t_end_ns"].where(total > 0))
        gaps = columns.gap_ns.where(np.asarray(streamed))
        num_events = np.where(first_ns.notna(), gaps.sizes + 1, 0)
        counts = columns.event_tokens.where(columns.event_tokens.sizes == num_events)
        even = np.asarray(total.fillna(pd.Series(num_events, index=total.index)), dtype=np.float64)
        return cls(np.asarray(first_ns, dtype=np.float64), gaps, counts, even / np.maximum(num_events, 1))

    @property
    def num_events(self) -> npt.NDArray[np.int64]:
        """The number of events of each request, [requests]."""
        return np.where(np.isnan(self.first_ns), 0, self.gaps.sizes + 1)

    def part(self, first: int, last: int) -> "TokenEvents":
        """The events of the requests in [first, last)."""
        return TokenEvents(
            self.first_ns[first:last],
            self.gaps.part(first, last),
            self.counts.part(first, last),
            self.tokens[first:last],
        )

    def where(self, is_kept: npt.NDArray[np.bool_]) -> "TokenEvents":
        """The same requests; a request that is not kept has no events."""
        first_ns = np.where(is_kept, self.first_ns, np.nan)
        return TokenEvents(first_ns, self.gaps.where(is_kept), self.counts.where(is_kept), self.tokens)

    def batches(self) -> Iterator[EventBatch]:
        """The events in the order of the requests, in batches of bounded size."""
        for first, last in chunks(self.num_events):
            yield self.part(first, last)._unpacked(first)

    def _unpacked(self, index: int) -> EventBatch:
        """All events as one batch; `index` is the index of the first request."""
        sizes = self.num_events
        starts = (np.cumsum(sizes) - sizes)[sizes > 0]
        is_later = np.ones(int(sizes.sum()), dtype=np.bool_)
        is_later[starts] = False
        gap_ns = np.zeros(len(is_later), dtype=np.int64)
        gap_ns[is_later] = self.gaps.values
        passed = np.cumsum(gap_ns)
        first_ns = self.first_ns[sizes > 0].astype(np.int64)
        t_ns = passed + np.repeat(first_ns - passed[starts], sizes[sizes > 0])
        tokens = np.repeat(self.tokens, sizes)
        if len(self.counts.values):
            tokens[np.repeat(self.counts.sizes > 0, sizes)] = self.counts.values
        gap_s = gap_ns / 1e9
        gap_s[starts] = np.nan
        return EventBatch(np.repeat(np.arange(index, index + len(sizes)), sizes), t_ns / 1e9, tokens, gap_s)

    def tokens_between(self, start_s: float, end_s: float, bins: int) -> npt.NDArray[np.float64]:
        """The tokens received in each of `bins` equal spans between start and end, [bins]."""
        sums = np.zeros(bins)
        if end_s > start_s:
            for batch in self.batches():
                sums += np.histogram(batch.t_s, bins, (start_s, end_s), weights=batch.tokens)[0]
        return sums

"""The record of one request as observed. Derived values are in `metrics/requests/per_request.py`.

The load generator's worker imports this module, so it needs only the standard library.
"""

import base64
import dataclasses
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Self


class Phase(StrEnum):
    WARMUP = "warmup"
    MEASURE = "measure"
    DRAIN = "drain"


class Status(StrEnum):
    """How a request ended; each request has exactly one status."""

    OK = "ok"
    CONNECT_ERROR = "connect_error"
    TIMEOUT = "timeout"
    OVERLOADED = "overloaded"
    HTTP_4XX = "http_4xx"
    HTTP_5XX = "http_5xx"
    STREAM_ERROR = "stream_error"
    TRUNCATED = "truncated"
    BAD_PAYLOAD = "bad_payload"
    PROTOCOL_ERROR = "protocol_error"
    CANCELLED = "cancelled"
    UNFINISHED = "unfinished"
    CLIENT_ERROR = "client_error"
    ABANDONED = "abandoned"


NOT_FAILED = (Status.OK, Status.ABANDONED)
"""An abandoned request did not fail: its client disconnected before the end of the answer, as planned."""


class TokensSource(StrEnum):
    """The source of a record's output token count, best first."""

    SERVER_STREAM = "server_stream"
    SERVER_USAGE = "server_usage"
    CLIENT_TOKENIZER = "client_tokenizer"
    EVENTS = "events"


class RequestPhase(StrEnum):
    """The phase of a request in which an error occurred."""

    CONNECT = "connect"
    HEADERS = "headers"
    FIRST_EVENT = "first_event"
    STREAM = "stream"


def error_type(phase: RequestPhase, cause: str) -> str:
    """The value of `RequestRecord.error_type`: the phase and the cause.

    >>> error_type(RequestPhase.STREAM, "ConnectionResetError")
    'stream/ConnectionResetError'
    """
    return f"{phase}/{cause}"


@dataclass(slots=True)
class RequestRecord:
    """All observations of one request.

    Times are ns since the run's start on the generator's monotonic clock; None for an event that did not occur. Times
    of received bytes are arrival times of the kernel, if it records them, else times of the read.

    limit_wait_s: the part of the delay before `t_dispatch_ns` that was spent at the in-flight limit.
    t_first_read_ns: the read of the first event. read_late_max_s: longest time from an event's arrival to its read.
    gap_ns: gaps between successive token events; event i is at `t_first_ns + sum(gap_ns[:i])`.
    event_tokens: number of tokens of each event; None if every event had one token.
    coalesced_events: events in the same read as the next event. Their time is that of the last segment of the read, and
    they arrived at most `coalesced_within_s` before it.
    """

    run_id: str
    request_id: str
    prompt_id: str = ""
    session_id: str | None = None
    turn: int = 0
    worker: int = 0
    replica: int | None = None
    point: int = 0
    phase: str = Phase.MEASURE

    status: str = Status.OK
    error_type: str | None = None
    finish_reason: str | None = None
    adapter: str | None = None
    images: int = 0
    constraint: str | None = None
    validity: str | None = None
    http_status: int | None = None

    t_intended_ns: int | None = None
    t_dispatch_ns: int | None = None
    t_sent_ns: int | None = None
    t_headers_ns: int | None = None
    t_first_ns: int | None = None
    t_first_read_ns: int | None = None
    t_first_answer_ns: int | None = None
    t_last_ns: int | None = None
    t_end_ns: int | None = None
    connect_s: float | None = None
    conn_reused: bool | None = None
    limit_wait_s: float | None = None

    planned_input_tokens: int | None = None
    planned_output_tokens: int | None = None
    requested_output_tokens: int | None = None
    input_tokens: int | None = None
    cached_input_tokens: int | None = None
    planned_cached_tokens: int | None = None
    output_tokens: int | None = None
    reasoning_tokens: int | None = None
    first_event_tokens: int | None = None
    tokens_source: str | None = None
    client_output_tokens: int | None = None

    events: int = 0
    coalesced_events: int = 0
    coalesced_within_s: float | None = None
    read_late_max_s: float | None = None
    bytes_sent: int = 0
    bytes_received: int = 0
    gap_ns: list[int] = field(default_factory=list)
    event_tokens: list[int] | None = None

    srv_validation_s: float | None = None
    srv_queue_s: float | None = None
    srv_inference_s: float | None = None
    srv_time_per_token_s: float | None = None

    def to_json(self) -> dict[str, Any]:
        """The fields that differ from their default as a JSON object; gaps are encoded by `encode_gaps`."""
        row = {name: value for name in FIELDS if (value := getattr(self, name)) != DEFAULTS.get(name)}
        gap_ns = row.pop("gap_ns", None)
        if gap_ns:
            row["gap_ns"] = encode_gaps(gap_ns)
        return row

    @classmethod
    def from_json(cls, row: Mapping[str, Any]) -> Self:
        """The record of one JSONL or Parquet row. Unknown keys are ignored, and a null becomes the field's default."""
        known = {name: value for name, value in row.items() if name in FIELDS and value is not None}
        gap_ns = known.get("gap_ns")
        if isinstance(gap_ns, str):
            known["gap_ns"] = decode_gaps(gap_ns)
        return cls(**known)


FIELDS: dict[str, Any] = {each.name: each for each in dataclasses.fields(RequestRecord)}
DEFAULTS = {
    name: [] if each.default_factory is list else each.default
    for name, each in FIELDS.items()
    if name not in ("run_id", "request_id")
}


LONG_GAP = -1
"""Marks a gap of 2.1 s or more, which does not fit into 32 bits; the next two words are its low and high halves."""


def encode_gaps(gap_ns: Sequence[int]) -> str:
    """Gaps (the deltas of event times, ns, none negative) as base64 of little-endian int32."""
    words: list[int] = []
    for gap in gap_ns:
        if gap < 2**31:
            words.append(gap)
        else:
            words += (LONG_GAP, *struct.unpack("<2i", struct.pack("<q", gap)))
    return base64.b64encode(struct.pack(f"<{len(words)}i", *words)).decode("ascii")


def decode_gaps(text: str) -> list[int]:
    """The inverse of `encode_gaps`."""
    packed = base64.b64decode(text, validate=True)
    words = iter(struct.unpack(f"<{len(packed) // 4}i", packed))
    return [
        struct.unpack("<q", struct.pack("<2i", next(words), next(words)))[0] if word == LONG_GAP else word
        for word in words
    ]

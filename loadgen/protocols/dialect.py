"""The seam between the load generator and an API: prompts become requests, payloads become token events."""

import contextlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from loadgen.datasets.prompt import Prompt


class BadPayloadError(Exception):
    """JSON that does not parse, or a known field of a wrong type."""


class NotThisApiError(Exception):
    """A payload that is no object of this API at all."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """What every request of a run asks for.

    `forces_length` makes answers exactly as long as asked, by the server's extension fields.
    """

    forces_length: bool = False
    temperature: float | None = None
    seed: int = 0
    model: str = "tgi"
    streams: bool = True

    @property
    def accepted_type(self) -> str:
        """The content type that answers have to have."""
        return "text/event-stream" if self.streams else "application/json"


@dataclass(slots=True)
class Answer:
    """What one stream has said so far. Times are monotonic ns, taken when the bytes of an event left the socket.

    `pieces` are the texts of the answer where they are asked for, None where nobody reads them.
    """

    event_ns: list[int] = field(default_factory=list)
    event_tokens: list[int] = field(default_factory=list)
    counts_are_exact: bool = False
    first_answer_ns: int | None = None
    reasoning_events: int = 0
    finish_reason: str | None = None
    is_terminated: bool = False
    error: str | None = None
    input_tokens: int | None = None
    usage_output_tokens: int | None = None
    usage_reasoning_tokens: int | None = None
    cached_input_tokens: int | None = None
    srv_validation_s: float | None = None
    srv_queue_s: float | None = None
    srv_inference_s: float | None = None
    srv_time_per_token_s: float | None = None
    pieces: list[str] | None = None

    @property
    def text(self) -> str:
        """The answer as far as it was kept."""
        return "".join(self.pieces or ())

    def add_text(self, text: object) -> None:
        """Keep a piece of the answer where it is asked for."""
        if self.pieces is not None and isinstance(text, str):
            self.pieces.append(text)

    @property
    def is_complete(self) -> bool:
        """Whether the stream ended as the API says it does."""
        return self.is_terminated or self.finish_reason is not None

    def add_event(self, at_ns: int, tokens: int = 1, *, is_reasoning: bool = False) -> None:
        """Note one token event."""
        self.event_ns.append(at_ns)
        self.event_tokens.append(tokens)
        if is_reasoning:
            self.reasoning_events += 1
        elif self.first_answer_ns is None:
            self.first_answer_ns = at_ns


# A count beyond it is no count of tokens, and records hold 32 bits.
MAX_COUNT = 2**31 - 1
MAX_TIME_DIGITS = 12

# TGI's headers of a blocking call, in milliseconds.
TIMING_HEADERS = {
    "srv_validation_s": "x-validation-time",
    "srv_queue_s": "x-queue-time",
    "srv_inference_s": "x-inference-time",
    "srv_time_per_token_s": "x-time-per-token",
}


def read_timing_headers(headers: Mapping[str, str], answer: Answer) -> None:
    """Take over what the server says of where a request's time went; what is no number is left out."""
    for name, header in TIMING_HEADERS.items():
        text = headers.get(header, "")
        if text.isascii() and text.isdigit() and len(text) <= MAX_TIME_DIGITS:
            setattr(answer, name, int(text) / 1e3)


class Dialect(Protocol):
    """One API."""

    @property
    def sampling(self) -> Sampling:
        """What every request asks for; whether answers are streamed is part of it."""

    @property
    def path(self) -> str:
        """The route of the requests."""

    def body(self, prompt: Prompt) -> bytes:
        """The JSON of a request."""

    def read_whole(self, payload: bytes, answer: Answer) -> None:
        """Take over a blocking response. Raises BadPayloadError or NotThisApiError."""

    def read(self, payload: bytes, at_ns: int, answer: Answer) -> None:
        """Add one event's payload to the answer. Raises BadPayloadError or NotThisApiError."""


def decode_object(payload: bytes) -> dict[str, Any]:
    """The JSON object of a payload."""
    try:
        value = _parse(payload)
    except (ValueError, RecursionError) as error:
        raise BadPayloadError(f"an event is not JSON: {payload[:80]!r}") from error
    if not isinstance(value, dict):
        raise NotThisApiError(f"an event is a JSON {type(value).__name__}, not an object")
    return value


_read_json = json.JSONDecoder().raw_decode


def _parse(payload: bytes) -> Any:
    """`json.loads` in half its time where the payload is one value in UTF-8 with nothing around it."""
    with contextlib.suppress(ValueError):
        text = payload.decode()
        value, end = _read_json(text)
        if end == len(text):
            return value
    return json.loads(payload)


def whole_number(values: Mapping[str, Any], name: str) -> int | None:
    """A count in a payload; None where it is absent, null or no count, so that the next source is asked."""
    value = values.get(name)
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= MAX_COUNT:
        return None
    return value


def encode(body: Mapping[str, Any]) -> bytes:
    return json.dumps(body, separators=(",", ":"), ensure_ascii=False).encode()

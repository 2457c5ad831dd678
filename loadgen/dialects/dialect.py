"""The interface between the load generator and an API: prompts to requests, payloads to token events."""

import json
from collections.abc import Container, Mapping
from dataclasses import dataclass, field
from json.scanner import make_scanner
from typing import Any, Protocol

from loadgen.http.framing import Framing
from loadgen.workloads.prompts.prompt import Prompt


class BadPayloadError(Exception):
    """A payload that is not JSON, or a known field of a wrong type."""


class NotThisApiError(Exception):
    """A payload that is not an object of this API."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """Parameters of every request of a run.

    `length_fields` of the server request answers of exactly the given length; empty: a length is only a maximum.
    `extra` are further fields of the body.
    """

    length_fields: tuple[str, ...] = ()
    temperature: float | None = None
    seed: int = 0
    model: str = "tgi"
    streams: bool = True
    extra: Mapping[str, Any] = field(default_factory=dict)

    def exact_length(self, tokens: int) -> dict[str, bool | int]:
        """The fields that request an answer of exactly `tokens` tokens.

        >>> Sampling(length_fields=("ignore_eos", "min_tokens")).exact_length(7)
        {'ignore_eos': True, 'min_tokens': 7}
        """
        return {name: True if name.startswith("ignore_eos") else tokens for name in self.length_fields}


@dataclass(slots=True)
class ParsedAnswer:
    """The answer to one request so far. Times are monotonic ns, taken when an event was read from the socket.

    `pieces` are the texts of the answer; None: texts are not stored. `characters` counts the text of all token events,
    `first_characters` that of the first.
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
    characters: int = 0
    first_characters: int = 0

    @property
    def text(self) -> str:
        """The stored text of the answer."""
        return "".join(self.pieces or ())

    def add_text(self, text: object) -> None:
        """Store a piece of text, if texts are stored."""
        if self.pieces is not None and isinstance(text, str):
            self.pieces.append(text)

    def finish(self, reason: object) -> None:
        """Store the finish reason; None leaves it unknown."""
        self.finish_reason = None if reason is None else str(reason)

    @property
    def is_complete(self) -> bool:
        """Whether the stream ended as the API requires."""
        return self.is_terminated or self.finish_reason is not None

    def add_event(self, at_ns: int, tokens: int = 1, *, is_reasoning: bool = False, characters: int = 0) -> None:
        """Record one token event."""
        if not self.event_ns:
            self.first_characters = characters
        self.characters += characters
        self.event_ns.append(at_ns)
        self.event_tokens.append(tokens)
        if is_reasoning:
            self.reasoning_events += 1
        elif self.first_answer_ns is None:
            self.first_answer_ns = at_ns


# Records store counts in 32 bits; a larger number is not a token count.
MAX_COUNT = 2**31 - 1
MAX_TIME_DIGITS = 12

# TGI's headers of a blocking call, in milliseconds.
TIMING_HEADERS = {
    "srv_validation_s": "x-validation-time",
    "srv_queue_s": "x-queue-time",
    "srv_inference_s": "x-inference-time",
    "srv_time_per_token_s": "x-time-per-token",
}


def read_timing_headers(headers: Mapping[str, str], answer: ParsedAnswer) -> None:
    """Read TGI's timing headers; values that are not numbers are ignored."""
    for name, header in TIMING_HEADERS.items():
        text = headers.get(header, "")
        if text.isascii() and text.isdigit() and len(text) <= MAX_TIME_DIGITS:
            setattr(answer, name, int(text) / 1e3)


class Dialect(Protocol):
    """One API."""

    @property
    def sampling(self) -> Sampling:
        """Parameters of every request."""

    @property
    def path(self) -> str:
        """The route of the requests."""

    @property
    def framing(self) -> Framing:
        """The rule that separates the events of a streamed answer."""

    @property
    def has_template(self) -> bool:
        """Whether the server puts a chat template around a prompt."""

    @property
    def can_force_length(self) -> bool:
        """Whether requests carry the fields that force the length of an answer, on servers that have such fields."""

    def body(self, prompt: Prompt) -> bytes:
        """The JSON of a request."""

    def refused(self, prompt: Prompt) -> str | None:
        """The part of a prompt that requests of this API cannot carry, for a message; None if they carry all of it."""

    def read_whole(self, payload: bytes, answer: ParsedAnswer) -> None:
        """Read a blocking response into the answer. Raises BadPayloadError or NotThisApiError."""

    def read(self, payload: bytes, at_ns: int, answer: ParsedAnswer) -> None:
        """Read one event's payload into the answer. Raises BadPayloadError or NotThisApiError."""


def accepted_type(dialect: Dialect) -> str:
    """The content type that answers must have."""
    return dialect.framing.content_type if dialect.sampling.streams else "application/json"


def decode_object(payload: bytes) -> dict[str, Any]:
    """The JSON object of a payload."""
    # `json.loads` in half the time, if the payload is one UTF-8 value without surrounding space.
    try:
        text = payload.decode()
        value, end = _scan(text, 0)
    except (ValueError, RecursionError, StopIteration):
        end = -1
    if end < 0 or end != len(text):
        value = _parse(payload)
    if not isinstance(value, dict):
        raise NotThisApiError(f"an event is a JSON {type(value).__name__}, not an object")
    return value


_scan = make_scanner(json.JSONDecoder())  # type: ignore[arg-type]


def _parse(payload: bytes) -> Any:
    """The value of a payload in any form that `json.loads` accepts. Raises BadPayloadError."""
    try:
        return json.loads(payload)
    except (ValueError, RecursionError) as error:
        raise BadPayloadError(f"an event is not JSON: {payload[:80]!r}") from error


def whole_number(values: Mapping[str, Any], name: str) -> int | None:
    """A count in a payload; None if it is absent or not a count, so that the next source is used."""
    value = values.get(name)
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= MAX_COUNT:
        return None
    return value


def merged(body: Mapping[str, Any], extra: Mapping[str, Any]) -> dict[str, Any]:
    """A body with further fields; an object in both is merged, any other value is replaced.

    >>> merged({"a": {"b": 1}, "c": 2}, {"a": {"d": 3}, "c": 4})
    {'a': {'b': 1, 'd': 3}, 'c': 4}
    """
    both = {
        name: merged(body[name], value)
        for name, value in extra.items()
        if isinstance(value, Mapping) and isinstance(body.get(name), Mapping)
    }
    return {**body, **extra, **both}


def messages_of(prompt: Prompt) -> list[Mapping[str, Any]]:
    """The messages of a prompt; a text is one message of the user."""
    return list(prompt.messages or ({"role": "user", "content": prompt.text},))


def unknown_field(prompt: Prompt, known: Container[str]) -> str | None:
    """The first field of a prompt's row that is not one of `known`, for a message; None if all are."""
    name = next((name for name in prompt.fields if name not in known), None)
    return None if name is None else f"`{name}`"


def other_parts(prompt: Prompt) -> str | None:
    """The first part of a prompt's messages that is not a text, which a route for texts cannot carry."""
    for message in prompt.messages or ():
        name = next((name for name in message if name not in ("role", "content", "name")), None)
        if name is not None:
            return f"`{name}` of a message"
        content = message.get("content")
        kinds = [part.get("type") for part in content] if isinstance(content, list) else []
        kind = next((kind for kind in kinds if kind != "text"), None)
        if kind is not None:
            return f"a message with `{kind}`"
    return None


def encode_request(body: Mapping[str, Any], prompt: Prompt, sampling: Sampling) -> bytes:
    """The JSON of a body with the fields of its prompt's row, then those of `--extra-body`."""
    return encode(merged(merged(body, prompt.fields), sampling.extra))


def encode(body: Mapping[str, Any]) -> bytes:
    return json.dumps(body, separators=(",", ":"), ensure_ascii=False).encode()

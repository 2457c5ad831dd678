"""How the trap server behaves: its honest speed, and one deception at a time. Plain values, without IO."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

SLOW_START = 1 / 3
STALL_S = 3.0
BATCH = 8
FIRST_TOKENS = 8
ERROR_EVENT = {"error": {"message": "out of memory", "type": "server_error", "code": 500}}


@dataclass(frozen=True, slots=True)
class Behaviour:
    """A server of known speed: the first token after `prefill_s`, then one token every `gap_s`.

    Each `*_every` concerns one request in that many, each `*_after_s` counts from the start of the load.
    """

    prefill_s: float = 0.25
    prefill_s_per_token: float = 0.0
    gap_s: float = 0.02
    # Requests served at once; the others wait. None: all.
    slots: int | None = None
    # Whether the gap grows with the requests in flight: `gap_s` holds for `BATCH` of them.
    shares_speed: bool = False
    cache_block_tokens: int | None = None
    template_tokens: int = 0
    event_tokens: int = 1
    # Events that are written together, as by an engine with several steps at a time.
    events_at_once: int = 1
    idle_close_s: float | None = None
    reports_each_usage: bool = False
    role_in_first_token: bool = False
    sends_done: bool = True

    drop_every: int | None = None
    refuse_every: int | None = None
    error_every: int | None = None
    unfinished_every: int | None = None
    ramp_s: float | None = None
    halves_after_s: float | None = None
    stalls_after_s: float | None = None
    restarts_after_s: float | None = None
    role_at_once: bool = False
    usage_factor: float = 1.0
    prompt_factor: float = 1.0
    length_factor: float = 1.0
    release_s: float | None = None
    sends_comments: bool = False
    reasoning_tokens: int = 0
    tool_tokens: int = 0

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "Behaviour":
        return cls(**json.loads(text))

    def concerns(self, every: int | None, index: int) -> bool:
        """Whether a deception concerns the request of this index.

        >>> [Behaviour().concerns(4, index) for index in range(5)]
        [False, False, False, True, False]
        """
        return every is not None and index % every == every - 1

    def token_s(self, load_s: float, in_flight: int) -> float:
        """Seconds per token, `load_s` after the start of the load."""
        speed = 1.0
        if self.ramp_s is not None:
            speed = min(1.0, SLOW_START + (1 - SLOW_START) * load_s / self.ramp_s)
        if self.halves_after_s is not None and load_s >= self.halves_after_s:
            speed = 0.5
        return self.gap_s / speed * (in_flight / BATCH if self.shares_speed else 1.0)

    def first_s(self, prompt_tokens: int, cached_tokens: int) -> float:
        """Seconds from admission to the first token."""
        return self.prefill_s + self.prefill_s_per_token * (prompt_tokens - cached_tokens)

    def prompt_tokens(self, words: int) -> int:
        return round(self.prompt_factor * words) + self.template_tokens

    def answer_tokens(self, asked: int) -> int:
        return max(1, round(self.length_factor * asked))


@dataclass(frozen=True, slots=True)
class TrapRequest:
    """A generation request as the server understands it."""

    words: tuple[str, ...]
    max_tokens: int
    is_chat: bool

    @classmethod
    def of(cls, body: bytes, *, is_chat: bool) -> "TrapRequest":
        fields = json.loads(body)
        texts = [_text(each.get("content")) for each in fields["messages"]] if is_chat else [_text(fields["prompt"])]
        asked = fields.get("max_tokens") or fields.get("max_completion_tokens") or 16
        return cls(tuple(" ".join(texts).split()), int(asked), is_chat)


def _text(content: Any) -> str:
    """The text of a message, a prompt, or a list of parts."""
    if isinstance(content, list):
        return " ".join(_text(part) for part in content)
    return str(content.get("text", "")) if isinstance(content, Mapping) else str(content or "")


@dataclass(frozen=True, slots=True)
class AnswerEvent:
    """Bytes of a stream. They are due `tokens` times the time per token after the event before them."""

    data: bytes
    tokens: int = 0


def answer_events(behaviour: Behaviour, request: TrapRequest, index: int, cached_tokens: int) -> Iterator[AnswerEvent]:
    """The events of an answer from its first token on; that of the first token is due at once."""
    total = behaviour.answer_tokens(request.max_tokens)
    stops_early = behaviour.concerns(behaviour.error_every, index) or behaviour.concerns(
        behaviour.unfinished_every, index
    )
    shown = min(FIRST_TOKENS, total) if stops_early else total
    usage = usage_of(behaviour, request, total, cached_tokens)
    for first in range(0, shown, behaviour.event_tokens):
        count = min(behaviour.event_tokens, shown - first)
        each = {**usage, "completion_tokens": first + count} if behaviour.reports_each_usage else None
        data = sse(token_chunk(behaviour, request, first, count, each))
        yield AnswerEvent(_commented(behaviour, data), count if first else 0)
    if behaviour.concerns(behaviour.error_every, index):
        yield AnswerEvent(sse(ERROR_EVENT))
        return
    if not stops_early:
        reason = "length" if total >= request.max_tokens else "stop"
        yield AnswerEvent(sse(chunk_of(request, {}, reason)) + sse({**chunk_of(request, None), "usage": usage}))
    if behaviour.sends_done:
        yield AnswerEvent(b"data: [DONE]\n\n")


def prelude(behaviour: Behaviour, request: TrapRequest) -> bytes:
    """Bytes that are sent when a request is admitted, before any token."""
    role = sse(chunk_of(request, {"role": "assistant", "content": ""})) if behaviour.role_at_once else b""
    return _commented(behaviour, role)


def usage_of(behaviour: Behaviour, request: TrapRequest, total: int, cached_tokens: int) -> dict[str, Any]:
    prompt = behaviour.prompt_tokens(len(request.words))
    completion = round(behaviour.usage_factor * total)
    usage = {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}
    return {**usage, "prompt_tokens_details": {"cached_tokens": cached_tokens}}


def token_chunk(
    behaviour: Behaviour, request: TrapRequest, first: int, count: int, usage: Mapping[str, Any] | None
) -> dict[str, Any]:
    """The chunk of `count` tokens from number `first` on: reasoning first, then tool arguments, then text."""
    text = "".join(f" w{number:03}" for number in range(first, first + count))
    if first < behaviour.reasoning_tokens:
        delta: dict[str, Any] = {"reasoning_content": text}
    elif first < behaviour.reasoning_tokens + behaviour.tool_tokens:
        delta = {"tool_calls": [{"index": 0, "function": {"arguments": text}}]}
    else:
        delta = {"content": text}
    if behaviour.role_in_first_token and not first:
        delta["role"] = "assistant"
    return {**chunk_of(request, delta), "usage": usage}


def chunk_of(request: TrapRequest, delta: Mapping[str, Any] | None, finish_reason: str | None = None) -> dict[str, Any]:
    """A chunk of the API that the request used; without a delta it has no choices."""
    kind = "chat.completion.chunk" if request.is_chat else "text_completion"
    choices = []
    if delta is not None:
        content = {"delta": delta} if request.is_chat else {"text": delta.get("content") or ""}
        choices = [{"index": 0, **content, "logprobs": None, "finish_reason": finish_reason}]
    return {"id": "trap", "object": kind, "created": 1, "model": "trap", "choices": choices}


def sse(value: Mapping[str, Any]) -> bytes:
    return b"data: " + json.dumps(value, separators=(",", ":")).encode() + b"\n\n"


def _commented(behaviour: Behaviour, data: bytes) -> bytes:
    return b": keep-alive\n\n" + data if behaviour.sends_comments else data

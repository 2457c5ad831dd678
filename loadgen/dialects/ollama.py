"""Ollama's chat and generate APIs: one JSON object a line, with all counts in the last one."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from loadgen.dialects.dialect import (
    BadPayloadError,
    NotThisApiError,
    ParsedAnswer,
    Sampling,
    decode_object,
    encode_request,
    messages_of,
    other_parts,
    unknown_field,
    whole_number,
)
from loadgen.http.framing import NDJSON, Framing
from loadgen.workloads.prompts.prompt import Prompt

# The fields that a row of prompts may set.
FIELDS = frozenset(("format", "keep_alive", "logprobs", "options", "think", "top_logprobs"))
CHAT_FIELDS = FIELDS | {"tools"}
GENERATE_FIELDS = FIELDS | {"images", "suffix"}


@dataclass(frozen=True, slots=True)
class OllamaChat:
    """`POST /api/chat`."""

    sampling: Sampling
    path: str = "/api/chat"
    framing: Framing = NDJSON
    has_template: bool = True
    can_force_length: bool = False

    def body(self, prompt: Prompt) -> bytes:
        return _encode({"messages": messages_of(prompt)}, prompt, self.sampling)

    def refused(self, prompt: Prompt) -> str | None:
        field = unknown_field(prompt, CHAT_FIELDS)
        if field is not None:
            return field
        has_parts = any(isinstance(message.get("content"), list) for message in prompt.messages or ())
        return "a message with parts of content" if has_parts else None

    def read(self, payload: bytes, at_ns: int, answer: ParsedAnswer) -> None:
        _read(payload, at_ns, answer, "message")

    def read_whole(self, payload: bytes, answer: ParsedAnswer) -> None:
        _read(payload, None, answer, "message")


@dataclass(frozen=True, slots=True)
class OllamaGenerate:
    """`POST /api/generate`, without the model's template (`raw`)."""

    sampling: Sampling
    path: str = "/api/generate"
    framing: Framing = NDJSON
    has_template: bool = False
    can_force_length: bool = False

    def body(self, prompt: Prompt) -> bytes:
        return _encode({"prompt": prompt.text, "raw": True}, prompt, self.sampling)

    def refused(self, prompt: Prompt) -> str | None:
        return unknown_field(prompt, GENERATE_FIELDS) or other_parts(prompt)

    def read(self, payload: bytes, at_ns: int, answer: ParsedAnswer) -> None:
        _read(payload, at_ns, answer, "response")

    def read_whole(self, payload: bytes, answer: ParsedAnswer) -> None:
        _read(payload, None, answer, "response")


def _encode(start: Mapping[str, Any], prompt: Prompt, sampling: Sampling) -> bytes:
    options: dict[str, Any] = {"temperature": sampling.temperature or 0}
    if sampling.temperature:
        options["seed"] = sampling.seed
    if prompt.output_tokens is not None:
        options["num_predict"] = prompt.output_tokens
    body = {**start, "model": prompt.adapter or sampling.model, "stream": sampling.streams, "options": options}
    return encode_request(body, prompt, sampling)


def _read(payload: bytes, at_ns: int | None, answer: ParsedAnswer, field: str) -> None:
    """Read one object, of a stream or (`at_ns` None) the whole response; `field` holds the answer."""
    event = decode_object(payload)
    if event.get("error") is not None:
        answer.error = "error"
        return
    if field not in event:
        raise NotThisApiError(f"an event has neither `{field}` nor `error`: {payload[:80]!r}")
    part = event[field] if field == "message" else {"content": event[field], "thinking": event.get("thinking")}
    if not isinstance(part, dict):
        raise BadPayloadError(f"`{field}` is {part!r}, not an object")
    text, thinking = part.get("content"), part.get("thinking")
    if at_ns is not None and (text or thinking or part.get("tool_calls")):
        characters = sum(len(each) for each in (text, thinking) if isinstance(each, str))
        answer.add_event(at_ns, is_reasoning=bool(thinking) and not text, characters=characters or 1)
    answer.add_text(text)
    if event.get("done"):
        _read_end(event, answer)


def _read_end(event: Mapping[str, Any], answer: ParsedAnswer) -> None:
    answer.is_terminated = True
    answer.finish(event.get("done_reason"))
    # A count of 0 is left out, which looks like an unknown one.
    answer.input_tokens = whole_number(event, "prompt_eval_count")
    answer.usage_output_tokens = whole_number(event, "eval_count")
    answer.cached_input_tokens = whole_number(event, "prompt_eval_cached_count")

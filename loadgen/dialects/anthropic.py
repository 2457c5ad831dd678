"""Anthropic's messages API: events with a `type`, usage at the start and at the end, `message_stop`."""

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
from loadgen.http.framing import SSE, Framing
from loadgen.workloads.prompts.prompt import Prompt

# The API requires a limit for every answer.
DEFAULT_MAX_TOKENS = 1_024
# The fields that a row of prompts may set.
FIELDS = frozenset(
    (
        *("cache_salt", "metadata", "output_config", "service_tier", "stop_sequences", "system", "temperature"),
        *("thinking", "tool_choice", "tools", "top_k", "top_p"),
    )
)
# The texts of a delta, by its type; `signature_delta` has none.
DELTA_TEXTS = {"text_delta": "text", "thinking_delta": "thinking", "input_json_delta": "partial_json"}
# Tokens of the prompt: the first excludes those of the cache.
INPUT_COUNTS = ("input_tokens", "cache_read_input_tokens", "cache_creation_input_tokens")


@dataclass(frozen=True, slots=True)
class AnthropicMessages:
    """`POST /v1/messages`."""

    sampling: Sampling
    path: str = "/v1/messages"
    framing: Framing = SSE
    has_template: bool = True
    can_force_length: bool = False

    def body(self, prompt: Prompt) -> bytes:
        messages = messages_of(prompt)
        system = [message["content"] for message in messages if message["role"] == "system"]
        body: dict[str, Any] = {
            "model": prompt.adapter or self.sampling.model,
            "max_tokens": prompt.output_tokens or DEFAULT_MAX_TOKENS,
            "stream": self.sampling.streams,
            "temperature": self.sampling.temperature or 0,
            "messages": [message for message in messages if message["role"] != "system"],
            **({"system": system[0]} if system else {}),
        }
        return encode_request(body, prompt, self.sampling)

    def refused(self, prompt: Prompt) -> str | None:
        field = unknown_field(prompt, FIELDS)
        if field is not None:
            return field
        roles = [message["role"] for message in prompt.messages or ()]
        role = next((role for role in roles if role not in ("system", "user", "assistant")), None)
        if role is not None:
            return f"a message of role {role!r}"
        return "several messages of role 'system'" if roles.count("system") > 1 else other_parts(prompt)

    def read(self, payload: bytes, at_ns: int, answer: ParsedAnswer) -> None:
        event = decode_object(payload)
        kind = event.get("type")
        if not isinstance(kind, str):
            raise NotThisApiError(f"an event has no `type`: {payload[:80]!r}")
        match kind:
            case "content_block_delta":
                _read_delta(_object(event, "delta"), at_ns, answer)
            case "message_start":
                _read_usage(_object(event, "message").get("usage"), answer)
            case "message_delta":
                answer.finish(_object(event, "delta").get("stop_reason"))
                _read_usage(event.get("usage"), answer)
            case "message_stop":
                answer.is_terminated = True
            case "error":
                answer.error = str(_object(event, "error").get("type") or "error")
            case _:
                # `ping`, the start and end of a block, and events that later versions of the API add.
                pass

    def read_whole(self, payload: bytes, answer: ParsedAnswer) -> None:
        response = decode_object(payload)
        if response.get("type") == "error":
            answer.error = str(_object(response, "error").get("type") or "error")
            return
        content = response.get("content")
        if not isinstance(content, list):
            raise NotThisApiError(f"a response has no `content`: {payload[:80]!r}")
        answer.is_terminated = True
        for block in content:
            if isinstance(block, dict):
                answer.add_text(block.get("text") if block.get("type") == "text" else None)
        answer.finish(response.get("stop_reason"))
        _read_usage(response.get("usage"), answer)


def _object(event: Mapping[str, Any], name: str) -> dict[str, Any]:
    value = event.get(name)
    if not isinstance(value, dict):
        raise BadPayloadError(f"`{name}` is {value!r}, not an object")
    return value


def _read_delta(delta: Mapping[str, Any], at_ns: int, answer: ParsedAnswer) -> None:
    name = DELTA_TEXTS.get(str(delta.get("type")))
    text = delta.get(name) if name is not None else None
    if not isinstance(text, str) or not text:
        return
    answer.add_event(at_ns, is_reasoning=name == "thinking", characters=len(text))
    answer.add_text(text if name != "thinking" else None)


def _read_usage(usage: Any, answer: ParsedAnswer) -> None:
    """Store the counts that a usage object has: those of the prompt may come only at the start."""
    if usage is None:
        return
    if not isinstance(usage, dict):
        raise BadPayloadError(f"`usage` is {usage!r}, not an object")
    counts = [whole_number(usage, name) for name in INPUT_COUNTS]
    if counts[0] is not None:
        answer.input_tokens = sum(count or 0 for count in counts)
        answer.cached_input_tokens = counts[1]
    output_tokens = whole_number(usage, "output_tokens")
    answer.usage_output_tokens = answer.usage_output_tokens if output_tokens is None else output_tokens

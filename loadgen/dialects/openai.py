"""OpenAI's chat and completions APIs: chunks with deltas, a usage object, `[DONE]`."""

import json
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
    whole_number,
)
from loadgen.http.framing import SSE, Framing
from loadgen.workloads.prompts.prompt import Prompt

DONE = b"[DONE]"
CHAT_FIELDS = frozenset(("tools", "tool_choice", "parallel_tool_calls", "tool_prompt", "chat_template_kwargs"))
REASONING_KEYS = ("reasoning_content", "reasoning")


@dataclass(frozen=True, slots=True)
class OpenAiChat:
    """`POST /v1/chat/completions`."""

    sampling: Sampling
    path: str = "/v1/chat/completions"
    framing: Framing = SSE
    has_template: bool = True
    can_force_length: bool = True

    def body(self, prompt: Prompt) -> bytes:
        return _encode({"messages": with_images(prompt)}, prompt, self.sampling)

    def refused(self, prompt: Prompt) -> str | None:  # noqa: ARG002
        return None

    def read(self, payload: bytes, at_ns: int, answer: ParsedAnswer) -> None:
        _read(payload, at_ns, answer)

    def read_whole(self, payload: bytes, answer: ParsedAnswer) -> None:
        _read_whole(payload, answer)


@dataclass(frozen=True, slots=True)
class OpenAiCompletions:
    """`POST /v1/completions`."""

    sampling: Sampling
    path: str = "/v1/completions"
    framing: Framing = SSE
    has_template: bool = False
    can_force_length: bool = True

    def body(self, prompt: Prompt) -> bytes:
        return _encode({"prompt": prompt.text}, prompt, self.sampling)

    def refused(self, prompt: Prompt) -> str | None:
        name = next((name for name in prompt.fields if name in CHAT_FIELDS), None)
        return other_parts(prompt) if name is None else f"`{name}`"

    def read(self, payload: bytes, at_ns: int, answer: ParsedAnswer) -> None:
        _read(payload, at_ns, answer)

    def read_whole(self, payload: bytes, answer: ParsedAnswer) -> None:
        _read_whole(payload, answer)


def with_images(prompt: Prompt) -> list[Mapping[str, Any]]:
    """The messages of a prompt, with its images before the text of the last one."""
    *before, last = messages_of(prompt)
    if not prompt.images:
        return [*before, last]
    parts = [{"type": "image_url", "image_url": {"url": image.data_url}} for image in prompt.images]
    content = last["content"]
    texts = content if isinstance(content, list) else [{"type": "text", "text": content}]
    return [*before, {**last, "content": [*parts, *texts]}]


def _encode(start: Mapping[str, Any], prompt: Prompt, sampling: Sampling) -> bytes:
    body: dict[str, Any] = {
        **start,
        "model": prompt.adapter or sampling.model,
        "stream": sampling.streams,
        **({"stream_options": {"include_usage": True}} if sampling.streams else {}),
        "temperature": sampling.temperature or 0,
    }
    if sampling.temperature:
        body["seed"] = sampling.seed
    if prompt.output_tokens is not None:
        body["max_tokens"] = prompt.output_tokens
        body |= sampling.exact_length(prompt.output_tokens)
    return encode_request(body, prompt, sampling)


def _read(payload: bytes, at_ns: int, answer: ParsedAnswer) -> None:
    if payload == DONE:
        answer.is_terminated = True
        return
    chunk = decode_object(payload)
    if chunk.get("error") is not None:
        answer.error = _error_type(chunk["error"])
        return
    choices = chunk.get("choices")
    if not isinstance(choices, list):
        raise NotThisApiError(f"an event has no `choices`: {payload[:80]!r}")
    is_open = bool(choices) and all(isinstance(each, dict) and each.get("finish_reason") is None for each in choices)
    tokens = _read_usage(chunk.get("usage"), answer, is_open=is_open)
    for choice in choices:
        _read_choice(choice, tokens, at_ns, answer)


def _read_whole(payload: bytes, answer: ParsedAnswer) -> None:
    response = decode_object(payload)
    if response.get("error") is not None:
        answer.error = _error_type(response["error"])
        return
    choices = response.get("choices")
    if not isinstance(choices, list) or not choices or not isinstance(choices[0], dict):
        raise NotThisApiError(f"a response has no `choices`: {payload[:80]!r}")
    answer.is_terminated = True
    message = choices[0].get("message")
    answer.add_text(message.get("content") if isinstance(message, dict) else choices[0].get("text"))
    answer.add_text(_arguments(message.get("tool_calls")) if isinstance(message, dict) else None)
    answer.finish(choices[0].get("finish_reason"))
    _read_usage(response.get("usage"), answer, is_open=False)


def _error_type(error: Any) -> str:
    return str(error.get("type") or "error") if isinstance(error, dict) else "error"


def _read_choice(choice: Any, tokens: int | None, at_ns: int, answer: ParsedAnswer) -> None:
    if not isinstance(choice, dict):
        raise BadPayloadError(f"a choice is {choice!r}, not an object")
    delta = choice.get("delta")
    if delta is not None and not isinstance(delta, dict):
        raise BadPayloadError(f"`delta` is {delta!r}, not an object")
    is_reasoning = delta is not None and any(delta.get(key) for key in REASONING_KEYS)
    characters = _characters(choice, delta)
    if is_reasoning or characters or (tokens and choice.get("finish_reason") is None):
        answer.add_event(at_ns, tokens or 1, is_reasoning=is_reasoning, characters=characters)
    answer.add_text(choice.get("text") if delta is None else delta.get("content"))
    if answer.pieces is not None and delta is not None:
        answer.add_text(_arguments(delta.get("tool_calls")))
    if choice.get("finish_reason") is not None:
        answer.finish_reason = str(choice["finish_reason"])


def _characters(choice: Mapping[str, Any], delta: Mapping[str, Any] | None) -> int:
    """Characters that a choice adds to the answer: text, reasoning and tool arguments."""
    if delta is None:
        return _length(choice.get("text"))
    content = _length(delta.get("content"))
    if content and len(delta) == 1:
        return content
    reasoning = next((delta[key] for key in REASONING_KEYS if delta.get(key)), None)
    return content + _length(reasoning) + _argument_characters(delta.get("tool_calls"))


def _argument_characters(calls: Any) -> int:
    """Characters of tool arguments in a delta."""
    return sum(_length(each.get("arguments")) for each in _functions(calls))


def _arguments(calls: Any) -> str:
    """The tool arguments in a delta as text; arguments that are an object are encoded."""
    found = [each.get("arguments") for each in _functions(calls)]
    return "".join(each if isinstance(each, str) else json.dumps(each) for each in found if each is not None)


def _functions(calls: Any) -> list[dict[str, Any]]:
    """The functions of tool calls. Some servers send one call, most a list."""
    listed = calls if isinstance(calls, list) else [calls]
    functions = [call.get("function") for call in listed if isinstance(call, dict)]
    return [each for each in functions if isinstance(each, dict)]


def _length(text: Any) -> int:
    """The length of a text; 1 for any other value that is not empty."""
    return len(text) if isinstance(text, str) else int(bool(text))


def _read_usage(usage: Any, answer: ParsedAnswer, *, is_open: bool) -> int | None:
    """Store the newest usage. Returns its new tokens if the server also sends usage with unfinished choices."""
    if usage is None:
        return None
    if not isinstance(usage, dict):
        raise BadPayloadError(f"`usage` is {usage!r}, not an object")
    before = answer.usage_output_tokens or 0
    answer.usage_output_tokens = whole_number(usage, "completion_tokens")
    answer.input_tokens = whole_number(usage, "prompt_tokens")
    prompt_details = usage.get("prompt_tokens_details")
    if isinstance(prompt_details, dict):
        answer.cached_input_tokens = whole_number(prompt_details, "cached_tokens")
    completion_details = usage.get("completion_tokens_details")
    if isinstance(completion_details, dict):
        answer.usage_reasoning_tokens = whole_number(completion_details, "reasoning_tokens")
    is_counted = answer.usage_output_tokens is not None
    answer.counts_are_exact = is_counted and (answer.counts_are_exact or is_open)
    return (answer.usage_output_tokens or 0) - before if answer.counts_are_exact else None

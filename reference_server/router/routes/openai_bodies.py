"""The JSON of OpenAI answers and chunks. The part that all chunks share is rendered once per stream."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy
import orjson

from reference_server.errors import RequestError
from reference_server.messages import FinishReason, Tokens
from reference_server.router.chat.tool_calls import FIRST_CALL_ID, ToolCall, next_call_id
from reference_server.router.generation_stream import Finished, GeneratedToken, TokenArrived
from reference_server.router.infer import CompletedGeneration
from reference_server.router.routes.choices import CallDelta, CallEnd
from reference_server.router.schemas.openai import ChatRequest
from reference_server.router.server_info import ServerInfo
from reference_server.router.sse import JSON_OPTIONS, render_event

_f32 = numpy.float32

FINISH_WORDS = {
    FinishReason.LENGTH: "length",
    FinishReason.EOS_TOKEN: "stop",
    FinishReason.STOP_SEQUENCE: "stop",
}


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of an answer; `cached` prompt tokens came from the prefix cache (0 where it is off)."""

    prompt_tokens: int
    completion_tokens: int
    cached: int

    @classmethod
    def of(cls, input_len: int, end: Finished) -> "Usage":
        return cls(input_len, end.generated_text.generated_tokens, end.cached_input_tokens)

    def with_prompt(self, other: "Usage") -> "Usage":
        """Add another prompt's answer."""
        return Usage(
            self.prompt_tokens + other.prompt_tokens,
            self.completion_tokens + other.completion_tokens,
            self.cached + other.cached,
        )

    def with_choice(self, other: "Usage") -> "Usage":
        """Add another answer to the same prompt."""
        return Usage(
            self.prompt_tokens or other.prompt_tokens,
            self.completion_tokens + other.completion_tokens,
            self.cached or other.cached,
        )

    def to_json(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached},
        }


class CompletionBodies:
    """Answers of `/v1/completions`."""

    def __init__(self, info: ServerInfo, created_s: float) -> None:
        self._frame = {
            "object": "text_completion",
            "id": "",
            "created": int(created_s),
            "model": info.model_id,
            "system_fingerprint": info.fingerprint,
        }
        self._head = b'data: %b,"choices":[{"index":' % orjson.dumps(self._frame)[:-1]
        self._before_text = b'%b0,"text":' % self._head

    def answer(self, generations: Sequence[CompletedGeneration], usage: Usage) -> dict[str, Any]:
        choices = [
            _completion_choice(index, generation.generated.text, FINISH_WORDS[generation.generated.finish_reason])
            for index, generation in enumerate(generations)
        ]
        return self._frame | {"choices": choices, "usage": usage.to_json()}

    @property
    def has_only_text(self) -> bool:
        """Whether a chunk shows nothing of a token but its text."""
        return True

    def render_texts(self, tokens: Tokens) -> bytes:
        """Chunks of the only choice, one for each token."""
        return _join_chunks(self._before_text, tokens, b',"logprobs":null,"finish_reason":null}]}\n\n')

    def render_token(self, index: int, event: TokenArrived | CallDelta) -> bytes:
        assert isinstance(event, TokenArrived), "completions offer no tools"
        text = b'""' if event.token.special else orjson.dumps(event.token.text)
        return b'%b%d,"text":%b,"logprobs":null,"finish_reason":null}]}\n\n' % (self._head, index, text)

    def render_end(self, index: int, event: Finished | CallEnd, usage: Usage) -> bytes:
        assert isinstance(event, Finished), "completions offer no tools"
        text = "" if event.token.special else event.token.text
        choice = _completion_choice(index, text, FINISH_WORDS[event.generated_text.finish_reason])
        return render_event(self._frame | {"choices": [choice], "usage": usage.to_json()})


class ChatBodies:
    """Answers of `/v1/chat/completions`."""

    def __init__(self, info: ServerInfo, created_s: float, request: ChatRequest) -> None:
        model = info.model_id if request.model in (None, "tgi") else request.model
        self._frame = {
            "id": "",
            "created": int(created_s),
            "model": model,
            "system_fingerprint": info.fingerprint,
        }
        self._wants_logprobs = bool(request.logprobs)
        self._call_id = next_call_id(request.messages) if request.tools else FIRST_CALL_ID
        chunk = {"object": "chat.completion.chunk", **self._frame}
        self._head = b'data: %b,"choices":[{"index":' % orjson.dumps(chunk)[:-1]
        self._before_text = b'%b0,"delta":{"role":"assistant","content":' % self._head

    def answer(
        self, generations: Sequence[CompletedGeneration], usage: Usage, calls: Sequence[ToolCall | None]
    ) -> dict[str, Any]:
        """calls: the tool call of each generation; None for text."""
        choices = [
            {
                "index": index,
                "message": _message(generation, call),
                "logprobs": self._answer_logprobs(generation),
                "finish_reason": FINISH_WORDS[generation.generated.finish_reason] if call is None else "tool_calls",
            }
            for index, (generation, call) in enumerate(zip(generations, calls, strict=True))
        ]
        return {"object": "chat.completion", **self._frame, "choices": choices, "usage": usage.to_json()}

    @property
    def has_only_text(self) -> bool:
        """Whether a chunk of text shows nothing of a token but its text."""
        return not self._wants_logprobs

    def render_texts(self, tokens: Tokens) -> bytes:
        """Chunks of the only choice, one for each token; without log-probabilities."""
        end = b'},"logprobs":null,"finish_reason":null}],"usage":null}\n\n'
        return _join_chunks(self._before_text, tokens, end)

    def render_token(self, index: int, event: TokenArrived | CallDelta) -> bytes:
        if isinstance(event, CallDelta):
            return self._render_call(index, self._call_delta(event), event.event, b"null")
        return self._render_text(index, event, b"null")

    def render_end(self, index: int, event: Finished | CallEnd, usage: Usage) -> bytes:
        del usage  # chat sends it once for all choices
        if isinstance(event, Finished):
            return self._render_text(index, event, _finish_word(event))
        reason = b'"tool_calls"' if event.is_complete else _finish_word(event.event)
        if event.delta is None:
            return self._render_call(index, b'{"role":"assistant"}', event.event, reason)
        return self._render_call(index, self._call_delta(event.delta), event.delta.event, reason)

    def render_usage(self, usage: Usage) -> bytes:
        chunk = {"object": "chat.completion.chunk", **self._frame, "choices": [], "usage": usage.to_json()}
        return render_event(chunk)

    def _render_text(self, index: int, event: TokenArrived | Finished, reason: bytes) -> bytes:
        token = event.token
        text = b'""' if token.special else orjson.dumps(token.text)
        logprobs = self._logprobs(event) if self._wants_logprobs else b"null"
        return (
            b'%b%d,"delta":{"role":"assistant","content":%b},"logprobs":%b,"finish_reason":%b}],"usage":null}\n\n'
            % (self._head, index, text, logprobs, reason)
        )

    def _render_call(self, index: int, delta: bytes, token: TokenArrived | Finished | None, reason: bytes) -> bytes:
        """token: its log-probabilities are added, if they were requested."""
        logprobs = self._logprobs(token) if self._wants_logprobs and token is not None else b"null"
        return b'%b%d,"delta":%b,"logprobs":%b,"finish_reason":%b}],"usage":null}\n\n' % (
            self._head, index, delta, logprobs, reason,
        )  # fmt: skip

    def _call_delta(self, delta: CallDelta) -> bytes:
        function = {"name": delta.name, "arguments": delta.arguments}
        call = {"index": 0, "id": self._call_id, "type": "function", "function": function}
        return orjson.dumps({"role": "assistant", "tool_calls": [call]})

    def _logprobs(self, event: TokenArrived | Finished) -> bytes:
        return orjson.dumps({"content": [_logprob(event.token, event.top_tokens)]}, option=JSON_OPTIONS)

    def _answer_logprobs(self, generation: CompletedGeneration) -> dict[str, Any] | None:
        if not self._wants_logprobs:
            return None
        tops: Sequence[Sequence[GeneratedToken]] = generation.top_tokens or [()] * len(generation.tokens)
        return {"content": [_logprob(token, top) for token, top in zip(generation.tokens, tops, strict=True)]}


def _join_chunks(before: bytes, tokens: Tokens, after: bytes) -> bytes:
    """A chunk for each token: its text between two constant parts; special tokens have no text."""
    if len(tokens.texts) == 1:
        return before + (b'""' if tokens.is_special[0] else orjson.dumps(tokens.texts[0])) + after
    shown = zip(tokens.texts, tokens.is_special, strict=True)
    return b"".join([before + (b'""' if is_special else orjson.dumps(text)) + after for text, is_special in shown])


def render_stream_error(error: RequestError) -> bytes:
    """An error event of an OpenAI stream; the code is always 422, as in TGI."""
    return render_event({"error": {"message": str(error), "http_status_code": 422}})


def _message(generation: CompletedGeneration, call: ToolCall | None) -> dict[str, Any]:
    """A message of the assistant: text, or one tool call."""
    if call is None:
        return {"role": "assistant", "content": generation.generated.text}
    function = {"description": None, "name": call.name, "arguments": call.arguments}
    return {"role": "assistant", "tool_calls": [{"id": FIRST_CALL_ID, "type": "function", "function": function}]}


def _finish_word(event: Finished) -> bytes:
    return b'"%b"' % FINISH_WORDS[event.generated_text.finish_reason].encode()


def _completion_choice(index: int, text: str, reason: str) -> dict[str, Any]:
    return {"index": index, "text": text, "logprobs": None, "finish_reason": reason}


def _logprob(token: GeneratedToken, top_tokens: Sequence[GeneratedToken]) -> dict[str, Any]:
    top = [{"token": each.text, "logprob": _f32(each.logprob)} for each in top_tokens]
    return {"token": token.text, "logprob": _f32(token.logprob), "top_logprobs": top}

"""The JSON of OpenAI answers and chunks. What repeats from chunk to chunk is rendered once a stream."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy
import orjson

from reference_server.errors import RequestError
from reference_server.messages import FinishReason
from reference_server.router.batching import Finished, GeneratedToken, TokenArrived
from reference_server.router.facts import ServerFacts
from reference_server.router.infer import Answer
from reference_server.router.routes.choices import CallDelta, CallEnd
from reference_server.router.schemas.openai import ChatRequest
from reference_server.router.sse import JSON_OPTIONS, render_event
from reference_server.router.tool_calls import FIRST_CALL_ID, ToolCall, next_call_id

_f32 = numpy.float32

FINISH_WORDS = {
    FinishReason.LENGTH: "length",
    FinishReason.EOS_TOKEN: "stop",
    FinishReason.STOP_SEQUENCE: "stop",
}


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of an answer; `cached` of the prompt's came from the prefix cache."""

    prompt_tokens: int
    completion_tokens: int
    cached: int

    @classmethod
    def of(cls, input_len: int, end: Finished) -> "Usage":
        return cls(input_len, end.generated_text.generated_tokens, end.cached_input_tokens)

    def with_prompt(self, other: "Usage") -> "Usage":
        """With another prompt's answer."""
        return Usage(
            self.prompt_tokens + other.prompt_tokens,
            self.completion_tokens + other.completion_tokens,
            self.cached + other.cached,
        )

    def with_choice(self, other: "Usage") -> "Usage":
        """With another answer to the same prompt."""
        return Usage(
            self.prompt_tokens or other.prompt_tokens,
            self.completion_tokens + other.completion_tokens,
            self.cached or other.cached,
        )

    def to_json(self) -> dict[str, Any]:
        body: dict[str, Any] = {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
        }
        if self.cached:
            body["prompt_tokens_details"] = {"cached_tokens": self.cached}
        return body


class CompletionBodies:
    """Answers of `/v1/completions`."""

    def __init__(self, facts: ServerFacts, created_s: float) -> None:
        self._frame = {
            "object": "text_completion",
            "id": "",
            "created": int(created_s),
            "model": facts.model_id,
            "system_fingerprint": facts.fingerprint,
        }
        self._head = b'data: %b,"choices":[{"index":' % orjson.dumps(self._frame)[:-1]

    def answer(self, answers: Sequence[Answer], usage: Usage) -> dict[str, Any]:
        choices = [
            _completion_choice(index, answer.generated.text, FINISH_WORDS[answer.generated.finish_reason])
            for index, answer in enumerate(answers)
        ]
        return self._frame | {"choices": choices, "usage": usage.to_json()}

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

    def __init__(self, facts: ServerFacts, created_s: float, request: ChatRequest) -> None:
        model = facts.model_id if request.model in (None, "tgi") else request.model
        self._frame = {
            "id": "",
            "created": int(created_s),
            "model": model,
            "system_fingerprint": facts.fingerprint,
        }
        self._wants_logprobs = bool(request.logprobs)
        self._call_id = next_call_id(request.messages) if request.tools else FIRST_CALL_ID
        chunk = {"object": "chat.completion.chunk", **self._frame}
        self._head = b'data: %b,"choices":[{"index":' % orjson.dumps(chunk)[:-1]

    def answer(self, answers: Sequence[Answer], usage: Usage, calls: Sequence[ToolCall | None]) -> dict[str, Any]:
        """calls: what each of `answers` calls; None for one that is text."""
        choices = [
            {
                "index": index,
                "message": _message(answer, call),
                "logprobs": self._answer_logprobs(answer),
                "finish_reason": FINISH_WORDS[answer.generated.finish_reason] if call is None else "tool_calls",
            }
            for index, (answer, call) in enumerate(zip(answers, calls, strict=True))
        ]
        return {"object": "chat.completion", **self._frame, "choices": choices, "usage": usage.to_json()}

    def render_token(self, index: int, event: TokenArrived | CallDelta) -> bytes:
        if isinstance(event, CallDelta):
            return self._render_call(index, self._call_delta(event), event.event, b"null")
        return self._render_text(index, event, b"null")

    def render_end(self, index: int, event: Finished | CallEnd, usage: Usage) -> bytes:
        del usage  # chat tells it once for all choices
        if isinstance(event, Finished):
            return self._render_text(index, event, _finish_word(event))
        reason = b'"tool_calls"' if event.is_complete else _finish_word(event.event)
        return self._render_call(index, b'{"role":"assistant"}', None if event.is_told else event.event, reason)

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
        """token: whose log-probabilities the chunk tells, if they are wanted."""
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

    def _answer_logprobs(self, answer: Answer) -> dict[str, Any] | None:
        if not self._wants_logprobs:
            return None
        tops: Sequence[Sequence[GeneratedToken]] = answer.top_tokens or [()] * len(answer.tokens)
        return {"content": [_logprob(token, top) for token, top in zip(answer.tokens, tops, strict=True)]}


def render_stream_error(error: RequestError) -> bytes:
    """A failure on an OpenAI stream; the code is always 422, as in TGI."""
    return render_event({"error": {"message": str(error), "http_status_code": 422}})


def _message(answer: Answer, call: ToolCall | None) -> dict[str, Any]:
    """A turn of the assistant: text, or one call."""
    if call is None:
        return {"role": "assistant", "content": answer.generated.text}
    function = {"description": None, "name": call.name, "arguments": call.arguments}
    return {"role": "assistant", "tool_calls": [{"id": FIRST_CALL_ID, "type": "function", "function": function}]}


def _finish_word(event: Finished) -> bytes:
    return b'"%b"' % FINISH_WORDS[event.generated_text.finish_reason].encode()


def _completion_choice(index: int, text: str, reason: str) -> dict[str, Any]:
    return {"index": index, "text": text, "logprobs": None, "finish_reason": reason}


def _logprob(token: GeneratedToken, top_tokens: Sequence[GeneratedToken]) -> dict[str, Any]:
    top = [{"token": each.text, "logprob": _f32(each.logprob)} for each in top_tokens]
    return {"token": token.text, "logprob": _f32(token.logprob), "top_logprobs": top}

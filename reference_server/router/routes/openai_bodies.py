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
from reference_server.router.schemas.openai import ChatRequest
from reference_server.router.sse import JSON_OPTIONS, render_event

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

    def render_token(self, index: int, event: TokenArrived) -> bytes:
        text = b'""' if event.token.special else orjson.dumps(event.token.text)
        return b'%b%d,"text":%b,"logprobs":null,"finish_reason":null}]}\n\n' % (self._head, index, text)

    def render_end(self, index: int, event: Finished, usage: Usage) -> bytes:
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
        chunk = {"object": "chat.completion.chunk", **self._frame}
        self._head = b'data: %b,"choices":[{"index":' % orjson.dumps(chunk)[:-1]

    def answer(self, answers: Sequence[Answer], usage: Usage) -> dict[str, Any]:
        choices = [
            {
                "index": index,
                "message": {"role": "assistant", "content": answer.generated.text},
                "logprobs": self._answer_logprobs(answer),
                "finish_reason": FINISH_WORDS[answer.generated.finish_reason],
            }
            for index, answer in enumerate(answers)
        ]
        return {"object": "chat.completion", **self._frame, "choices": choices, "usage": usage.to_json()}

    def render_token(self, index: int, event: TokenArrived) -> bytes:
        return self._render(index, event, b"null")

    def render_end(self, index: int, event: Finished, usage: Usage) -> bytes:
        del usage  # chat tells it once for all choices
        return self._render(index, event, b'"%b"' % FINISH_WORDS[event.generated_text.finish_reason].encode())

    def render_usage(self, usage: Usage) -> bytes:
        chunk = {"object": "chat.completion.chunk", **self._frame, "choices": [], "usage": usage.to_json()}
        return render_event(chunk)

    def _render(self, index: int, event: TokenArrived | Finished, reason: bytes) -> bytes:
        token = event.token
        text = b'""' if token.special else orjson.dumps(token.text)
        logprobs = b"null"
        if self._wants_logprobs:
            logprobs = orjson.dumps({"content": [_logprob(token, event.top_tokens)]}, option=JSON_OPTIONS)
        return (
            b'%b%d,"delta":{"role":"assistant","content":%b},"logprobs":%b,"finish_reason":%b}],"usage":null}\n\n'
            % (self._head, index, text, logprobs, reason)
        )

    def _answer_logprobs(self, answer: Answer) -> dict[str, Any] | None:
        if not self._wants_logprobs:
            return None
        tops: Sequence[Sequence[GeneratedToken]] = answer.top_tokens or [()] * len(answer.tokens)
        return {"content": [_logprob(token, top) for token, top in zip(answer.tokens, tops, strict=True)]}


def render_stream_error(error: RequestError) -> bytes:
    """A failure on an OpenAI stream; the code is always 422, as in TGI."""
    return render_event({"error": {"message": str(error), "http_status_code": 422}})


def _completion_choice(index: int, text: str, reason: str) -> dict[str, Any]:
    return {"index": index, "text": text, "logprobs": None, "finish_reason": reason}


def _logprob(token: GeneratedToken, top_tokens: Sequence[GeneratedToken]) -> dict[str, Any]:
    top = [{"token": each.text, "logprob": _f32(each.logprob)} for each in top_tokens]
    return {"token": token.text, "logprob": _f32(token.logprob), "top_logprobs": top}

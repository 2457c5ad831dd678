"""/generate /generate_stream /tokenize and POST of /: the native API."""

import logging
from collections.abc import Sequence
from typing import Any

import numpy
import orjson

from reference_server.errors import IncompleteGenerationError, RequestError, ValidationError
from reference_server.messages import Tokens
from reference_server.router.batching import Finished, GeneratedToken, TokenArrived
from reference_server.router.exchange import Exchange, Route
from reference_server.router.infer import Answer
from reference_server.router.schemas.tgi import CompatGenerateRequest, GenerateRequest
from reference_server.router.services import Services
from reference_server.router.sse import JSON_OPTIONS, render_event
from reference_server.router.times import RequestTimes, timing_headers
from reference_server.router.validation import GenerateCall, check_stream

logger = logging.getLogger(__name__)

_f32 = numpy.float32
_SPECIAL = (b"false", b"true")


class GenerateRoutes:
    """Handlers of the native API."""

    def __init__(self, services: Services) -> None:
        self._services = services

    def routes(self) -> list[Route]:
        return [
            Route("POST", "/", self.compat_generate, (CompatGenerateRequest,), needs_key=True),
            Route("POST", "/generate", self.generate, (GenerateRequest,), needs_key=True),
            Route("POST", "/generate_stream", self.generate_stream, (GenerateRequest,), needs_key=True),
            Route("POST", "/tokenize", self.tokenize, (GenerateRequest,), needs_key=True),
        ]

    async def compat_generate(self, exchange: Exchange, request: CompatGenerateRequest) -> None:
        asked = request.parameters
        if asked.return_full_text is None:
            asked = asked.model_copy(update={"return_full_text": self._services.facts.returns_full_text})
            request = request.model_copy(update={"parameters": asked})
        if request.stream:
            await self.generate_stream(exchange, request)
        else:
            await self._answer(exchange, request, in_list=True)

    async def generate(self, exchange: Exchange, request: GenerateRequest) -> None:
        await self._answer(exchange, request, in_list=False)

    async def generate_stream(self, exchange: Exchange, request: GenerateRequest) -> None:
        """Whatever goes wrong becomes an event: the status is 200 from the start."""
        services, asked = self._services, request.parameters
        arrived_ns = services.clock_ns()
        services.metrics.request_count.add()
        prefix = request.inputs if asked.return_full_text else ""
        async with exchange.stream(services.stream_headers(len(request.inputs))) as stream:
            try:
                self._check_stream(request)
                async with services.infer.start(GenerateCall(request.inputs, asked)) as running:
                    index = 0
                    async for event in running:
                        if isinstance(event, TokenArrived):
                            index += 1
                            await stream.send(_render_token(index, event))
                        elif isinstance(event, Finished):
                            times = RequestTimes.of(arrived_ns, event, services.clock_ns())
                            times.observe(services.metrics, asked, event.generated_text.seed)
                            details = _stream_details(event, running.input_len) if asked.details else None
                            await stream.send(_render_end(index + 1, event, prefix, details))
            except RequestError as error:
                logger.error("%s", error)
                await stream.send(render_error(error))

    async def tokenize(self, exchange: Exchange, request: GenerateRequest) -> None:
        await exchange.answer_json(await self._services.infer.validator.tokenize(request.inputs, True))

    def _check_stream(self, request: GenerateRequest) -> None:
        try:
            check_stream(request.parameters)
        except ValidationError:
            self._services.metrics.request_failure.add(label="validation")
            raise

    async def _answer(self, exchange: Exchange, request: GenerateRequest, in_list: bool) -> None:
        services, asked = self._services, request.parameters
        arrived_ns = services.clock_ns()
        services.metrics.request_count.add()
        best, others = await services.infer.generate_best(GenerateCall(request.inputs, asked))
        times = RequestTimes.of(arrived_ns, best.finished, services.clock_ns())
        times.observe(services.metrics, asked, best.generated.seed)
        prefix = request.inputs if asked.return_full_text else ""
        body: dict[str, Any] = {"generated_text": prefix + best.generated.text}
        if asked.details or asked.decoder_input_details:
            body["details"] = _details(best, others, prefix)
        headers = [
            self._services.compute_type,
            (b"x-compute-time", repr(times.total_ns / 1e9).encode()),
            *timing_headers([times], [best], len(request.inputs)),
        ]
        await exchange.answer_json([body] if in_list else body, headers=headers)


def render_error(error: RequestError) -> bytes:
    """A failure on a native stream."""
    if isinstance(error, IncompleteGenerationError):
        return render_event({"error": "Incomplete generation stream", "error_type": "incomplete_generation_stream"})
    return render_event({"error": str(error), "error_type": error.error_type})


def _render_token(index: int, event: TokenArrived) -> bytes:
    """An event of the middle of a stream, put together by hand: this runs once a token."""
    if event.top_tokens:
        return render_event(_stream_token(index, event, None, None))
    token = event.token
    return (
        b'data: {"index":%d,"token":{"id":%d,"text":%b,"logprob":%b,"special":%b},'
        b'"generated_text":null,"details":null}\n\n'
        % (
            index,
            token.id,
            orjson.dumps(token.text),
            orjson.dumps(_f32(token.logprob), option=JSON_OPTIONS),
            _SPECIAL[token.special],
        )
    )


def _render_end(index: int, event: Finished, prefix: str, details: dict[str, Any] | None) -> bytes:
    return render_event(_stream_token(index, event, prefix + event.generated_text.text, details))


def _stream_token(
    index: int, event: TokenArrived | Finished, text: str | None, details: dict[str, Any] | None
) -> dict[str, Any]:
    body: dict[str, Any] = {"index": index, "token": _token(event.token)}
    if event.top_tokens:
        body["top_tokens"] = [_token(token) for token in event.top_tokens]
    return body | {"generated_text": text, "details": details}


def _stream_details(event: Finished, input_len: int) -> dict[str, Any]:
    generated = event.generated_text
    return {
        "finish_reason": generated.finish_reason,
        "generated_tokens": generated.generated_tokens,
        "seed": generated.seed,
        "input_length": input_len,
        **_cached(event.cached_input_tokens),
    }


def _details(best: Answer, others: Sequence[Answer], prefix: str) -> dict[str, Any]:
    body = _sequence(best)
    if others:
        body["best_of_sequences"] = [
            {"generated_text": prefix + other.generated.text, **_sequence(other)} for other in others
        ]
    return body | _cached(best.finished.cached_input_tokens)


def _sequence(answer: Answer) -> dict[str, Any]:
    generated = answer.generated
    body = {
        "finish_reason": generated.finish_reason,
        "generated_tokens": generated.generated_tokens,
        "seed": generated.seed,
        "prefill": _prefill(answer.prefill) if answer.prefill else [],
        "tokens": [_token(token) for token in answer.tokens],
    }
    if answer.top_tokens:
        body["top_tokens"] = [[_token(token) for token in position] for position in answer.top_tokens]
    return body


def _prefill(tokens: Tokens) -> list[dict[str, Any]]:
    return [
        {"id": token_id, "text": text, "logprob": _f32(logprob)}
        for token_id, text, logprob in zip(tokens.ids, tokens.texts, tokens.logprobs, strict=True)
    ]


def _token(token: GeneratedToken) -> dict[str, Any]:
    return {"id": token.id, "text": token.text, "logprob": _f32(token.logprob), "special": token.special}


def _cached(tokens: int) -> dict[str, int]:
    return {"cached_input_tokens": tokens} if tokens else {}

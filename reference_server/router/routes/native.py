"""/generate /generate_stream /tokenize and POST of /: the native API."""

import logging
from collections.abc import Sequence
from typing import Any

import numpy
import orjson

from reference_server.errors import IncompleteGenerationError, RequestError, ValidationError
from reference_server.messages import Generation, Tokens
from reference_server.router.generation_stream import Finished, GeneratedToken, TokenArrived
from reference_server.router.http_call import HttpCall, Route
from reference_server.router.infer import CompletedGeneration
from reference_server.router.schemas.tgi import CompatGenerateRequest, GenerateRequest
from reference_server.router.services import Services
from reference_server.router.sse import JSON_OPTIONS, EventStream, render_event
from reference_server.router.telemetry.times import timing_headers
from reference_server.router.validation.request_rules import check_stream
from reference_server.router.validation.validator import GenerateCall

logger = logging.getLogger(__name__)

_f32 = numpy.float32
_SPECIAL = (b"false", b"true")


class NativeRoutes:
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

    async def compat_generate(self, http: HttpCall, request: CompatGenerateRequest) -> None:
        parameters = request.parameters
        if parameters.return_full_text is None:
            update = {"return_full_text": self._services.info.returns_full_text}
            request = request.model_copy(update={"parameters": parameters.model_copy(update=update)})
        if request.stream:
            await self.generate_stream(http, request)
        else:
            await self._answer(http, request, in_list=True)

    async def generate(self, http: HttpCall, request: GenerateRequest) -> None:
        await self._answer(http, request, in_list=False)

    async def generate_stream(self, http: HttpCall, request: GenerateRequest) -> None:
        """The status is 200 from the start; errors are events."""
        services, parameters = self._services, request.parameters
        arrived_ns = services.clock_ns()
        services.metrics.request_count.add()
        call = GenerateCall(request.inputs, parameters, context=http.context)
        prefix = request.inputs if parameters.return_full_text else ""
        async with http.stream(services.stream_headers(len(request.inputs))) as stream:
            try:
                self._check_stream(request)
                async with services.infer.start(call, arrived_ns) as running:
                    tokens = NativeTokens(stream)
                    running.write_with(tokens.write)
                    async for event in running:
                        if isinstance(event, TokenArrived):
                            await tokens.send(event)
                        elif isinstance(event, Finished):
                            services.observe_success(call, arrived_ns, event)
                            details = _stream_details(event, running.input_len) if parameters.details else None
                            await stream.send(_render_end(tokens.count + 1, event, prefix, details))
            except RequestError as error:
                logger.error("%s", error)
                await stream.send(render_error(error))

    async def tokenize(self, http: HttpCall, request: GenerateRequest) -> None:
        async with self._services.infer.validator.tokenized(request.inputs, True) as tokens:
            await http.answer_rendered(tokens)

    def _check_stream(self, request: GenerateRequest) -> None:
        try:
            check_stream(request.parameters)
        except ValidationError:
            self._services.metrics.request_failure.add(label="validation")
            raise

    async def _answer(self, http: HttpCall, request: GenerateRequest, in_list: bool) -> None:
        services, parameters = self._services, request.parameters
        arrived_ns = services.clock_ns()
        services.metrics.request_count.add()
        call = GenerateCall(request.inputs, parameters, context=http.context)
        best, others = await services.infer.generate_best(call, arrived_ns)
        times = services.observe_success(call, arrived_ns, best.finished)
        prefix = request.inputs if parameters.return_full_text else ""
        body: dict[str, Any] = {"generated_text": prefix + best.generated.text}
        if parameters.details or parameters.decoder_input_details:
            body["details"] = _details(best, others, prefix)
        headers = [
            services.compute_type,
            times.compute_time,
            *timing_headers([times], len(request.inputs), best.input_len, best.generated.generated_tokens),
        ]
        await http.answer_json([body] if in_list else body, headers=headers)


def render_error(error: RequestError) -> bytes:
    """An error event of a native stream."""
    if isinstance(error, IncompleteGenerationError):
        return render_event({"error": "Incomplete generation stream", "error_type": "incomplete_generation_stream"})
    return render_event({"error": str(error), "error_type": error.error_type})


class NativeTokens:
    """The events of one stream for tokens that are not the last; `count` tokens so far."""

    def __init__(self, stream: EventStream) -> None:
        self.count = 0
        self._stream = stream

    def write(self, generation: Generation) -> bool:
        """Write the tokens of a step at once; those with alternatives are left to `send`."""
        if generation.top_tokens:
            return False
        tokens = generation.tokens
        fields = zip(tokens.ids, tokens.texts, tokens.logprobs, tokens.is_special, strict=True)
        frames = [_render_token(index, *token) for index, token in enumerate(fields, start=self.count + 1)]
        if not self._stream.write_now(frames[0] if len(frames) == 1 else b"".join(frames)):
            return False
        self.count += len(frames)
        return True

    async def send(self, event: TokenArrived) -> None:
        self.count += 1
        if event.top_tokens:
            await self._stream.send(render_event(_stream_token(self.count, event, None, None)))
        else:
            await self._stream.send(_render_token(self.count, *event.token))


def _render_token(index: int, id_: int, text: str, logprob: float, special: bool) -> bytes:
    """Formatted by hand, since it runs for every token."""
    return (
        b'data: {"index":%d,"token":{"id":%d,"text":%b,"logprob":%b,"special":%b},'
        b'"generated_text":null,"details":null}\n\n'
        % (index, id_, orjson.dumps(text), orjson.dumps(_f32(logprob), option=JSON_OPTIONS), _SPECIAL[special])
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
        "cached_input_tokens": event.cached_input_tokens,
    }


def _details(best: CompletedGeneration, others: Sequence[CompletedGeneration], prefix: str) -> dict[str, Any]:
    body = _sequence(best)
    if others:
        body["best_of_sequences"] = [
            {"generated_text": prefix + other.generated.text, **_sequence(other)} for other in others
        ]
    return body | {"cached_input_tokens": best.finished.cached_input_tokens}


def _sequence(answer: CompletedGeneration) -> dict[str, Any]:
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

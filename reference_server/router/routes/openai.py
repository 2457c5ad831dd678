"""/v1/completions /v1/chat/completions /chat_tokenize: the OpenAI API as TGI serves it."""

import logging
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial

from reference_server.errors import RequestError, TemplateError, ValidationError
from reference_server.router.chat.tool_calls import ToolCall, parse_call
from reference_server.router.chat.tools import NO_TOOL, ToolOffer, offer_of
from reference_server.router.generation_stream import Finished, PrefillDone
from reference_server.router.http_call import HttpCall, HttpError, Route
from reference_server.router.infer import CompletedGeneration, all_or_nothing
from reference_server.router.routes.choices import CallEnd, StreamedChoice, interleave
from reference_server.router.routes.openai_bodies import (
    ChatBodies,
    CompletionBodies,
    Usage,
    render_stream_error,
)
from reference_server.router.routes.openai_calls import chat_calls, check_common, check_completion, completion_calls
from reference_server.router.schemas.openai import ChatRequest, CompletionRequest, SamplingFields
from reference_server.router.services import Services
from reference_server.router.sse import DONE, render_json
from reference_server.router.telemetry.request_context import RequestContext
from reference_server.router.telemetry.times import RequestTimes, timing_headers
from reference_server.router.validation.validator import GenerateCall

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ChoiceResult:
    """A finished choice of an answer that is not streamed; `tool_call` is None for text."""

    call: GenerateCall
    generation: CompletedGeneration
    times: RequestTimes
    tool_call: ToolCall | None = None


class OpenAiRoutes:
    """Handlers of the OpenAI API."""

    def __init__(self, services: Services) -> None:
        self._services = services

    def routes(self) -> list[Route]:
        return [
            Route("POST", "/v1/completions", self.completions, (CompletionRequest,), needs_key=True),
            Route("POST", "/v1/chat/completions", self.chat, (ChatRequest,), needs_key=True),
            # TGI requires no key here; `--auth-all-routes` does.
            Route("POST", "/chat_tokenize", self.chat_tokenize, (ChatRequest,)),
        ]

    async def completions(self, http: HttpCall, request: CompletionRequest) -> None:
        services = self._services
        arrived_ns = services.clock_ns()
        services.metrics.request_count.add(1 + len(request.prompt))
        choices = self._check_common(request)
        self._check_completion(request, choices)
        calls = completion_calls(request, choices, http.context)
        characters = sum(map(len, request.prompt))
        bodies = CompletionBodies(services.info, services.wall_s())
        if request.stream:
            streamed = [StreamedChoice(services, call, arrived_ns) for call in calls]
            await self._stream(http, streamed, bodies, characters, include_usage=False)
            return
        results = await self._run(calls, arrived_ns)
        generations = [each.generation for each in results]
        prompt_tokens = sum(each.input_len for each in generations)
        generated_tokens = sum(each.generated.generated_tokens for each in generations)
        times = [each.times for each in results]
        headers = [services.compute_type, *timing_headers(times, characters, prompt_tokens, generated_tokens)]
        await http.answer_json(bodies.answer(generations, usage_of(generations, choices)), headers=headers)

    async def chat(self, http: HttpCall, request: ChatRequest) -> None:
        services = self._services
        arrived_ns = services.clock_ns()
        services.metrics.request_count.add(2)
        choices = self._check_common(request)
        prompt, offer = await self._prompt(request)
        calls = self._chat_calls(request, prompt, offer, choices, http.context)
        bodies = ChatBodies(services.info, services.wall_s(), request)
        if request.stream:
            streamed = [
                StreamedChoice(
                    services,
                    call,
                    arrived_ns,
                    None if offer is None else partial(self._call_without_tools, request, index, http.context),
                )
                for index, call in enumerate(calls)
            ]
            options = request.stream_options
            include_usage = options is not None and options.include_usage
            await self._stream(http, streamed, bodies, len(prompt), include_usage)
            return
        results = await self._run(calls, arrived_ns)
        if offer is not None:
            results = await self._parse_tool_calls(request, results, http.context)
        generations = [each.generation for each in results]
        usage = usage_of(generations, choices)
        slowest = max((each.times for each in results), key=lambda each: each.total_ns)
        characters = len(results[0].call.prompt)
        headers = [
            services.compute_type,
            slowest.compute_time,
            *timing_headers([slowest], characters, generations[0].input_len, usage.completion_tokens),
        ]
        body = bodies.answer(generations, usage, [each.tool_call for each in results])
        await http.answer_json(body, headers=headers)

    async def chat_tokenize(self, http: HttpCall, request: ChatRequest) -> None:
        self._services.metrics.request_count.add()
        prompt, _ = await self._prompt(request)
        async with self._services.infer.validator.tokenized(prompt, False) as tokens:
            await http.answer_rendered(
                b'{"tokenize_response":', tokens, b',"templated_text":', render_json(prompt), b"}"
            )

    async def calls_of(self, request: ChatRequest, context: RequestContext) -> list[GenerateCall]:
        """The generations of a chat request, one per choice."""
        choices = self._check_common(request)
        return self._chat_calls(request, *await self._prompt(request), choices, context)

    def _check_common(self, request: SamplingFields) -> int:
        """Check the rules of both routes; returns the number of choices."""
        with self._counting(ValidationError, "validation"):
            return check_common(request, self._services.info.limits.max_best_of)

    def _check_completion(self, request: CompletionRequest, choices: int) -> None:
        limit = self._services.info.max_client_batch_size
        if request.suffix:
            self._count_failure("validation")
            raise HttpError(
                422,
                "Suffix is not supported and can be achieved by preprocessing the prompt.",
                "suffix not supported",
            )
        if len(request.prompt) > limit:
            self._count_failure("validation")
            raise HttpError(
                422, f"Number of prompts exceeds the maximum allowed batch size of {limit}", "batch size exceeded"
            )
        with self._counting(ValidationError, "validation"):
            check_completion(request, choices)

    async def _prompt(self, request: ChatRequest) -> tuple[str, ToolOffer | None]:
        """The rendered conversation, and the tools that it offers."""
        offer = offer_of(request)
        if self._services.render is None:
            raise TemplateError("template not found")
        with self._counting(TemplateError, "template"):
            return await self._services.render(request.messages, offer), offer

    def _chat_calls(
        self, request: ChatRequest, prompt: str, offer: ToolOffer | None, choices: int, context: RequestContext
    ) -> list[GenerateCall]:
        with self._counting(ValidationError, "validation"):
            return chat_calls(request, prompt, offer, choices, context)

    async def _call_without_tools(self, request: ChatRequest, choice: int, context: RequestContext) -> GenerateCall:
        return (await self.calls_of(request.model_copy(update={"tools": None}), context))[choice]

    async def _parse_tool_calls(
        self, request: ChatRequest, results: Sequence[ChoiceResult], context: RequestContext
    ) -> list[ChoiceResult]:
        """Parse each generation's tool call; run those that call no tool again, without tools. Raises `ToolError`."""
        services = self._services
        parsed = [replace(each, tool_call=parse_call(each.generation.generated.text)) for each in results]
        declined = [index for index, each in enumerate(parsed) if each.tool_call and each.tool_call.name == NO_TOOL]
        if declined:
            arrived_ns = services.clock_ns()
            services.metrics.request_count.add(len(declined))
            calls = [await self._call_without_tools(request, index, context) for index in declined]
            for index, result in zip(declined, await self._run(calls, arrived_ns), strict=True):
                parsed[index] = result
        return parsed

    @contextmanager
    def _counting(self, kind: type[RequestError], label: str) -> Iterator[None]:
        """Count errors of this kind under `label`."""
        try:
            yield
        except kind:
            self._count_failure(label)
            raise

    def _count_failure(self, err: str) -> None:
        self._services.metrics.request_failure.add(label=err)

    async def _run(self, calls: Sequence[GenerateCall], arrived_ns: int) -> list[ChoiceResult]:
        services = self._services
        generations = await all_or_nothing([services.infer.generate(call, arrived_ns) for call in calls])
        return [
            ChoiceResult(call, generation, services.observe_success(call, arrived_ns, generation.finished))
            for call, generation in zip(calls, generations, strict=True)
        ]

    async def _stream(
        self,
        http: HttpCall,
        choices: Sequence[StreamedChoice],
        bodies: "CompletionBodies | ChatBodies",
        characters: int,
        include_usage: bool,
    ) -> None:
        services = self._services
        total = Usage(0, 0, 0)
        async with http.stream(services.stream_headers(characters)) as stream, AsyncExitStack() as held:
            started = [await _start(choice, held) for choice in choices]
            only = started[0] if len(started) == 1 else None  # several take turns
            if isinstance(only, StreamedChoice) and bodies.has_only_text:
                only.write_with(lambda generation: stream.write_now(bodies.render_texts(generation.tokens)))
            async for index, event in interleave(started):
                if isinstance(event, Finished | CallEnd):
                    choice, end = choices[index], event.event if isinstance(event, CallEnd) else event
                    services.observe_success(choice.call, choice.arrived_ns, end)
                    usage = Usage.of(choice.input_len, end)
                    total = total.with_choice(usage)
                    await stream.send(bodies.render_end(index, event, usage))
                elif isinstance(event, RequestError):
                    logger.error("%s", event)
                    await stream.send(render_stream_error(event))
                elif not isinstance(event, PrefillDone):
                    await stream.send(bodies.render_token(index, event))
            if include_usage and isinstance(bodies, ChatBodies) and total.completion_tokens:
                await stream.send(bodies.render_usage(total))
            await stream.send(DONE)


async def _start(choice: StreamedChoice, held: AsyncExitStack) -> StreamedChoice | RequestError:
    try:
        return await held.enter_async_context(choice)
    except RequestError as error:
        return error


def usage_of(generations: Sequence[CompletedGeneration], choices: int) -> Usage:
    """Summed token counts; a prompt with several choices counts its own tokens once."""
    total = Usage(0, 0, 0)
    for index, generation in enumerate(generations):
        usage = Usage.of(generation.input_len, generation.finished)
        total = total.with_choice(usage) if index % choices else total.with_prompt(usage)
    return total

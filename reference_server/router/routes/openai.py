"""/v1/completions /v1/chat/completions /chat_tokenize: the OpenAI dialect, as TGI speaks it."""

import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack

from reference_server.errors import RequestError, TemplateError, ToolError, ValidationError
from reference_server.router.batching import Event, Finished, PrefillDone
from reference_server.router.exchange import Exchange, Refusal, Route
from reference_server.router.infer import Answer, Infer, Running, all_or_nothing
from reference_server.router.routes.openai_bodies import (
    ChatBodies,
    CompletionBodies,
    Usage,
    render_stream_error,
)
from reference_server.router.schemas.openai import ChatRequest, CompletionRequest, SamplingFields, ToolChoiceObject
from reference_server.router.schemas.tgi import GenerateParameters
from reference_server.router.services import Services
from reference_server.router.sse import DONE
from reference_server.router.times import RequestTimes, timing_headers
from reference_server.router.validation import GenerateCall

logger = logging.getLogger(__name__)


class OpenAiRoutes:
    """Handlers of the OpenAI dialect."""

    def __init__(self, services: Services) -> None:
        self._services = services

    def routes(self) -> list[Route]:
        return [
            Route("POST", "/v1/completions", self.completions, (CompletionRequest,), needs_key=True),
            Route("POST", "/v1/chat/completions", self.chat, (ChatRequest,), needs_key=True),
            # TGI asks for no key here; `--auth-all-routes` does.
            Route("POST", "/chat_tokenize", self.chat_tokenize, (ChatRequest,)),
        ]

    async def completions(self, exchange: Exchange, request: CompletionRequest) -> None:
        arrived_ns = self._services.clock_ns()
        self._services.metrics.request_count.add(1 + len(request.prompt))
        choices = self._check_common(request)
        self._check_completion(request)
        calls = completion_calls(request, choices)
        characters = sum(map(len, request.prompt))
        bodies = CompletionBodies(self._services.facts, self._services.wall_s())
        if request.stream:
            await self._stream(exchange, calls, bodies, arrived_ns, characters, include_usage=False)
            return
        answers, times = await self._run(calls, arrived_ns)
        headers = [self._services.compute_type, *timing_headers(times, answers, characters)]
        await exchange.answer_json(bodies.answer(answers, usage_of(answers, choices)), headers=headers)

    async def chat(self, exchange: Exchange, request: ChatRequest) -> None:
        arrived_ns = self._services.clock_ns()
        self._services.metrics.request_count.add(2)
        calls = await self.chat_runs(request)
        prompt, choices = calls[0].prompt, len(calls)
        bodies = ChatBodies(self._services.facts, self._services.wall_s(), request)
        if request.stream:
            options = request.stream_options
            include_usage = options is not None and options.include_usage
            await self._stream(exchange, calls, bodies, arrived_ns, len(prompt), include_usage)
            return
        answers, times = await self._run(calls, arrived_ns)
        slowest = max(times, key=lambda each: each.total_ns)
        headers = [
            self._services.compute_type,
            (b"x-compute-time", repr(slowest.total_ns / 1e9).encode()),
            *timing_headers([slowest], answers[:1], len(prompt)),
        ]
        usage = usage_of(answers, choices)
        headers = [header for header in headers if header[0] != b"x-generated-tokens"]
        headers.append((b"x-generated-tokens", b"%d" % usage.completion_tokens))
        await exchange.answer_json(bodies.answer(answers, usage), headers=headers)

    async def chat_tokenize(self, exchange: Exchange, request: ChatRequest) -> None:
        self._services.metrics.request_count.add()
        prompt = await self._render(request)
        tokens = await self._services.infer.validator.tokenize(prompt, False)
        await exchange.answer_json({"tokenize_response": tokens, "templated_text": prompt})

    async def chat_runs(self, request: ChatRequest) -> list[GenerateCall]:
        """The generations that a conversation asks for, one for each choice."""
        choices = self._check_common(request)
        return chat_calls(request, await self._render(request), choices)

    def _check_common(self, request: SamplingFields) -> int:
        """The rows that both routes judge first; how many choices are wanted."""
        try:
            return check_common(request, self._services.facts.limits.max_best_of)
        except ValidationError:
            self._count_failure("validation")
            raise

    def _check_completion(self, request: CompletionRequest) -> None:
        limit = self._services.facts.max_client_batch_size
        if request.suffix is not None:
            self._count_failure("validation")
            raise Refusal(
                422,
                "Suffix is not supported and can be achieved by preprocessing the prompt.",
                "suffix not supported",
            )
        if len(request.prompt) > limit:
            self._count_failure("validation")
            raise Refusal(
                422, f"Number of prompts exceeds the maximum allowed batch size of {limit}", "batch size exceeded"
            )

    async def _render(self, request: ChatRequest) -> str:
        refuse_constraints(request)
        if self._services.render is None:
            raise TemplateError("template not found")
        try:
            return await self._services.render(request.messages)
        except TemplateError:
            self._count_failure("template")
            raise

    def _count_failure(self, err: str) -> None:
        self._services.metrics.request_failure.add(label=err)

    async def _run(self, calls: Sequence[GenerateCall], arrived_ns: int) -> tuple[list[Answer], list[RequestTimes]]:
        services = self._services
        answers = await all_or_nothing([services.infer.generate(call) for call in calls])
        now_ns = services.clock_ns()
        times = [RequestTimes.of(arrived_ns, answer.finished, now_ns) for answer in answers]
        for call, each, answer in zip(calls, times, answers, strict=True):
            each.observe(services.metrics, call.parameters, answer.generated.seed)
        return answers, times

    async def _stream(
        self,
        exchange: Exchange,
        calls: Sequence[GenerateCall],
        bodies: "CompletionBodies | ChatBodies",
        arrived_ns: int,
        characters: int,
        include_usage: bool,
    ) -> None:
        services = self._services
        total = Usage(0, 0, 0)
        async with exchange.stream(services.stream_headers(characters)) as stream, AsyncExitStack() as held:
            runs = [await _start(services.infer, call, held) for call in calls]
            async for index, event in interleave(runs):
                if isinstance(event, Finished):
                    run = runs[index]
                    assert isinstance(run, Running), "only what was started ends"
                    times = RequestTimes.of(arrived_ns, event, services.clock_ns())
                    times.observe(services.metrics, calls[index].parameters, event.generated_text.seed)
                    usage = Usage.of(run.input_len, event)
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


async def _start(infer: Infer, call: GenerateCall, held: AsyncExitStack) -> Running | RequestError:
    try:
        return await held.enter_async_context(infer.start(call))
    except RequestError as error:
        return error


async def interleave(runs: Sequence[Running | RequestError]) -> AsyncIterator[tuple[int, Event | RequestError]]:
    """One event of each live run per turn, in order; a failure is the last event of its run."""
    live: dict[int, AsyncIterator[Event]] = {}
    for index, run in enumerate(runs):
        if isinstance(run, RequestError):
            yield index, run
        else:
            live[index] = aiter(run)
    while live:
        for index, events in list(live.items()):
            try:
                event: Event | RequestError = await anext(events)
            except RequestError as error:
                event = error
            if isinstance(event, Finished | RequestError):
                del live[index]
            yield index, event


def check_common(request: SamplingFields, max_best_of: int) -> int:
    """The "both" rows of section 3.5; how many choices are wanted."""
    old, new = request.max_tokens, request.max_completion_tokens
    if old is not None and new is not None and old != new:
        raise ValidationError(
            f"`max_tokens` and `max_completion_tokens` must be equal when both are given. Given: {old} and {new}"
        )
    if request.logit_bias:
        raise ValidationError("`logit_bias` is not supported")
    choices = 1 if request.n is None else request.n
    if not 0 < choices <= max(1, max_best_of):
        raise ValidationError(f"`n` must be > 0 and <= {max_best_of}. Given: {choices}")
    return choices


def refuse_constraints(request: ChatRequest) -> None:
    """Tools are not served; what asks for them is told so, in TGI's order of checks."""
    wants_format = request.response_format is not None and request.response_format.type != "text"
    tools = request.tools or []
    if wants_format and tools:
        raise ToolError("Grammar and tools are mutually exclusive")
    choice = request.tool_choice
    name = choice.function.name if isinstance(choice, ToolChoiceObject) else choice
    if tools and name not in (None, "auto", "required", "none", *(tool.function.name for tool in tools)):
        raise ToolError(f"Tool with name {name} not found")
    if tools and name != "none":
        raise ToolError('`tools` are not supported; leave them out or set `tool_choice` to "none"')


def completion_calls(request: CompletionRequest, choices: int) -> list[GenerateCall]:
    """One generation per prompt and choice, in order of their index."""
    return [
        GenerateCall(
            prompt,
            # TGI asks for the prompt's logprobs of single answers too. Nobody sees them, and asking for them keeps a
            # prompt from using the prefix cache.
            _parameters(request, choice).model_copy(update={"repetition_penalty": request.repetition_penalty}),
            presence_penalty=request.presence_penalty or 0.0,
        )
        for prompt in request.prompt
        for choice in range(choices)
    ]


def chat_calls(request: ChatRequest, prompt: str, choices: int) -> list[GenerateCall]:
    """One generation per choice of a rendered conversation."""
    grammar = None if request.response_format is None else request.response_format.grammar()
    return [
        GenerateCall(
            prompt,
            _parameters(request, choice).model_copy(update={"top_n_tokens": request.top_logprobs, "grammar": grammar}),
            add_special_tokens=False,
            presence_penalty=request.presence_penalty or 0.0,
        )
        for choice in range(choices)
    ]


def _parameters(request: SamplingFields, choice: int) -> GenerateParameters:
    is_greedy = request.temperature == 0.0
    asked = request.max_completion_tokens
    return GenerateParameters.model_construct(
        temperature=None if is_greedy else request.temperature,
        do_sample=not is_greedy,
        frequency_penalty=request.frequency_penalty,
        top_p=request.top_p,
        max_new_tokens=request.max_tokens if asked is None else asked,
        stop=request.stop or [],
        details=True,
        seed=None if request.seed is None else (request.seed + choice) % 2**64,
        adapter_id=None if request.model in (None, "tgi") else request.model,
        ignore_eos_token=request.ignore_eos_token,
        min_new_tokens=request.min_new_tokens,
    )


def usage_of(answers: Sequence[Answer], choices: int) -> Usage:
    """Summed; a prompt with several choices counts its own tokens once."""
    total = Usage(0, 0, 0)
    for index, answer in enumerate(answers):
        usage = Usage.of(answer.input_len, answer.finished)
        total = total.with_choice(usage) if index % choices else total.with_prompt(usage)
    return total

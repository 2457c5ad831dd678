"""/v1/completions /v1/chat/completions /chat_tokenize: the OpenAI dialect, as TGI speaks it."""

import logging
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial

from reference_server.errors import RequestError, TemplateError, ValidationError
from reference_server.router.batching import Finished, PrefillDone
from reference_server.router.exchange import Exchange, Refusal, Route
from reference_server.router.infer import Answer, all_or_nothing
from reference_server.router.routes.choices import CallEnd, Choice, interleave
from reference_server.router.routes.openai_bodies import (
    ChatBodies,
    CompletionBodies,
    Usage,
    render_stream_error,
)
from reference_server.router.routes.openai_rules import check_common, check_completion
from reference_server.router.schemas.openai import ChatRequest, CompletionRequest, SamplingFields
from reference_server.router.schemas.tgi import GenerateParameters
from reference_server.router.services import Services
from reference_server.router.sse import DONE
from reference_server.router.times import RequestTimes, timing_headers
from reference_server.router.tool_calls import ToolCall, parse_call
from reference_server.router.tools import NO_TOOL, ToolOffer, offer_of
from reference_server.router.validation import GenerateCall

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Shown:
    """A generation that a single answer shows, and what it calls."""

    call: GenerateCall
    answer: Answer
    times: RequestTimes
    tool_call: ToolCall | None = None


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
        self._check_completion(request, choices)
        calls = completion_calls(request, choices)
        characters = sum(map(len, request.prompt))
        bodies = CompletionBodies(self._services.facts, self._services.wall_s())
        if request.stream:
            streamed = [Choice(self._services, call, arrived_ns) for call in calls]
            await self._stream(exchange, streamed, bodies, characters, include_usage=False)
            return
        shown = await self._run(calls, arrived_ns)
        answers = [each.answer for each in shown]
        headers = [self._services.compute_type, *timing_headers([each.times for each in shown], answers, characters)]
        await exchange.answer_json(bodies.answer(answers, usage_of(answers, choices)), headers=headers)

    async def chat(self, exchange: Exchange, request: ChatRequest) -> None:
        services = self._services
        arrived_ns = services.clock_ns()
        services.metrics.request_count.add(2)
        choices = self._check_common(request)
        prompt, offer = await self._prompt(request)
        calls = self._chat_calls(request, prompt, offer, choices)
        bodies = ChatBodies(services.facts, services.wall_s(), request)
        if request.stream:
            streamed = [
                Choice(services, call, arrived_ns, None if offer is None else partial(self._plain_call, request, index))
                for index, call in enumerate(calls)
            ]
            options = request.stream_options
            include_usage = options is not None and options.include_usage
            await self._stream(exchange, streamed, bodies, len(prompt), include_usage)
            return
        shown = await self._run(calls, arrived_ns)
        if offer is not None:
            shown = await self._read_calls(request, shown)
        answers = [each.answer for each in shown]
        slowest = max((each.times for each in shown), key=lambda each: each.total_ns)
        headers = [
            services.compute_type,
            (b"x-compute-time", repr(slowest.total_ns / 1e9).encode()),
            *timing_headers([slowest], answers[:1], len(shown[0].call.prompt)),
        ]
        usage = usage_of(answers, choices)
        headers = [header for header in headers if header[0] != b"x-generated-tokens"]
        headers.append((b"x-generated-tokens", b"%d" % usage.completion_tokens))
        body = bodies.answer(answers, usage, [each.tool_call for each in shown])
        await exchange.answer_json(body, headers=headers)

    async def chat_tokenize(self, exchange: Exchange, request: ChatRequest) -> None:
        self._services.metrics.request_count.add()
        prompt, _ = await self._prompt(request)
        tokens = await self._services.infer.validator.tokenize(prompt, False)
        await exchange.answer_json({"tokenize_response": tokens, "templated_text": prompt})

    async def chat_runs(self, request: ChatRequest) -> list[GenerateCall]:
        """The generations that a conversation asks for, one for each choice."""
        choices = self._check_common(request)
        return self._chat_calls(request, *await self._prompt(request), choices)

    def _check_common(self, request: SamplingFields) -> int:
        """The rows that both routes judge first; how many choices are wanted."""
        with self._counting(ValidationError, "validation"):
            return check_common(request, self._services.facts.limits.max_best_of)

    def _check_completion(self, request: CompletionRequest, choices: int) -> None:
        limit = self._services.facts.max_client_batch_size
        if request.suffix:
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
        with self._counting(ValidationError, "validation"):
            check_completion(request, choices)

    async def _prompt(self, request: ChatRequest) -> tuple[str, ToolOffer | None]:
        """A conversation as the model sees it, and the tools that it offers."""
        offer = offer_of(request)
        if self._services.render is None:
            raise TemplateError("template not found")
        with self._counting(TemplateError, "template"):
            return await self._services.render(request.messages, offer), offer

    def _chat_calls(
        self, request: ChatRequest, prompt: str, offer: ToolOffer | None, choices: int
    ) -> list[GenerateCall]:
        with self._counting(ValidationError, "validation"):
            return chat_calls(request, prompt, offer, choices)

    async def _plain_call(self, request: ChatRequest, choice: int) -> GenerateCall:
        """The generation of a choice without tools."""
        return (await self.chat_runs(request.model_copy(update={"tools": None})))[choice]

    async def _read_calls(self, request: ChatRequest, shown: Sequence[Shown]) -> list[Shown]:
        """What each generation calls; those that call nothing are run again without tools. Raises `ToolError`."""
        services = self._services
        read = [replace(each, tool_call=parse_call(each.answer.generated.text)) for each in shown]
        declined = [index for index, each in enumerate(read) if each.tool_call and each.tool_call.name == NO_TOOL]
        if declined:
            arrived_ns = services.clock_ns()
            services.metrics.request_count.add(len(declined))
            plain = await self._run([await self._plain_call(request, index) for index in declined], arrived_ns)
            for index, each in zip(declined, plain, strict=True):
                read[index] = each
        return read

    @contextmanager
    def _counting(self, kind: type[RequestError], label: str) -> Iterator[None]:
        """Count a failure of this kind under `label`."""
        try:
            yield
        except kind:
            self._count_failure(label)
            raise

    def _count_failure(self, err: str) -> None:
        self._services.metrics.request_failure.add(label=err)

    async def _run(self, calls: Sequence[GenerateCall], arrived_ns: int) -> list[Shown]:
        services = self._services
        answers = await all_or_nothing([services.infer.generate(call) for call in calls])
        now_ns = services.clock_ns()
        shown = [
            Shown(call, answer, RequestTimes.of(arrived_ns, answer.finished, now_ns))
            for call, answer in zip(calls, answers, strict=True)
        ]
        for each in shown:
            each.times.observe(services.metrics, each.call.parameters, each.answer.generated.seed)
        return shown

    async def _stream(
        self,
        exchange: Exchange,
        choices: Sequence[Choice],
        bodies: "CompletionBodies | ChatBodies",
        characters: int,
        include_usage: bool,
    ) -> None:
        services = self._services
        total = Usage(0, 0, 0)
        async with exchange.stream(services.stream_headers(characters)) as stream, AsyncExitStack() as held:
            started = [await _start(choice, held) for choice in choices]
            async for index, event in interleave(started):
                if isinstance(event, Finished | CallEnd):
                    choice, end = choices[index], event.event if isinstance(event, CallEnd) else event
                    times = RequestTimes.of(choice.arrived_ns, end, services.clock_ns())
                    times.observe(services.metrics, choice.call.parameters, end.generated_text.seed)
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


async def _start(choice: Choice, held: AsyncExitStack) -> Choice | RequestError:
    try:
        return await held.enter_async_context(choice)
    except RequestError as error:
        return error


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


def chat_calls(request: ChatRequest, prompt: str, offer: ToolOffer | None, choices: int) -> list[GenerateCall]:
    """One generation per choice of a rendered conversation."""
    grammar = None if request.response_format is None else request.response_format.grammar()
    if offer is not None:
        grammar = offer.grammar()
    asked = {"top_n_tokens": request.top_logprobs, "grammar": grammar}
    return [
        GenerateCall(
            prompt,
            _parameters(request, choice).model_copy(update=asked),
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
        # OpenAI's 1 is no limit; the native API refuses it, as TGI does. Any other would make a greedy request sample.
        top_p=None if is_greedy or request.top_p == 1.0 else request.top_p,
        max_new_tokens=request.max_tokens if asked is None else asked,
        stop=request.stop or [],
        details=True,
        seed=None if request.seed is None else (request.seed + choice) % 2**64,
        adapter_id=None if request.model in (None, "tgi") else request.model,
        ignore_eos_token=bool(request.ignore_eos_token or request.ignore_eos),
        min_new_tokens=request.min_new_tokens,
    )


def usage_of(answers: Sequence[Answer], choices: int) -> Usage:
    """Summed; a prompt with several choices counts its own tokens once."""
    total = Usage(0, 0, 0)
    for index, answer in enumerate(answers):
        usage = Usage.of(answer.input_len, answer.finished)
        total = total.with_choice(usage) if index % choices else total.with_prompt(usage)
    return total

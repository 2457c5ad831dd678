"""A hundred different requests, the same in every run, and a router over any `Shard` to send them to."""

import asyncio
import json
import random
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass

from reference_server.grammars.compile import compile_grammar
from reference_server.messages import Grammar
from reference_server.presets.catalog import find
from reference_server.router.batching import Batcher
from reference_server.router.infer import Infer, Permits
from reference_server.router.scheduling.scheduler import Scheduler
from reference_server.router.scheduling.scheduler_options import SchedulerOptions, WireVersion
from reference_server.router.schemas.tgi import GenerateParameters, RequestGrammar
from reference_server.router.telemetry.metrics import Metrics
from reference_server.router.validation.request_rules import GenerationLimits
from reference_server.router.validation.token_limits import ConfiguredLimits, resolve_limits, warmup_request
from reference_server.router.validation.validator import GenerateCall, Validator
from reference_server.tokenizer import load_tokenizer
from reference_server.transport.shard import Shard

MODEL = "preset:tiny-llama"
WORDS = (
    *("the", "server", "answers", "every", "request", "in", "the", "order", "of", "its", "arrival"),
    *("and", "a", "test", "of", "it", "asks", "for", "one", "more", "day"),
)
GRAMMARS = (
    RequestGrammar(type="regex", value=r"[a-z ]{20,40}\."),
    RequestGrammar(
        type="json",
        value={
            "type": "object",
            "properties": {"day": {"enum": ["today", "tomorrow"]}, "count": {"type": "integer"}},
            "required": ["day", "count"],
        },
    ),
)
CHUNKED_PREFILL_TOKENS, WHOLE_PREFILL_TOKENS = 96, 1024
MAX_TOTAL_TOKENS = 768


def mixed_calls(count: int = 100) -> list[GenerateCall]:
    """Short and long prompts, half of them after one of two long beginnings; greedy and seeded.

    Some have stop strings, a grammar, or penalties and top tokens.
    """
    rng = random.Random(20)
    beginnings = [" ".join(rng.choices(WORDS, k=160)) for _ in range(2)]
    return [_mixed_call(rng, number, beginnings) for number in range(count)]


def _mixed_call(rng: random.Random, number: int, beginnings: list[str]) -> GenerateCall:
    prompt = " ".join(rng.choices(WORDS, k=rng.choice([1, 3, 12, 40, 150])))
    if number % 2:
        prompt = f"{beginnings[number // 2 % 2]} {prompt}"
    sampling: dict[str, object] = {}
    if number % 3 == 2:
        sampling = {"do_sample": True, "seed": number, "temperature": 0.8, "top_p": 0.9, "repetition_penalty": 1.1}
    parameters = GenerateParameters(
        max_new_tokens=rng.choice([1, 4, 9, 20]),
        stop=["e ", "ing"] if number % 5 == 4 else [],
        ignore_eos_token=number % 4 != 3,
        **sampling,
    )
    changes: dict[str, object] = {}
    if number % 10 == 6:
        changes = {"grammar": GRAMMARS[number // 10 % 2], "max_new_tokens": 40, "ignore_eos_token": False}
    elif number % 10 == 3:
        changes = {"top_n_tokens": 3, "frequency_penalty": 0.4}
    return GenerateCall(
        prompt,
        parameters.model_copy(update=changes),
        presence_penalty=0.3 if number % 10 == 3 else 0.0,
    )


@dataclass(frozen=True)
class Answer:
    """The answer to one request. top_ids: of the most likely tokens at each position, if requested."""

    ids: tuple[int, ...]
    text: str
    finish_reason: str
    top_ids: tuple[tuple[int, ...], ...] = ()


@dataclass(frozen=True)
class Router:
    """A running router and the parts that tests look into."""

    infer: Infer
    scheduler: Scheduler
    metrics: Metrics


@asynccontextmanager
async def router_over(shard: Shard, schema: str = "v3") -> AsyncIterator[Router]:
    """A router on `shard`, warmed up, with the limits and features that the model's facts allow."""
    preset = find(MODEL)
    assert preset is not None
    await shard.clear_cache()
    info = await shard.info()
    chunks = info.support_chunking and schema == "v3"
    asked = ConfiguredLimits(
        CHUNKED_PREFILL_TOKENS if chunks else WHOLE_PREFILL_TOKENS,
        max_input_tokens=MAX_TOTAL_TOKENS - 24,
        max_total_tokens=MAX_TOTAL_TOKENS,
    )
    limits = resolve_limits(asked, await shard.warmup(warmup_request(asked)), info)
    options = SchedulerOptions(
        limits.max_batch_prefill_tokens,
        limits.max_batch_total_tokens,
        waiting_served_ratio=0.3,
        supports_chunking=info.support_chunking,
        block_size=info.block_size,
        use_prefix_caching=info.use_prefix_caching,
        schema=WireVersion(schema),
        speculate=info.speculate,
    )
    request_limits = GenerationLimits(limits.max_input_tokens, limits.max_total_tokens)
    metrics = Metrics(limits.max_input_tokens, limits.max_total_tokens)
    scheduler = Scheduler(options)
    batcher = Batcher(shard, scheduler, observer=metrics)
    loop = asyncio.create_task(batcher.run())
    with ThreadPoolExecutor(1) as executor:
        validator = Validator(
            load_tokenizer(preset.tokenizer_directory, 2048), request_limits, executor, compile_grammar=_compiled
        )
        try:
            yield Router(Infer(batcher, validator, Permits(1000), metrics), scheduler, metrics)
        finally:
            loop.cancel()
            await asyncio.wait([loop])


async def _compiled(grammar: RequestGrammar) -> Grammar:
    """The wire form, compiled in this process: these grammars are small."""
    if grammar.type == "regex":
        return compile_grammar("regex", grammar.value)
    return compile_grammar("schema", json.dumps(grammar.value))


async def answers(router: Router, calls: list[GenerateCall], at_once: int) -> list[Answer]:
    """The answer to every call, with at most `at_once` calls in the server."""
    turn = asyncio.Semaphore(at_once)

    async def ask(call: GenerateCall) -> Answer:
        async with turn:
            answer = await router.infer.generate(call)
        ids = tuple(token.id for token in answer.tokens)
        top_ids = tuple(tuple(token.id for token in each) for each in answer.top_tokens)
        return Answer(ids, answer.generated.text, answer.generated.finish_reason.value, top_ids)

    return list(await asyncio.gather(*map(ask, calls)))

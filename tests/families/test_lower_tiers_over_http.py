"""One model of each padded tier behind HTTP, the router and either schema on a real socket: as generate alone."""

import asyncio
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from reference_server.model_server.shard import LocalShard
from reference_server.router.app import TransportOptions, create_app
from reference_server.router.batching import Batcher
from reference_server.router.facts import EngineFacts, ServerFacts
from reference_server.router.infer import Infer, Permits
from reference_server.router.metrics import Metrics
from reference_server.router.scheduler import Scheduler, SchedulerOptions, Schema
from reference_server.router.services import Services
from reference_server.router.validation import RequestLimits, Validator
from reference_server.router.warmup import AskedLimits, resolve_limits, warmup_request
from reference_server.tokenizer import load_tokenizer
from reference_server.transport.shard import Shard
from tests.support.lower_tiers import ENCODER_DECODER, PADDED, RECURRENT, generate_alone, save_model
from tests.support.tiny_models import VOCAB_SIZE, random_prompt, text_of
from tests.support.tiny_shards import tiny_options
from tests.support.wire import served, socket_urls

MODELS = {"gpt-neo": PADDED["gpt-neo"], "t5": ENCODER_DECODER["t5"], "mamba": RECURRENT["mamba"]}
PROMPTS = [random_prompt(length, seed=5) for length in (4, 20, 2, 11, 40, 7, 16, 3)]
NEW_TOKENS = (10, 6, 12, 8, 5, 9, 1, 7)
# One long prompt and a few short ones a prefill, and three prompts in the warm-up.
PREFILL_TOKENS, INPUT_TOKENS = 100, 40


@pytest.mark.parametrize("version", ["v3", "v2"])
@pytest.mark.parametrize("name", MODELS)
async def test_requests_over_http_equal_generate_alone(tmp_path: Path, name: str, version: str) -> None:
    model = save_model(tmp_path, MODELS[name])
    expected = [generate_alone(model, prompt, count) for prompt, count in zip(PROMPTS, NEW_TOKENS, strict=True)]

    async with http_client(tmp_path, version) as client:

        async def ask(prompt: list[int], new_tokens: int, after: int) -> list[int]:
            for _ in range(after):
                # A turn of the event loop is less than a step, so each joins while others run.
                await asyncio.sleep(0.002)
            parameters = {"max_new_tokens": new_tokens, "ignore_eos_token": True, "details": True}
            answer = await post(client, text_of(prompt), **parameters)
            return [token["id"] for token in answer["details"]["tokens"]]

        work = zip(PROMPTS, NEW_TOKENS, range(len(PROMPTS)), strict=True)
        answers = await asyncio.gather(*(ask(*each) for each in work))

    assert answers == expected


@pytest.mark.parametrize("name", MODELS)
async def test_prompt_details_over_http(tmp_path: Path, name: str) -> None:
    model = save_model(tmp_path, MODELS[name])

    async with http_client(tmp_path, "v3") as client:
        answer = await post(
            client, text_of(PROMPTS[0]), max_new_tokens=3, details=True, decoder_input_details=True, top_n_tokens=2
        )

    details = answer["details"]
    start = [1] if model.config.is_encoder_decoder else PROMPTS[0]
    assert [token["id"] for token in details["prefill"]] == start
    assert details["prefill"][0]["logprob"] is None
    assert all(token["logprob"] < 0 for token in details["prefill"][1:])
    assert details["finish_reason"] == "length"
    assert [len(top) for top in details["top_tokens"]] == [2, 2, 2]


async def post(client: httpx.AsyncClient, inputs: str, **parameters: Any) -> Any:
    answer = await client.post("/generate", json={"inputs": inputs, "parameters": parameters})
    assert answer.status_code == 200, answer.text
    return answer.json()


@asynccontextmanager
async def http_client(directory: Path, version: str) -> AsyncIterator[httpx.AsyncClient]:
    """A client of the router, which reaches the shard through its socket."""
    shard = LocalShard.load(tiny_options(directory))
    async with (
        served([shard], socket_urls(directory), version) as group,
        router_on(group, directory, version) as client,
    ):
        yield client
    shard.close()


@asynccontextmanager
async def router_on(shard: Shard, directory: Path, version: str) -> AsyncIterator[httpx.AsyncClient]:
    info = await shard.info()
    asked = AskedLimits(PREFILL_TOKENS, max_input_tokens=INPUT_TOKENS, max_total_tokens=60)
    limits = resolve_limits(asked, await shard.warmup(warmup_request(asked)), info)
    scheduler = Scheduler(
        SchedulerOptions(
            limits.max_batch_prefill_tokens,
            limits.max_batch_total_tokens,
            waiting_served_ratio=0.3,
            requires_padding=info.requires_padding,
            supports_chunking=info.support_chunking,
            block_size=info.block_size,
            schema=Schema(version),
        )
    )
    request_limits = RequestLimits(limits.max_input_tokens, limits.max_total_tokens)
    metrics = Metrics(limits.max_input_tokens, limits.max_total_tokens)
    batcher = Batcher(shard, scheduler, observer=metrics)
    engine = EngineFacts(backend="cpu", dtype=info.dtype)
    facts = ServerFacts("tiny", request_limits, version="0.0.0", max_concurrent_requests=8, engine=engine)
    with ThreadPoolExecutor(1) as executor:
        validator = Validator(load_tokenizer(directory, VOCAB_SIZE), request_limits, executor)
        services = Services(Infer(batcher, validator, Permits(8), metrics), metrics, facts, None)
        loop = asyncio.create_task(batcher.run())
        transport = httpx.ASGITransport(app=create_app(services, TransportOptions()))  # type: ignore[arg-type]
        async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
            yield client
        loop.cancel()
        await asyncio.wait([loop])

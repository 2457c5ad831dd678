"""Every family behind the router's HTTP: requests that join a running batch get what generate gives them alone."""

import asyncio
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest

from reference_server.model_server.options import EngineOptions
from reference_server.model_server.shard import LocalShard
from reference_server.router.app import TransportOptions, create_app
from reference_server.router.batching import Batcher
from reference_server.router.facts import EngineFacts, ServerFacts
from reference_server.router.infer import Infer, Permits
from reference_server.router.metrics import Metrics
from reference_server.router.scheduler import Scheduler, SchedulerOptions
from reference_server.router.services import Services
from reference_server.router.validation import RequestLimits, Validator
from reference_server.router.warmup import AskedLimits, resolve_limits, warmup_request
from reference_server.tokenizer import load_tokenizer
from tests.support.tiny_models import (
    VOCAB_SIZE,
    generate_alone,
    make_tiny_model,
    random_prompt,
    save_tiny_model,
    text_of,
)

FAMILIES = ("llama", "mistral-window", "qwen2", "gpt2", "gpt-neox", "bloom")
PROMPTS = [random_prompt(length, seed=5) for length in (4, 20, 2, 11, 40, 7)]
NEW_TOKENS = (10, 6, 12, 8, 5, 9)


@pytest.mark.parametrize("name", FAMILIES)
async def test_requests_over_http_equal_generate_alone(tmp_path: Path, name: str) -> None:
    model = make_tiny_model(name)
    expected = [generate_alone(model, prompt, count) for prompt, count in zip(PROMPTS, NEW_TOKENS, strict=True)]

    async with http_client(save_tiny_model(tmp_path, name)) as client:

        async def ask(prompt: list[int], new_tokens: int, after: int) -> list[int]:
            for _ in range(after):
                # A turn of the event loop is less than a step, so each joins while others run.
                await asyncio.sleep(0.002)
            parameters = {"max_new_tokens": new_tokens, "ignore_eos_token": True, "details": True}
            body = {"inputs": text_of(prompt), "parameters": parameters}
            answer = (await client.post("/generate", json=body)).json()
            return [token["id"] for token in answer["details"]["tokens"]]

        work = zip(PROMPTS, NEW_TOKENS, range(len(PROMPTS)), strict=True)
        answers = await asyncio.gather(*(ask(*each) for each in work))

    assert answers == expected


@asynccontextmanager
async def http_client(directory: Path) -> AsyncIterator[httpx.AsyncClient]:
    """A client of the whole server in this process. Prompts are cut to 16 tokens a step."""
    options = EngineOptions(str(directory), dtype="float32", cpu_memory_gib=0.01, compute_threads=1)
    shard = LocalShard.load(options)
    info = await shard.info()
    asked = AskedLimits(16, max_input_tokens=100, max_total_tokens=128)
    limits = resolve_limits(asked, await shard.warmup(warmup_request(asked)), info)
    scheduler = Scheduler(
        SchedulerOptions(
            limits.max_batch_prefill_tokens,
            limits.max_batch_total_tokens,
            supports_chunking=info.support_chunking,
            block_size=info.block_size,
        )
    )
    request_limits = RequestLimits(limits.max_input_tokens, limits.max_total_tokens)
    metrics = Metrics(limits.max_input_tokens, limits.max_total_tokens)
    batcher = Batcher(shard, scheduler, observer=metrics)
    facts = ServerFacts(
        model_id="tiny",
        limits=request_limits,
        version="0.0.0",
        max_concurrent_requests=8,
        engine=EngineFacts(backend="cpu", dtype=info.dtype),
    )
    with ThreadPoolExecutor(1) as executor:
        validator = Validator(load_tokenizer(directory, VOCAB_SIZE), request_limits, executor)
        app = create_app(
            Services(Infer(batcher, validator, Permits(8), metrics), metrics, facts, None), TransportOptions()
        )
        loop = asyncio.create_task(batcher.run())
        transport = httpx.ASGITransport(app=app)  # type: ignore[arg-type]
        async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
            yield client
        loop.cancel()
        await asyncio.wait([loop])
    shard.close()

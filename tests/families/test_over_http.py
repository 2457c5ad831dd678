"""Models of every tier behind HTTP, router and socket, with both schemas: requests get the ids of generate alone."""

import asyncio
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from transformers import PreTrainedModel

from reference_server.model_server.calls.local_shard import LocalShard
from reference_server.router.app import TransportOptions, create_app
from reference_server.router.batching import Batcher
from reference_server.router.infer import Infer, Permits
from reference_server.router.scheduling.scheduler import Scheduler, SchedulerOptions, WireVersion
from reference_server.router.server_info import EngineInfo, ServerInfo
from reference_server.router.services import Services
from reference_server.router.telemetry.metrics import Metrics
from reference_server.router.validation.request_rules import GenerationLimits
from reference_server.router.validation.token_limits import ConfiguredLimits, resolve_limits, warmup_request
from reference_server.router.validation.validator import Validator
from reference_server.tokenizer import load_tokenizer
from reference_server.transport.shard import Shard
from tests.support.models.lower_tiers import ENCODER_DECODER, PADDED, RECURRENT, generate_alone, save_model
from tests.support.models.tiny_configs import CONFIGS
from tests.support.models.tiny_models import VOCAB_SIZE, make_tiny_model, random_prompt, save_tiny_model, text_of
from tests.support.models.tiny_shards import tiny_options
from tests.support.wire.wire_shard import served, socket_urls

LOWER_TIERS = {"gpt-neo": PADDED["gpt-neo"], "t5": ENCODER_DECODER["t5"], "mamba": RECURRENT["mamba"]}
PROMPTS = [random_prompt(length, seed=5) for length in (4, 20, 2, 11, 40, 7, 16, 3)]
NEW_TOKENS = (10, 6, 12, 8, 5, 9, 1, 7)
# One long prompt and a few short ones in a prefill; or prefill in chunks, which padded models and v2 do not support.
PREFILL_TOKENS, CHUNK_TOKENS = 100, 16
MAX_INPUT_TOKENS, MAX_TOTAL_TOKENS = 40, 60

CASES = [
    *(("gpt-neo", "v2"), ("t5", "v3"), ("mamba", "v2"), ("llama", "v3"), ("mistral-window", "v3"), ("gpt2", "v2")),
    *(pytest.param(*case, marks=pytest.mark.slow) for case in (("gpt-neo", "v3"), ("t5", "v2"), ("mamba", "v3"))),
    *(pytest.param(name, "v3", marks=pytest.mark.slow) for name in ("qwen2", "gpt-neox", "bloom")),
]


@pytest.mark.parametrize(("name", "version"), CASES)
async def test_requests_over_http_equal_generate_alone(tmp_path: Path, name: str, version: str) -> None:
    model = save(tmp_path, name)
    expected = [generate_alone(model, prompt, count) for prompt, count in zip(PROMPTS, NEW_TOKENS, strict=True)]

    async with http_client(
        tmp_path, version, CHUNK_TOKENS if version == "v3" and name in CONFIGS else PREFILL_TOKENS
    ) as client:

        async def generate(prompt: list[int], new_tokens: int, delay: int) -> list[int]:
            for _ in range(delay):
                # Shorter than a step, so that each request joins a running batch.
                await asyncio.sleep(0.002)
            parameters = {"max_new_tokens": new_tokens, "ignore_eos_token": True, "details": True}
            answer = await post(client, text_of(prompt), **parameters)
            return [token["id"] for token in answer["details"]["tokens"]]

        work = zip(PROMPTS, NEW_TOKENS, range(len(PROMPTS)), strict=True)
        answers = await asyncio.gather(*(generate(*each) for each in work))

    assert answers == expected


def save(directory: Path, name: str) -> PreTrainedModel:
    if name in LOWER_TIERS:
        return save_model(directory, LOWER_TIERS[name])
    save_tiny_model(directory, name)
    return make_tiny_model(name)


@pytest.mark.parametrize("name", LOWER_TIERS)
async def test_prompt_details_over_http(tmp_path: Path, name: str) -> None:
    model = save_model(tmp_path, LOWER_TIERS[name])

    async with http_client(tmp_path, "v3", PREFILL_TOKENS) as client:
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
async def http_client(directory: Path, version: str, prefill_tokens: int) -> AsyncIterator[httpx.AsyncClient]:
    """A client of a router that is connected to the shard through a socket."""
    shard = LocalShard.load(tiny_options(directory))
    async with (
        served([shard], socket_urls(directory), version) as group,
        router_on(group, directory, version, prefill_tokens) as client,
    ):
        yield client
    shard.close()


@asynccontextmanager
async def router_on(
    shard: Shard, directory: Path, version: str, prefill_tokens: int
) -> AsyncIterator[httpx.AsyncClient]:
    info = await shard.info()
    configured = ConfiguredLimits(prefill_tokens, max_input_tokens=MAX_INPUT_TOKENS, max_total_tokens=MAX_TOTAL_TOKENS)
    limits = resolve_limits(configured, await shard.warmup(warmup_request(configured)), info)
    scheduler = Scheduler(
        SchedulerOptions(
            limits.max_batch_prefill_tokens,
            limits.max_batch_total_tokens,
            waiting_served_ratio=0.3,
            requires_padding=info.requires_padding,
            supports_chunking=info.support_chunking,
            block_size=info.block_size,
            schema=WireVersion(version),
        )
    )
    request_limits = GenerationLimits(limits.max_input_tokens, limits.max_total_tokens)
    metrics = Metrics(limits.max_input_tokens, limits.max_total_tokens)
    batcher = Batcher(shard, scheduler, observer=metrics)
    engine = EngineInfo(backend="cpu", dtype=info.dtype)
    facts = ServerInfo("tiny", request_limits, version="0.0.0", max_concurrent_requests=8, engine=engine)
    with ThreadPoolExecutor(1) as executor:
        validator = Validator(load_tokenizer(directory, VOCAB_SIZE), request_limits, executor)
        services = Services(Infer(batcher, validator, Permits(8), metrics), metrics, facts, None)
        loop = asyncio.create_task(batcher.run())
        transport = httpx.ASGITransport(app=create_app(services, TransportOptions()))  # type: ignore[arg-type]
        async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
            yield client
        loop.cancel()
        await asyncio.wait([loop])

"""Prompts with a common prefix, found in the prefix cache: the ids equal those of Transformers' generate."""

import asyncio
from typing import Literal

import pytest

from reference_server.messages import ChooserParameters, Request, StoppingParameters
from reference_server.model_server.calls.local_shard import LocalShard
from reference_server.model_server.memory.float8 import FLOAT8_TYPES
from reference_server.model_server.options import EngineOptions
from reference_server.router.batching import Batcher
from reference_server.router.generation_stream import Finished
from reference_server.router.scheduling.request import ValidGenerateRequest
from reference_server.router.scheduling.scheduler import Scheduler
from reference_server.router.scheduling.scheduler_options import SchedulerOptions
from reference_server.router.validation.token_limits import ConfiguredLimits, resolve_limits, warmup_request
from tests.support.models.rounding_cache import generate_rounded
from tests.support.models.tiny_configs import CONFIGS
from tests.support.models.tiny_models import (
    SavedModel,
    SavedModels,
    confirmed,
    one_group_each,
    random_prompt,
    text_of,
)

SHARED = random_prompt(40, seed=9)
PROMPTS = [[*SHARED[:length], *random_prompt(3, seed=i)] for i, length in enumerate((40, 40, 33, 40, 17))]
NEW_TOKENS = 6
# Long rope shares no prefix with requests above 128 tokens, the original maximum of its tiny model.
MAX_TOTAL_TOKENS = 128


# GPT-BigCode of Transformers 5.17 with a newer torch.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")

# Dynamic rope scaling cannot be combined with prefix caching.
NAMES = sorted(set(CONFIGS) - {"llama-dynamic-rope"})
# One of each attention: rotary, window, softcap, learned positions, ALiBi, latent, shims. The others are slow tests.
SHORT = ("llama", "mistral-window", "gemma2", "gpt2", "bloom", "deepseek-v3", "falcon-alibi", "mpt", "gptj", "phi")
UNCHUNKED = ("llama", "bloom")


@pytest.mark.parametrize("name", one_group_each(NAMES, slow=set(NAMES) - set(SHORT)))
async def test_prefixes_cached_in_chunks_change_no_token(name: str, saved_models: SavedModels):
    await check_cached_prefixes(saved_models[name], chunk_tokens=16)


@pytest.mark.parametrize("name", one_group_each(NAMES, slow=set(NAMES) - set(UNCHUNKED)))
async def test_prefixes_cached_at_once_change_no_token(name: str, saved_models: SavedModels):
    await check_cached_prefixes(saved_models[name], chunk_tokens=256)


@pytest.mark.parametrize("cache", ["fp8_e4m3fn", "fp8_e5m2"])
async def test_prefixes_cached_in_eight_bits_equal_the_rounded_reference(
    cache: Literal["fp8_e4m3fn", "fp8_e5m2"], saved_models: SavedModels
):
    await check_cached_prefixes(saved_models["llama"], chunk_tokens=16, cache=cache)


async def check_cached_prefixes(
    saved: SavedModel, chunk_tokens: int, cache: Literal["fp8_e4m3fn", "fp8_e5m2"] | None = None
) -> None:
    options = EngineOptions(
        str(saved.directory),
        dtype="float32",
        cpu_memory_gib=0.01,
        compute_threads=1,
        prefix_caching=True,
        kv_cache_dtype=cache,
    )
    shard = LocalShard.load(options)
    info = await shard.info()
    asked = ConfiguredLimits(chunk_tokens, max_total_tokens=MAX_TOTAL_TOKENS)
    limits = resolve_limits(asked, await shard.warmup(warmup_request(asked)), info)
    scheduler = Scheduler(
        SchedulerOptions(
            chunk_tokens,
            limits.max_batch_total_tokens,
            supports_chunking=info.support_chunking,
            use_prefix_caching=info.use_prefix_caching,
            block_size=info.block_size,
        )
    )
    batcher = Batcher(shard, scheduler)
    loop = asyncio.create_task(batcher.run())

    async def ask(prompt: list[int]) -> tuple[list[int], int]:
        stopping = StoppingParameters(NEW_TOKENS, ignore_eos_token=True)
        wire = Request(0, (text_of(prompt),), len(prompt), ChooserParameters(), stopping)
        request = ValidGenerateRequest(wire, tuple(prompt), NEW_TOKENS)
        events = [event async for event in batcher.submit(request)]
        assert isinstance(events[-1], Finished)
        return [event.token.id for event in events], events[-1].cached_input_tokens  # type: ignore[union-attr]

    answers = [await ask(PROMPTS[0]), *await asyncio.gather(*map(ask, PROMPTS[1:]))]
    loop.cancel()
    await asyncio.wait([loop])
    shard.close()

    assert [cached for _, cached in answers] == [0, 32, 32, 32, 16]
    for prompt, (ids, _) in zip(PROMPTS, answers, strict=True):
        assert ids == (
            confirmed(saved.model, prompt, NEW_TOKENS, ids)
            if cache is None
            else generate_rounded(saved.model, prompt, NEW_TOKENS, FLOAT8_TYPES[cache], guess=ids)
        )

"""Every family, prompts that begin alike, found in the prefix cache: the ids that Transformers gives each alone."""

import asyncio
from pathlib import Path

import pytest

from reference_server.messages import ChooserParameters, StoppingParameters
from reference_server.model_server.options import EngineOptions
from reference_server.model_server.shard import LocalShard
from reference_server.router.batching import Batcher, Finished
from reference_server.router.request import ValidGenerateRequest
from reference_server.router.scheduler import Scheduler, SchedulerOptions
from reference_server.router.warmup import AskedLimits, resolve_limits, warmup_request
from tests.support.tiny_configs import CONFIGS
from tests.support.tiny_models import generate_alone, make_tiny_model, random_prompt, save_tiny_model, text_of

SHARED = random_prompt(40, seed=9)
PROMPTS = [[*SHARED[:length], *random_prompt(3, seed=i)] for i, length in enumerate((40, 40, 33, 40, 17))]
NEW_TOKENS = 6


# Transformers 5.17's GPT-BigCode, when torch is newer than that release.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")

# Dynamic rope scaling and prefix caching are refused together.
NAMES = sorted(set(CONFIGS) - {"llama-dynamic-rope"})
WHOLE_TOO = ("llama", "bloom", "gemma2", "deepseek-v3")
CASES = [
    *((name, 16) for name in NAMES),
    *(pytest.param(name, 256, marks=() if name in WHOLE_TOO else pytest.mark.slow) for name in NAMES),
]


@pytest.mark.parametrize(("name", "chunk_tokens"), CASES)
async def test_cached_prefixes_change_no_token(name: str, chunk_tokens: int, tmp_path: Path):
    directory = save_tiny_model(tmp_path, name)
    options = EngineOptions(
        str(directory), dtype="float32", cpu_memory_gib=0.01, compute_threads=1, prefix_caching=True
    )
    shard = LocalShard.load(options)
    info = await shard.info()
    asked = AskedLimits(chunk_tokens)
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
        request = ValidGenerateRequest(
            chunks=(text_of(prompt),),
            input_ids=tuple(prompt),
            truncate=len(prompt),
            parameters=ChooserParameters(),
            stopping=StoppingParameters(NEW_TOKENS, ignore_eos_token=True),
            requested_tokens=NEW_TOKENS,
        )
        events = [event async for event in batcher.submit(request)]
        assert isinstance(events[-1], Finished)
        return [event.token.id for event in events], events[-1].cached_input_tokens  # type: ignore[union-attr]

    answers = [await ask(PROMPTS[0]), *await asyncio.gather(*map(ask, PROMPTS[1:]))]
    loop.cancel()
    await asyncio.wait([loop])
    shard.close()

    model = make_tiny_model(name)
    assert [cached for _, cached in answers] == [0, 32, 32, 32, 16]
    assert [ids for ids, _ in answers] == [generate_alone(model, prompt, NEW_TOKENS) for prompt in PROMPTS]

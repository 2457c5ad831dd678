"""The router's scheduling over a real model: both sides count alike, and what is scheduled changes no token."""

import asyncio
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from reference_server.messages import ChooserParameters, Request, StepResult, StoppingParameters
from reference_server.model_server.calls.local_shard import LocalShard
from reference_server.model_server.options import EngineOptions
from reference_server.router.batching import Batcher
from reference_server.router.scheduling.request import ValidGenerateRequest
from reference_server.router.scheduling.scheduler import Scheduler
from reference_server.router.scheduling.scheduler_options import SchedulerOptions
from reference_server.router.validation.token_limits import ConfiguredLimits, resolve_limits, warmup_request
from tests.support.models.tiny_models import confirmed, make_tiny_model, random_prompt, save_tiny_model, text_of

CHUNK_TOKENS, WHOLE_TOKENS = 24, 64
CASES = {
    "page 1": {"attention": "flashinfer"},
    "page 16": {},
    "page 16, whole prompts": {"prefill_chunking": False},
    "page 16, drafts": {"speculate": 3, "speculate_adaptive": False},
}
SHARED = random_prompt(40, seed=3)


class CheckedScheduler(Scheduler):
    """Compares its own count of the next forward with every receipt of an unfiltered batch."""

    compared = 0

    def on_reply(self, call, reply):
        deliveries = super().on_reply(call, reply)
        if isinstance(reply, StepResult) and self.running is not None and len(self.entries) == self.running.size:
            assert self.expected_current_tokens == self.running.current_tokens
            self.compared += 1
        return deliveries


@pytest.fixture(scope="module", params=CASES)
def shard(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalShard]:
    directory: Path = save_tiny_model(tmp_path_factory.mktemp("llama"), "llama")
    options = EngineOptions(
        str(directory),
        dtype="float32",
        cpu_memory_gib=0.01,
        compute_threads=1,
        prefix_caching=True,
        **CASES[request.param],
    )
    shard = LocalShard.load(options)
    yield shard
    shard.close()


def make_request(prompt: list[int], max_new_tokens: int) -> ValidGenerateRequest:
    stopping = StoppingParameters(max_new_tokens, ignore_eos_token=True)
    wire = Request(0, (text_of(prompt),), len(prompt), ChooserParameters(), stopping)
    return ValidGenerateRequest(wire, tuple(prompt), max_new_tokens)


async def test_requests_that_join_share_and_leave_get_the_tokens_they_would_get_alone(shard: LocalShard):
    rng = random.Random(7)
    model = make_tiny_model("llama")
    info = await shard.info()
    prefill_tokens = CHUNK_TOKENS if info.support_chunking else WHOLE_TOKENS
    asked = ConfiguredLimits(prefill_tokens)
    limits = resolve_limits(asked, await shard.warmup(warmup_request(asked)), info)
    scheduler = CheckedScheduler(
        SchedulerOptions(
            prefill_tokens,
            min(limits.max_batch_total_tokens, 20 * 16),
            supports_chunking=info.support_chunking,
            use_prefix_caching=info.use_prefix_caching,
            block_size=info.block_size,
            waiting_served_ratio=0.3,
            speculate=info.speculate,
        )
    )
    batcher = Batcher(shard, scheduler)
    loop = asyncio.create_task(batcher.run())
    prompts = [
        [*SHARED[: rng.choice([16, 33, 40])], *random_prompt(rng.randint(1, 9), seed=i)]
        if i % 2
        else random_prompt(rng.randint(1, 50), seed=i)
        for i in range(48)
    ]
    lengths = [rng.randint(1, 12) for _ in prompts]

    async def ask(index: int) -> tuple[list[int], int]:
        stream = batcher.submit(make_request(prompts[index], lengths[index]))
        ids, cached = [], 0
        async for event in stream:
            ids.append(event.token.id)
            cached = getattr(event, "cached_input_tokens", 0)
            if index % 5 == 4 and len(ids) == 2:
                stream.close()
        return ids, cached

    waves = [await asyncio.gather(*map(ask, range(start, start + 16))) for start in (0, 16, 32)]
    loop.cancel()
    answers = [answer for wave in waves for answer in wave]

    assert info.use_prefix_caching
    assert any(cached for _, cached in answers[16:])
    assert scheduler.compared > 20
    for index, (ids, _) in enumerate(answers):
        num_tokens = min(2, lengths[index]) if index % 5 == 4 else lengths[index]
        assert ids == confirmed(model, prompts[index], num_tokens, ids)

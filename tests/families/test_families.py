"""Every family on tiny random weights in float32: what the engine generates equals Transformers' generate alone."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

from reference_server.messages import Batch, ChooserParameters, Request, StoppingParameters, WarmupRequest
from reference_server.model_server.options import EngineOptions
from reference_server.model_server.shard import LocalShard
from tests.support.shard_driver import ShardDriver
from tests.support.tiny_configs import CONFIGS
from tests.support.tiny_models import generate_alone, make_tiny_model, random_prompt, save_tiny_model, text_of

PROMPTS = [random_prompt(length) for length in (4, 20, 2, 11)]
NEW_TOKENS = 10
# Transformers 5.17's GPT-BigCode, when torch is newer than that release.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")

# Four running requests leave two tokens of a step's eight for one chunk, so prompts mix with decodes for long.
CHUNK_BUDGET = 16


@dataclass(frozen=True)
class Loaded:
    """A family's shard, ready to serve, and what Transformers makes of the prompts.

    logprobs: of every prompt token but the first, a prompt at a time.
    """

    shard: LocalShard
    expected: list[list[int]]
    logprobs: list[list[float]]


FUSED = [name for name, config in CONFIGS.items() if config["model_type"] in ("llama", "mistral", "qwen2")]
CASES = [*((name, True) for name in CONFIGS), *((name, False) for name in FUSED)]


@pytest.fixture(
    scope="module", params=CASES, ids=[f"{name}-{'default' if fuse else 'modules'}" for name, fuse in CASES]
)
def loaded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Loaded]:
    name, fuse = request.param
    # A new model each: dynamic rope scaling remembers the longest request.
    expected = [generate_alone(make_tiny_model(name), prompt, NEW_TOKENS) for prompt in PROMPTS]
    directory = save_tiny_model(tmp_path_factory.mktemp(name), name)
    shard = LocalShard.load(tiny_options(directory, fuse))
    yield Loaded(shard, expected, [prompt_logprobs(name, prompt) for prompt in PROMPTS])
    shard.close()


@torch.no_grad()
def prompt_logprobs(name: str, prompt: list[int], dtype: torch.dtype = torch.float32) -> list[float]:
    logprobs = make_tiny_model(name).to(dtype)(torch.tensor([prompt])).logits[0].float().log_softmax(-1)
    return [float(logprobs[position, id_]) for position, id_ in enumerate(prompt[1:])]


def tiny_options(directory: Path, fuse: bool) -> EngineOptions:
    return EngineOptions(
        str(directory), dtype="float32", cpu_memory_gib=0.01, fuse=fuse, compute_threads=1, request_logprobs=True
    )


async def warmed(loaded: Loaded) -> ShardDriver:
    request = Request(0, (text_of([1] * 16),), 16, ChooserParameters(), StoppingParameters(1))
    await loaded.shard.warmup(WarmupRequest(Batch(0, (request,)), CHUNK_BUDGET))
    return ShardDriver(loaded.shard)


async def test_model_server_M2_a_ragged_batch_equals_generate_alone(loaded: Loaded) -> None:
    driver = await warmed(loaded)

    outcomes = await driver.run(*(driver.request(id_, prompt) for id_, prompt in enumerate(PROMPTS)))

    assert [outcome.ids for outcome in outcomes] == loaded.expected


async def test_prompts_in_chunks_of_five_equal_generate_alone(loaded: Loaded) -> None:
    driver = await warmed(loaded)
    requests = [driver.request(id_, prompt, prefill_logprobs=True) for id_, prompt in enumerate(PROMPTS)]

    result = None
    for request, prompt in zip(requests, PROMPTS, strict=True):
        first_chunk = replace(request, chunk_len=min(5, len(prompt)))
        result = await driver.prefill(first_chunk, cached=None if result is None else result.batch)
    assert result is not None
    await driver.finish(result)

    assert [driver.outcomes[request.id].ids for request in requests] == loaded.expected
    for request, expected in zip(requests, loaded.logprobs, strict=True):
        prefill_tokens = driver.outcomes[request.id].prefill_tokens
        assert prefill_tokens is not None
        assert prefill_tokens.logprobs[1:] == pytest.approx(expected, abs=1e-4)


async def test_requests_join_and_leave_midway(loaded: Loaded) -> None:
    driver = await warmed(loaded)
    first = await driver.prefill(driver.request(0, PROMPTS[0]), driver.request(1, PROMPTS[1], max_new_tokens=4))
    first = await driver.decode(first.batch)
    second = await driver.prefill(driver.request(2, PROMPTS[2]))
    merged = await driver.decode(first.batch, second.batch)
    merged = await driver.decode(merged.batch)
    assert driver.outcomes[1].generated_text is not None
    assert merged.batch is not None
    kept = await loaded.shard.filter_batch(merged.batch.id, [2, 0])
    joined = await driver.prefill(driver.request(3, PROMPTS[3]), cached=kept)
    await driver.finish(joined)

    expected = [ids[:4] if id_ == 1 else ids for id_, ids in enumerate(loaded.expected)]
    assert [driver.outcomes[id_].ids for id_ in range(4)] == expected


@pytest.mark.parametrize(
    "name", [name for name in CONFIGS if name.count("-") == 0 or name in ("gpt-neox", "gpt-bigcode")]
)
async def test_bfloat16_stays_close_to_float32(name: str, tmp_path: Path) -> None:
    options = replace(tiny_options(save_tiny_model(tmp_path, name), fuse=True), dtype="bfloat16")
    shard = LocalShard.load(options)
    driver = await warmed(Loaded(shard, [], []))

    outcomes = await driver.run(
        *(driver.request(id_, prompt, prefill_logprobs=True) for id_, prompt in enumerate(PROMPTS))
    )
    shard.close()

    for outcome, prompt in zip(outcomes, PROMPTS, strict=True):
        assert outcome.prefill_tokens is not None
        expected = prompt_logprobs(name, prompt)
        found = outcome.prefill_tokens.logprobs[1:]
        # Where Transformers' own eager bfloat16 is farther off (PhiMoE's is, by 0.45), no farther than that.
        own = prompt_logprobs(name, prompt, torch.bfloat16)
        off = max(abs(ours - exact) for ours, exact in zip(own, expected, strict=True))
        assert found == pytest.approx(expected, abs=max(0.2, off))

"""Every family on tiny random weights in float32: the engine generates the ids of Transformers' generate."""

import copy
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from reference_server.messages import Batch, ChooserParameters, Request, StoppingParameters, WarmupRequest
from reference_server.model_server.calls.local_shard import LocalShard
from reference_server.model_server.drafting import Drafter
from reference_server.model_server.options import EngineOptions
from tests.support.models.known_drafts import KnownDrafts
from tests.support.models.shard_driver import ShardDriver, outside_loop
from tests.support.models.tiny_configs import CONFIGS
from tests.support.models.tiny_models import (
    VOCAB_SIZE,
    SavedModels,
    confirmed,
    generate_alone,
    is_greedy,
    one_group_each,
    random_prompt,
    text_of,
    unchanged_by_length,
)

PROMPTS = [random_prompt(length) for length in (4, 20, 2, 11)]
NEW_TOKENS = 10
# GPT-BigCode of Transformers 5.17 with a newer torch.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")

# Small, so that chunks of prompts share many steps with decodes.
CHUNK_BUDGET = 16


@dataclass(frozen=True)
class Loaded:
    """The shard of a family, and Transformers' results for the prompts.

    logprobs: for each prompt, of all tokens but the first.
    """

    shard: LocalShard
    expected: list[list[int]]
    logprobs: list[list[float]]


UNFUSED = "-modules"
# Without the fused walk; test_fuse.py compares the walk with the modules for more configs.
CASES = [*CONFIGS, *(f"{name}{UNFUSED}" for name in ("llama", "mistral-window", "qwen2-window-above"))]


# A second layout of a family whose first one is in the short suite; `test_sharded.py` and `test_fuse.py` have most,
# `test_rotary.py` the positions that depend on the length.
SECOND_LAYOUTS = (
    *("llama-linear-rope", "llama-yarn-rope", "qwen2-sharded", "gpt-neox-serial", "gpt2-scaled-by-layer"),
    *("mpt-6-heads", "falcon-serial", "stablelm-parallel", "qwen2-moe-window", "phimoe-window"),
    *("bloom-6-heads", "llama-tied-llama3-rope", "llama-dynamic-rope", "phi3-longrope"),
    *(f"{name}{UNFUSED}" for name in ("mistral-window", "qwen2-window-above")),
)


@pytest.fixture(scope="module", params=one_group_each(CASES, slow=SECOND_LAYOUTS))
def loaded(request: pytest.FixtureRequest, saved_models: SavedModels) -> Iterator[Loaded]:
    saved = saved_models[request.param.removesuffix(UNFUSED)]
    shard = LocalShard.load(tiny_options(saved.directory, fuse=not request.param.endswith(UNFUSED)))
    guesses = outside_loop(generated(shard))
    expected = [
        confirmed(saved.model, prompt, NEW_TOKENS, guess) for prompt, guess in zip(PROMPTS, guesses, strict=True)
    ]
    yield Loaded(shard, expected, [prompt_logprobs(saved.model, prompt) for prompt in PROMPTS])
    shard.close()


@torch.no_grad()
def prompt_logprobs(model: PreTrainedModel, prompt: list[int]) -> list[float]:
    """Logprobs of all tokens except the first."""
    logprobs = unchanged_by_length(model)(torch.tensor([prompt])).logits[0].float().log_softmax(-1)
    return [float(logprobs[position, id_]) for position, id_ in enumerate(prompt[1:])]


def tiny_options(directory: Path, fuse: bool) -> EngineOptions:
    return EngineOptions(
        str(directory), dtype="float32", cpu_memory_gib=0.01, fuse=fuse, compute_threads=1, request_logprobs=True
    )


async def warmed(shard: LocalShard) -> ShardDriver:
    request = Request(0, (text_of([1] * 16),), 16, ChooserParameters(), StoppingParameters(1))
    await shard.warmup(WarmupRequest(Batch(0, (request,)), CHUNK_BUDGET))
    return ShardDriver(shard)


async def generated(shard: LocalShard) -> list[list[int]]:
    driver = await warmed(shard)
    outcomes = await driver.run(*(driver.request(id_, prompt) for id_, prompt in enumerate(PROMPTS)))
    return [outcome.ids for outcome in outcomes]


async def test_model_server_M2_a_ragged_batch_equals_generate_alone(loaded: Loaded) -> None:
    assert await generated(loaded.shard) == loaded.expected


# Positions that depend on the length are never confirmed by one forward.
CONFIRMED = sorted(set(CONFIGS) - {"llama-dynamic-rope", "phi3-longrope"})
CONFIRMED_SHORT = ("llama", "gpt2", "bloom", "gemma2")


@pytest.mark.parametrize("name", one_group_each(CONFIRMED, slow=set(CONFIRMED) - set(CONFIRMED_SHORT)))
def test_only_the_ids_of_transformers_generation_are_confirmed(name: str, saved_models: SavedModels) -> None:
    """The reference of this folder: one forward instead of a generation."""
    model, prompt = saved_models[name].model, PROMPTS[0]
    expected = generate_alone(model, prompt, NEW_TOKENS)
    wrong = [
        [*expected[:place], (expected[place] + 1) % VOCAB_SIZE, *expected[place + 1 :]] for place in range(NEW_TOKENS)
    ]

    assert is_greedy(model, prompt, expected)
    assert [is_greedy(model, prompt, ids) for ids in wrong] == [False] * NEW_TOKENS
    assert confirmed(model, prompt, NEW_TOKENS, wrong[3]) == expected
    assert confirmed(model, prompt, NEW_TOKENS, expected[:3]) == expected


@pytest.mark.parametrize("name", ["phimoe-window", pytest.param("qwen2-moe-window", marks=pytest.mark.slow)])
async def test_hardening_R5_a_window_that_only_the_mask_carries_is_kept(name: str, saved_models: SavedModels) -> None:
    saved = saved_models[name]
    shard = LocalShard.load(tiny_options(saved.directory, fuse=True))
    driver = await warmed(shard)
    outcomes = await driver.run(
        *(driver.request(id_, prompt, prefill_logprobs=True) for id_, prompt in enumerate(PROMPTS))
    )
    shard.close()

    assert [outcome.ids for outcome in outcomes] == [
        generate_alone(saved.model, prompt, NEW_TOKENS) for prompt in PROMPTS
    ]
    for prompt, outcome in zip(PROMPTS, outcomes, strict=True):
        assert outcome.prefill_tokens is not None
        assert outcome.prefill_tokens.logprobs[1:] == pytest.approx(prompt_logprobs(saved.model, prompt), abs=1e-4)


async def test_prompts_in_chunks_of_five_equal_generate_alone(loaded: Loaded) -> None:
    driver = await warmed(loaded.shard)
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


async def test_drafts_change_no_token(loaded: Loaded) -> None:
    driver = await warmed(loaded.shard)
    loaded.shard.engine.stepper.drafter = Drafter(KnownDrafts(dict(enumerate(loaded.expected))), speculate=3)

    outcomes = await driver.run(*(driver.request(id_, prompt) for id_, prompt in enumerate(PROMPTS)))

    loaded.shard.engine.stepper.drafter = None
    assert [outcome.ids for outcome in outcomes] == loaded.expected
    assert sum(outcome.num_generations for outcome in outcomes) < 3 * NEW_TOKENS


async def test_requests_join_and_leave_midway(loaded: Loaded) -> None:
    driver = await warmed(loaded.shard)
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


IN_BFLOAT16 = [name for name in CONFIGS if name.count("-") == 0 or name in ("gpt-neox", "gpt-bigcode")]
# One of each: fused rotary, softcap, learned positions, ALiBi, experts.
SHORT_IN_BFLOAT16 = ("llama", "gemma2", "gpt2", "bloom", "phimoe")


@pytest.mark.parametrize("name", one_group_each(IN_BFLOAT16, slow=set(IN_BFLOAT16) - set(SHORT_IN_BFLOAT16)))
async def test_bfloat16_stays_close_to_float32(name: str, saved_models: SavedModels) -> None:
    saved = saved_models[name]
    options = replace(tiny_options(saved.directory, fuse=True), dtype="bfloat16")
    shard = LocalShard.load(options)
    driver = await warmed(shard)

    outcomes = await driver.run(
        *(driver.request(id_, prompt, prefill_logprobs=True) for id_, prompt in enumerate(PROMPTS))
    )
    shard.close()

    eager = copy.deepcopy(saved.model).to(torch.bfloat16)
    for outcome, prompt in zip(outcomes, PROMPTS, strict=True):
        assert outcome.prefill_tokens is not None
        expected = prompt_logprobs(saved.model, prompt)
        # Transformers' own eager bfloat16 may have a larger error: 0.45 for PhiMoE.
        eager_logprobs = prompt_logprobs(eager, prompt)
        eager_error = max(abs(found - exact) for found, exact in zip(eager_logprobs, expected, strict=True))
        assert outcome.prefill_tokens.logprobs[1:] == pytest.approx(expected, abs=max(0.2, eager_error))

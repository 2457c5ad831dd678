"""Models of the lower tiers: a batch of each generates the ids of Transformers' generate alone."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.support.models.lower_tiers import (
    ENCODER_DECODER,
    PADDED,
    PROMPTS,
    RECURRENT,
    Loaded,
    as_joined,
    join_and_leave,
    run_together,
    save_model,
    serve_model,
    unplaced,
)
from tests.support.models.shard_driver import ShardDriver
from tests.support.models.tiny_configs import CONFIGS
from tests.support.models.tiny_models import make_tiny_model, save_tiny_model
from tests.support.models.tiny_shards import SEEDED, warm_up

MODELS = {**PADDED, **ENCODER_DECODER, **RECURRENT}
# Families of the ragged tier, forced into the padded one.
FORCED = ("llama", "mistral-window", "gpt2", "bloom", "gpt-neox", "opt")
# Of the others, one of each kind is short: learned and rotary positions, ALiBi, windows, with a record and without.
SLOW = {"gpt2", "gpt-neox", "opt", "codegen", "biogpt, by no record"}
SLOW |= ENCODER_DECODER.keys() - {"t5", "bart", "led, by no record"}


@pytest.fixture(
    scope="module",
    params=[pytest.param(name, marks=pytest.mark.slow if name in SLOW else ()) for name in (*MODELS, *FORCED)],
)
def loaded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Loaded]:
    directory: Path = tmp_path_factory.mktemp("model")
    if request.param in FORCED:
        model = make_tiny_model(request.param)
        save_tiny_model(directory, request.param)
    else:
        model = save_model(directory, MODELS[request.param])
    with serve_model(directory, model, "padded" if request.param in FORCED else None) as loaded:
        yield loaded


def test_names_of_models_are_distinct_and_the_forced_families_are_ragged_by_default() -> None:
    assert len(MODELS) == len(PADDED) + len(ENCODER_DECODER) + len(RECURRENT)
    assert set(FORCED) <= CONFIGS.keys() - MODELS.keys()


async def test_model_server_M31_a_batch_equals_generate_alone(loaded: Loaded) -> None:
    await warm_up(loaded.shard)

    assert await run_together(loaded.shard) == loaded.expected


async def test_model_server_M31_requests_of_different_length_join_and_leave_midway(loaded: Loaded) -> None:
    await warm_up(loaded.shard)

    assert await join_and_leave(loaded.shard) == as_joined(loaded.expected)


async def test_a_model_without_paged_memory_reports_its_limits(loaded: Loaded) -> None:
    info = await loaded.shard.info()
    reply = await warm_up(loaded.shard, max_prefill_tokens=40)

    assert info.requires_padding
    assert not info.support_chunking
    assert not info.use_prefix_caching
    assert reply.max_supported_total_tokens is None
    assert (reply.max_input_tokens, reply.max_total_tokens) == (39, 40)
    assert reply.backends["decode"] == "transformers"


@pytest.mark.parametrize("loaded", RECURRENT, indirect=True)
async def test_a_seed_of_a_recurrent_model_is_independent_of_the_batch(loaded: Loaded) -> None:
    await warm_up(loaded.shard)
    driver = ShardDriver(loaded.shard)
    [alone] = await driver.run(unplaced(driver, 0, PROMPTS[1], parameters=SEEDED))

    mates = [unplaced(driver, id_, prompt) for id_, prompt in enumerate(PROMPTS[:3], start=2)]
    together = (await driver.run(unplaced(driver, 1, PROMPTS[1], parameters=SEEDED), *mates))[0]

    assert together.ids == alone.ids


@pytest.mark.parametrize("loaded", RECURRENT, indirect=True)
async def test_prompt_logprobs_of_a_recurrent_model_equal_a_full_forward(loaded: Loaded) -> None:
    await warm_up(loaded.shard)
    driver = ShardDriver(loaded.shard)

    outcomes = await driver.run(
        *(unplaced(driver, id_, prompt, 2, prefill_logprobs=id_ != 2) for id_, prompt in enumerate(PROMPTS))
    )

    assert outcomes[2].prefill_tokens is None
    for prompt, outcome in zip(PROMPTS, outcomes, strict=True):
        if outcome.prefill_tokens is None:
            continue
        with torch.no_grad():
            logprobs = loaded.model(torch.tensor([prompt])).logits[0].log_softmax(-1)
        expected = [float(logprobs[place, id_]) for place, id_ in enumerate(prompt[1:])]
        assert outcome.prefill_tokens.logprobs[1:] == pytest.approx(expected, abs=1e-4)

"""LoRA adapters: rows of one batch on several adapters give what each merged model gives alone."""

from pathlib import Path

import pytest

from reference_server.adapter_source import AdapterSource
from reference_server.messages import StoppingParameters
from reference_server.model_server.calls.local_shard import LocalShard
from reference_server.model_server.models.families import FAMILIES
from tests.support.models.adapters import merged, save_adapter
from tests.support.models.shard_driver import ShardDriver
from tests.support.models.tiny_configs import CONFIGS
from tests.support.models.tiny_models import (
    SavedModels,
    confirmed,
    generate_alone,
    one_group_each,
    random_prompt,
)
from tests.support.models.tiny_shards import tiny_options, warm_up

RAGGED = {family.model_type for family in FAMILIES if family.tier == "ragged"}
ONE_OF_EACH = {config["model_type"]: name for name, config in reversed(CONFIGS.items())}
FAMILIES_WITH_ADAPTERS = sorted(name for model_type, name in ONE_OF_EACH.items() if model_type in RAGGED)
# Separate and packed projections, heads side by side, transposed weights, an MLP without a gate, inline attention,
# modules that are not fused, experts.
SHORT = ("llama-tied-llama3-rope", "phi3", "gpt-neox", "gpt2", "opt", "falcon", "qwen2-moe", "gemma2")
PROMPTS = [random_prompt(length) for length in (4, 20, 2, 11, 1)]
IDS = (None, "two", "five", "two", "unknown")


def sources(directory: Path, saved: SavedModels, name: str) -> tuple[AdapterSource, ...]:
    """Two adapters of different ranks: over all linears, and over some."""
    model = saved[name].model
    two = save_adapter(directory / "two", model, rank=2, seed=1)
    five = save_adapter(directory / "five", model, rank=5, seed=2, targets=lambda each: ".1." in each, use_rslora=True)
    return AdapterSource("two", str(two)), AdapterSource("five", str(five))


def expected_ids(saved: SavedModels, name: str, directory: Path, guesses: list[list[int]]) -> list[list[int]]:
    """The ids of Transformers. guesses: the probable result."""
    base = saved[name].model
    models = {None: base, "unknown": base, **{each: merged(base, directory / each) for each in ("two", "five")}}
    cases = list(zip(IDS, PROMPTS, guesses, strict=True))
    ids = [confirmed(models[each], prompt, 10, guess) for each, prompt, guess in cases]
    without = [confirmed(base, prompt, 10, guess) for _, prompt, guess in cases]
    assert ids != without, "the adapters change nothing"
    return ids


async def mixed_ids(shard: LocalShard, max_prefill_tokens: int = 64) -> list[list[int]]:
    await warm_up(shard, max_prefill_tokens)
    driver = ShardDriver(shard, block_size=shard.engine.info.block_size)
    requests = [
        driver.request(number, prompt, adapter_id=adapter_id)
        for number, (adapter_id, prompt) in enumerate(zip(IDS, PROMPTS, strict=True))
    ]
    return [outcome.ids for outcome in await driver.run(*requests)]


@pytest.mark.parametrize(
    "name", one_group_each(FAMILIES_WITH_ADAPTERS, slow=set(FAMILIES_WITH_ADAPTERS).difference(SHORT))
)
async def test_rows_of_one_batch_use_their_own_adapters(name: str, saved_models: SavedModels, tmp_path: Path) -> None:
    adapters = sources(tmp_path, saved_models, name)
    shard = LocalShard.load(tiny_options(saved_models[name].directory, adapters=adapters))
    try:
        found = await mixed_ids(shard)
    finally:
        shard.close()

    assert found == expected_ids(saved_models, name, tmp_path, found)


@pytest.mark.parametrize(
    "options", [{"fuse": False}, {"run_ahead": False}, {"speculate": 3, "speculate_adaptive": False}]
)
async def test_adapters_combine_with(options: dict[str, object], saved_models: SavedModels, tmp_path: Path) -> None:
    adapters = sources(tmp_path, saved_models, "llama")
    shard = LocalShard.load(tiny_options(saved_models["llama"].directory, adapters=adapters, **options))
    try:
        found = await mixed_ids(shard)
    finally:
        shard.close()

    assert found == expected_ids(saved_models, "llama", tmp_path, found)


async def test_prompt_in_chunks_uses_its_adapter(saved_models: SavedModels, tmp_path: Path) -> None:
    adapters = sources(tmp_path, saved_models, "llama")
    shard = LocalShard.load(tiny_options(saved_models["llama"].directory, adapters=adapters))
    try:
        await warm_up(shard, max_prefill_tokens=16)
        driver = ShardDriver(shard, block_size=shard.engine.info.block_size)
        stopping = StoppingParameters(10, ignore_eos_token=True)
        prompt = PROMPTS[1]
        chunked = driver.request(0, prompt, stopping=stopping, adapter_id="two", chunk_len=7)
        outcomes = await driver.run(chunked, driver.request(1, PROMPTS[3], adapter_id="five"))
    finally:
        shard.close()

    base = saved_models["llama"].model
    assert outcomes[0].ids == generate_alone(merged(base, tmp_path / "two"), prompt, 10)
    assert outcomes[1].ids == generate_alone(merged(base, tmp_path / "five"), PROMPTS[3], 10)


async def test_the_compiled_walk_adds_adapters_as_the_walk_does(saved_models: SavedModels, tmp_path: Path) -> None:
    """In bfloat16: the same ids, and for each row nearly those of float32."""
    adapters = sources(tmp_path, saved_models, "llama")
    found = []
    for compiled_walk in (True, False):
        options = tiny_options(
            saved_models["llama"].directory, adapters=adapters, dtype="bfloat16", compiled_walk=compiled_walk
        )
        shard = LocalShard.load(options)
        try:
            found.append(await mixed_ids(shard))
        finally:
            shard.close()

    assert found[0] == found[1]

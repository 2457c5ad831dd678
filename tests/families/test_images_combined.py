"""Models with images whose language model is quantized, sharded, or has adapters: equal to the reference."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from reference_server.adapter_source import AdapterSource
from reference_server.model_server.calls.local_shard import LocalShard
from reference_server.model_server.quantization.integers import float_products
from tests.families.test_images import NEW_TOKENS, PROMPTS, chunks_of
from tests.families.test_sharded import assert_equal_to_one_rank, run_ranks
from tests.support.models.adapters import merged, save_adapter
from tests.support.models.shard_driver import ShardDriver
from tests.support.models.tiny_models import one_group_each
from tests.support.models.tiny_shards import tiny_options, warm_up
from tests.support.models.tiny_vision import VISION_MODELS, SavedVisionModel, save_vision_model

# Fused, and unfused with positions on a grid.
SHORT = ("llava-next", "qwen2-vl")
FAMILIES = one_group_each(VISION_MODELS, slow=set(VISION_MODELS).difference(SHORT))


def is_of_language_model(name: str) -> bool:
    return name.startswith(("model.language_model.", "model.text_model."))


async def generated(saved: SavedVisionModel, adapter_ids: dict[int, str] | None = None, **options: Any) -> Any:
    """The ids of all prompts in one batch. adapter_ids: by the number of the prompt."""
    shard = LocalShard.load(tiny_options(saved.directory, **options))
    try:
        assert shard.engine.model.quantize == options.get("quantize", "none")
        await warm_up(shard, 128)
        driver = ShardDriver(shard)
        requests = [
            driver.request(number, saved.prompt_ids(parts), NEW_TOKENS, chunks=chunks_of(parts), adapter_id=adapter_id)
            for number, parts in enumerate(PROMPTS)
            for adapter_id in [(adapter_ids or {}).get(number)]
        ]
        return [outcome.ids for outcome in await driver.run(*requests)]
    finally:
        shard.close()


@pytest.mark.parametrize("name", FAMILIES)
async def test_a_quantized_language_model_equals_its_rounded_weights(tmp_path: Path, name: str) -> None:
    saved = save_vision_model(tmp_path, name)
    with float_products():
        found = await generated(saved, quantize="eetq")

    with torch.no_grad():
        for path, module in saved.model.named_modules():
            if is_of_language_model(path) and isinstance(module, nn.Linear):
                scale = module.weight.abs().amax(1, keepdim=True) / 127
                module.weight.copy_((module.weight / scale).round() * scale)

    assert found == [saved.generate(parts, NEW_TOKENS, ids) for parts, ids in zip(PROMPTS, found, strict=True)]


@pytest.mark.parametrize("name", FAMILIES)
async def test_rows_with_images_use_their_own_adapters(tmp_path: Path, name: str) -> None:
    saved = save_vision_model(tmp_path / "model", name)
    save_adapter(tmp_path / "two", saved.model, rank=2, targets=is_of_language_model)
    whole = dataclasses.replace(saved, model=merged(saved.model, tmp_path / "two"))

    found = await generated(saved, {0: "two", 1: "two"}, adapters=(AdapterSource("two", str(tmp_path / "two")),))

    models = (whole, whole, *[saved] * (len(PROMPTS) - 2))
    for model, parts, ids in zip(models, PROMPTS, found, strict=True):
        assert ids == model.generate(parts, NEW_TOKENS, ids)
    assert found[:2] != [saved.generate(parts, NEW_TOKENS) for parts in PROMPTS[:2]]


async def test_an_adapter_with_the_names_of_earlier_releases_is_the_same(tmp_path: Path) -> None:
    saved = save_vision_model(tmp_path / "model", "llava-next")
    save_adapter(tmp_path / "new", saved.model, rank=2, targets=is_of_language_model)
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "adapter_config.json").write_text((tmp_path / "new" / "adapter_config.json").read_text())
    weights = load_file(tmp_path / "new" / "adapter_model.safetensors")
    renamed = {name.replace("model.language_model.", "language_model.model."): each for name, each in weights.items()}
    assert renamed.keys().isdisjoint(weights)
    save_file(renamed, tmp_path / "old" / "adapter_model.safetensors")
    adapters = tuple(AdapterSource(name, str(tmp_path / name)) for name in ("new", "old"))

    new = await generated(saved, dict.fromkeys(range(len(PROMPTS)), "new"), adapters=adapters)

    assert await generated(saved, dict.fromkeys(range(len(PROMPTS)), "old"), adapters=adapters) == new


def test_an_adapter_of_the_vision_tower_is_refused_by_name(tmp_path: Path) -> None:
    saved = save_vision_model(tmp_path / "model", "llava-next")
    save_adapter(tmp_path / "tower", saved.model, rank=2)
    options = tiny_options(saved.directory, adapters=(AdapterSource("tower", str(tmp_path / "tower")),))

    with pytest.raises(Exception, match="is not a linear layer of LlamaForCausalLM"):
        LocalShard.load(options)


@pytest.mark.slow
@pytest.mark.timeout(400)
async def test_two_ranks_with_images_generate_the_ids_of_one(tmp_path: Path) -> None:
    await check_two_ranks(tmp_path, SHORT)


@pytest.mark.slow
@pytest.mark.timeout(400)
async def test_two_ranks_with_images_generate_the_ids_of_one_for_all_other_families(tmp_path: Path) -> None:
    await check_two_ranks(tmp_path, sorted(set(VISION_MODELS).difference(SHORT)))


async def check_two_ranks(directory: Path, names: Any) -> None:
    """Also with adapters for the first two prompts, one of them loaded while the shards run."""
    directories = {}
    for name in names:
        saved = save_vision_model(directory / name, name)
        directories[name] = saved.directory
        for rank in (2, 3):
            save_adapter(saved.directory / "adapters" / f"{rank}", saved.model, rank, targets=is_of_language_model)

    results = run_ranks(2, directories, directory / "rendezvous").results

    for name, each in directories.items():
        # Each rank has the whole tower.
        await assert_equal_to_one_rank(results[name], each, max_bytes=0.9)

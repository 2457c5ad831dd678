"""Adapters over a quantized base: the ids of the dequantized weights with the adapter merged into them."""

from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedModel

from reference_server.adapter_source import AdapterSource
from reference_server.model_server.calls.local_shard import LocalShard
from reference_server.model_server.distributed import RankGroup
from reference_server.model_server.models import loader
from reference_server.model_server.options import EngineOptions
from reference_server.model_server.quantization.integers import float_products
from reference_server.model_server.quantization.linear import QuantizedLinear
from tests.support.models.adapters import merged, save_adapter
from tests.support.models.checkpoints.quantized_checkpoints import save_quantized
from tests.support.models.shard_driver import ShardDriver
from tests.support.models.tiny_models import confirmed, make_tiny_model, random_prompt, save_tiny_model
from tests.support.models.tiny_shards import tiny_options, warm_up

SIZES = {"llama": {"hidden_size": 64, "intermediate_size": 128}, "gpt2": {"n_embd": 64}}
SIZES["phi3"] = SIZES["llama"]
PROMPTS = [random_prompt(length) for length in (4, 20, 11)]
NAMES = (None, "two", "five")


def dequantized(directory: Path, name: str, method: str) -> PreTrainedModel:
    """The model with the weights that `--quantize METHOD` computes with."""
    options = EngineOptions(str(directory), dtype="float32", tier="padded", quantize=method)  # type: ignore[arg-type]
    quantized = loader.load(options, loader.locate(options), RankGroup(0, 1)).model
    model = make_tiny_model(name, **SIZES[name])
    for path, module in quantized.named_modules():
        if isinstance(module, QuantizedLinear):
            own = model.get_submodule(path)
            weight = module.product.dequantize()  # type: ignore[union-attr]
            own.weight.data = weight.t() if type(own).__name__ == "Conv1D" else weight
    return model


@pytest.mark.parametrize(
    ("name", "method", "on_the_fly"),
    [
        ("llama", "gptq-act-order", False),
        pytest.param("llama", "awq", False, marks=pytest.mark.slow),
        ("llama", "ct-int8", False),
        ("gpt2", "gptq", False),
        ("phi3", "awq", False),
        ("llama", "eetq", True),
        pytest.param("llama", "int4", True, marks=pytest.mark.slow),
    ],
)
async def test_each_row_has_its_adapter_over(name: str, method: str, on_the_fly: bool, tmp_path: Path) -> None:
    options: dict[str, Any] = {}
    with float_products():
        if on_the_fly:
            options["quantize"] = method
            directory = save_tiny_model(tmp_path / "base", name, **SIZES[name])
            base = dequantized(directory, name, method)
        else:
            directory, base = save_quantized(tmp_path / "base", name, method, **SIZES[name])
        paths = {each: tmp_path / each for each in ("two", "five")}
        for rank, path in zip((2, 5), paths.values(), strict=True):
            save_adapter(path, base, rank, seed=rank)
        adapters = tuple(AdapterSource(each, str(path)) for each, path in paths.items())
        shard = LocalShard.load(tiny_options(directory, adapters=adapters, **options))
        try:
            await warm_up(shard)
            driver = ShardDriver(shard, block_size=shard.engine.info.block_size)
            requests = [
                driver.request(id_, prompt, adapter_id=each)
                for id_, (each, prompt) in enumerate(zip(NAMES, PROMPTS, strict=True))
            ]
            outcomes = await driver.run(*requests)
        finally:
            shard.close()

    models = {None: base, **{each: merged(base, path) for each, path in paths.items()}}
    for each, prompt, outcome in zip(NAMES, PROMPTS, outcomes, strict=True):
        assert outcome.ids == confirmed(models[each], prompt, 10, outcome.ids)

"""The table of families, and refused models."""

from pathlib import Path

import pytest
from transformers import AutoConfig

from reference_server.errors import ShardError, StartupError, UnsupportedError
from reference_server.model_server.calls.local_shard import LocalShard
from reference_server.model_server.models.families import FAMILIES, find_family, has_experts, max_positions
from reference_server.model_server.models.shims import mpt
from tests.support.models.shard_driver import ShardDriver
from tests.support.models.tiny_configs import CONFIGS
from tests.support.models.tiny_models import make_tiny_model, random_prompt, save_tiny_model
from tests.support.models.tiny_shards import tiny_options, warm_up
from tests.support.models.tiny_vision import VISION_MODELS


def test_every_ragged_family_has_a_tiny_model() -> None:
    ragged = {family.model_type for family in FAMILIES if family.tier == "ragged"}

    with_images = {each.config["model_type"] for each in VISION_MODELS.values()}
    assert ragged <= {config["model_type"] for config in CONFIGS.values()} | with_images
    assert with_images == {family.model_type for family in FAMILIES if family.has_images}


def test_a_model_type_has_one_row() -> None:
    assert len({family.model_type for family in FAMILIES}) == len(FAMILIES)


def test_mixtures_of_experts_are_found_by_their_configs() -> None:
    configs = {name: AutoConfig.for_model(**config).to_dict() for name, config in CONFIGS.items()}

    mixtures = {config["model_type"] for config in configs.values() if has_experts(config)}
    assert mixtures == {"mixtral", "qwen2_moe", "qwen3_moe", "phimoe", "dbrx", "deepseek_v2", "deepseek_v3"}


@pytest.mark.parametrize(
    ("model_type", "reason"),
    [
        ("RefinedWebModel", "convert the config to Transformers' `falcon`"),
        ("llava", "its images are not served"),
        ("ssm", "`mamba` format"),
        ("mllama", "by cross-attention, in every step; the paged cache has K/V of the sequence's tokens only"),
    ],
)
def test_an_unsupported_model_is_refused_with_the_reason(model_type: str, reason: str) -> None:
    with pytest.raises(UnsupportedError, match=f"Unsupported model type {model_type}: .*{reason}"):
        find_family({"model_type": model_type})


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("num_hidden_layers", 1001, "`num_hidden_layers` is 1001, but must be an integer from 1 to 1000"),
        ("n_head", 0, "`n_head` is 0, but must be an integer from 1 to 4096"),
        ("num_local_experts", 5000, "`num_local_experts` is 5000, .* 0 to 4096"),
        ("vocab_size", 1 << 22, "`vocab_size` is 4194304, .* 1 to 2097152"),
        ("max_seq_len", 10**30, "`max_seq_len` is 1000000000000000000000000000000, .* 134217728"),
        ("hidden_size", "4096", "`hidden_size` is '4096', .* 131072"),
        ("head_dim", 64.5, "`head_dim` is 64.5"),
        ("ffn_config", {"moe_num_experts": -1}, "`ffn_config.moe_num_experts` is -1"),
    ],
)
def test_reliability_T24_a_number_out_of_bounds_names_its_field(field: str, value: object, message: str) -> None:
    with pytest.raises(StartupError, match=f"^config.json: {message}"):
        find_family({"model_type": "llama", "num_key_value_heads": None, field: value})


@pytest.mark.parametrize(("model_type", "positions"), [("gpt2", 1024), ("opt", 2048), ("mpt", 2048), ("bloom", None)])
def test_the_number_of_positions_is_read_from_the_config(model_type: str, positions: int | None) -> None:
    assert max_positions(AutoConfig.for_model(model_type)) == positions


@pytest.mark.parametrize("name", ["gpt2", "gptj", "gpt-bigcode", "opt"])
@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
async def test_a_position_table_refuses_a_longer_request(tmp_path: Path, name: str) -> None:
    shard = LocalShard.load(tiny_options(save_tiny_model(tmp_path, name, max_position_embeddings=32)))
    await warm_up(shard, 16)
    driver = ShardDriver(shard)

    [outcome] = await driver.run(driver.request(0, random_prompt(23), max_new_tokens=10))
    with pytest.raises(ShardError, match="request 1 needs 33 positions and the model has 32: lower `--max-input-tok"):
        await driver.prefill(driver.request(1, random_prompt(24), max_new_tokens=10))
    shard.close()

    assert len(outcome.ids) == 10


async def test_a_warm_up_beyond_the_position_table_is_refused(tmp_path: Path) -> None:
    shard = LocalShard.load(tiny_options(save_tiny_model(tmp_path, "gpt2", max_position_embeddings=32)))

    with pytest.raises(ShardError, match="needs 64 positions and the model has 32"):
        await warm_up(shard, 64)
    shard.close()


@pytest.mark.parametrize(
    ("changes", "unsupported"),
    [
        ({"attn_config": {"alibi": False}}, "learned positions"),
        ({"attn_config": {"qk_ln": True}}, "norms of queries and keys"),
        ({"attn_config": {"alibi_bias_max": 16}}, "`alibi_bias_max` 16"),
        ({"logit_scale": 0.5}, "`logit_scale`"),
        ({"no_bias": False}, "biases"),
    ],
)
def test_an_mpt_with_unsupported_settings_is_refused(changes: dict[str, object], unsupported: str) -> None:
    with pytest.raises(UnsupportedError, match=f"MPT with {unsupported} is not served"):
        mpt.install(make_tiny_model("mpt", **changes))

"""An eight-bit K/V cache in every family: the ids are those of Transformers with keys and values rounded to it."""

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from reference_server.errors import StartupError, UnsupportedError
from reference_server.model_server.calls.local_shard import LocalShard
from reference_server.model_server.drafting import Drafter
from reference_server.model_server.memory.float8 import FLOAT8_TYPES
from reference_server.model_server.quantization.integers import float_products
from tests.support.models.checkpoints.quantized_checkpoints import save_quantized
from tests.support.models.known_drafts import KnownDrafts
from tests.support.models.lower_tiers import ENCODER_DECODER, PADDED, RECURRENT, run_together, save_model
from tests.support.models.rounding_cache import generate_rounded
from tests.support.models.shard_driver import ShardDriver, outside_loop
from tests.support.models.tiny_configs import CONFIGS
from tests.support.models.tiny_models import SavedModels, generate_alone, one_group_each, random_prompt, save_tiny_model
from tests.support.models.tiny_shards import tiny_options, warm_up

PROMPTS = [random_prompt(length) for length in (4, 20, 2, 11)]
NEW_TOKENS = 10
CHUNK_BUDGET = 16
CacheType = Literal["fp8_e4m3fn", "fp8_e5m2"]
E4M3: CacheType = "fp8_e4m3fn"
E5M2: CacheType = "fp8_e5m2"
# GPT-BigCode of Transformers 5.17 with a newer torch.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")

# Grouped heads with both types; then one of each attention: window, softcap, learned positions, ALiBi, latent, shims.
SHORT = (
    *("llama fp8_e4m3fn", "llama fp8_e5m2", "mistral-window fp8_e4m3fn", "gemma2 fp8_e5m2", "gpt2 fp8_e4m3fn"),
    *("bloom fp8_e5m2", "deepseek-v3 fp8_e5m2", "falcon-alibi fp8_e4m3fn", "gptj fp8_e5m2"),
)
ALL = [f"{name} {cache}" for name in CONFIGS for cache in (E4M3, E5M2)]


@dataclass(frozen=True)
class Loaded:
    """A shard with an eight-bit cache, and the reference's ids for the prompts."""

    shard: LocalShard
    expected: list[list[int]]


@pytest.fixture(scope="module", params=one_group_each(ALL, slow=set(ALL) - set(SHORT)))
def loaded(request: pytest.FixtureRequest, saved_models: SavedModels) -> Iterator[Loaded]:
    name, cache = request.param.split()
    saved = saved_models[name]
    shard = LocalShard.load(tiny_options(saved.directory, kv_cache_dtype=cache))
    guesses = outside_loop(answers(shard))
    yield Loaded(shard, expected_of(saved.model, cache, guesses=guesses))
    shard.close()


def expected_of(
    model: PreTrainedModel,
    cache: CacheType,
    scales: tuple[float, float] = (1.0, 1.0),
    guesses: Sequence[list[int]] = ([],) * len(PROMPTS),
) -> list[list[int]]:
    return [
        generate_rounded(model, prompt, NEW_TOKENS, FLOAT8_TYPES[cache], scales, guess)
        for prompt, guess in zip(PROMPTS, guesses, strict=True)
    ]


async def answers(shard: LocalShard) -> list[list[int]]:
    """All prompts in one batch, after a warm-up."""
    await warm_up(shard, CHUNK_BUDGET)
    driver = ShardDriver(shard)
    outcomes = await driver.run(*(driver.request(id_, prompt) for id_, prompt in enumerate(PROMPTS)))
    return [outcome.ids for outcome in outcomes]


async def test_a_ragged_batch_equals_the_rounded_reference(loaded: Loaded) -> None:
    assert await answers(loaded.shard) == loaded.expected


async def test_prompts_in_chunks_of_five_equal_the_rounded_reference(loaded: Loaded) -> None:
    await warm_up(loaded.shard, CHUNK_BUDGET)
    driver = ShardDriver(loaded.shard)

    result = None
    for id_, prompt in enumerate(PROMPTS):
        first_chunk = replace(driver.request(id_, prompt), chunk_len=min(5, len(prompt)))
        result = await driver.prefill(first_chunk, cached=None if result is None else result.batch)
    assert result is not None
    await driver.finish(result)

    assert [driver.outcomes[id_].ids for id_ in range(len(PROMPTS))] == loaded.expected


async def test_drafts_over_an_eight_bit_cache_change_no_token(loaded: Loaded) -> None:
    await warm_up(loaded.shard, CHUNK_BUDGET)
    loaded.shard.engine.stepper.drafter = Drafter(KnownDrafts(dict(enumerate(loaded.expected))), speculate=3)
    driver = ShardDriver(loaded.shard)

    outcomes = await driver.run(*(driver.request(id_, prompt) for id_, prompt in enumerate(PROMPTS)))

    loaded.shard.engine.stepper.drafter = None
    assert [outcome.ids for outcome in outcomes] == loaded.expected
    assert sum(outcome.num_generations for outcome in outcomes) < 3 * NEW_TOKENS


@pytest.mark.parametrize("cache", [E4M3, pytest.param(E5M2, marks=pytest.mark.slow)])
async def test_quantized_weights_over_an_eight_bit_cache(tmp_path: Path, cache: CacheType) -> None:
    directory, dequantized = save_quantized(tmp_path, "llama", "ct-int8", hidden_size=64, intermediate_size=128)
    with float_products():
        shard = LocalShard.load(tiny_options(directory, kv_cache_dtype=cache))

    found = await answers(shard)

    shard.close()
    assert found == expected_of(dequantized, cache, guesses=found)


# The scales are so small that some keys and values are cut off, so that the ids depend on them.
KEY_SCALE, VALUE_SCALE = 0.0011, 0.0008
Scales = dict[str, float]


def save_with_scales(directory: Path, scales: Scales, shape: tuple[int, ...] = ()) -> Path:
    """A tiny Llama whose attention modules have these scales."""
    save_tiny_model(directory, "llama")
    weights = load_file(directory / "model.safetensors")
    for layer in range(2):
        for leaf, value in scales.items():
            weights[f"model.layers.{layer}.self_attn.{leaf}"] = torch.full(shape, value)
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


@pytest.mark.parametrize(
    ("scales", "expected"),
    [
        ({"k_scale": KEY_SCALE, "v_scale": VALUE_SCALE}, (KEY_SCALE, VALUE_SCALE)),
        ({"kv_scale": KEY_SCALE}, (KEY_SCALE, KEY_SCALE)),
        ({"k_scale": KEY_SCALE, "v_scale": VALUE_SCALE, "kv_scale": 1.0}, (KEY_SCALE, VALUE_SCALE)),
        ({"k_scale": KEY_SCALE, "kv_scale": VALUE_SCALE}, (VALUE_SCALE, VALUE_SCALE)),
    ],
)
async def test_the_scales_of_a_checkpoint_are_used_in_tgis_layouts(
    tmp_path: Path,
    saved_models: SavedModels,
    caplog: pytest.LogCaptureFixture,
    scales: Scales,
    expected: tuple[float, float],
) -> None:
    directory = save_with_scales(tmp_path, scales, (1,) if len(scales) == 1 else ())
    shard = LocalShard.load(tiny_options(directory, kv_cache_dtype=E4M3))

    found = await answers(shard)

    shard.close()
    model = saved_models["llama"].model
    assert found == expected_of(model, E4M3, expected, found)
    assert found != expected_of(model, E4M3)
    assert "K/V scales" not in caplog.text


@pytest.mark.parametrize("cache", [None, E5M2])
async def test_scales_are_left_out_of_a_cache_that_has_none(
    tmp_path: Path, saved_models: SavedModels, cache: CacheType | None
) -> None:
    directory = save_with_scales(tmp_path, {"k_scale": KEY_SCALE, "v_scale": VALUE_SCALE})
    shard = LocalShard.load(tiny_options(directory, kv_cache_dtype=cache))

    found = await answers(shard)

    shard.close()
    model = saved_models["llama"].model
    plain = [generate_alone(model, prompt, NEW_TOKENS) for prompt in PROMPTS]
    assert found == (plain if cache is None else expected_of(model, cache, guesses=found))


def test_e4m3_without_scales_warns_once(saved_models: SavedModels, caplog: pytest.LogCaptureFixture) -> None:
    shard = LocalShard.load(tiny_options(saved_models["llama"].directory, kv_cache_dtype=E4M3))

    shard.close()
    warnings = [each.getMessage() for each in caplog.records if each.levelno == logging.WARNING]
    assert [each for each in warnings if "scale" in each] == [
        "the checkpoint has no K/V scales (k_scale and v_scale, or kv_scale) for 2 of 2 layers: they are 1, and keys "
        "and values beyond 448 become 448"
    ]


@pytest.mark.parametrize(
    ("value", "shape", "reason"),
    [
        (0.1, (2,), r"k_scale has shape \(2,\), but a scale of the K/V cache is one number"),
        (0.0, (), r"k_scale is 0.0, but a scale of the K/V cache is a positive number"),
        (float("nan"), (), r"k_scale is nan, but a scale of the K/V cache is a positive number"),
    ],
)
def test_a_scale_that_is_no_positive_number_is_refused_by_name(
    tmp_path: Path, value: float, shape: tuple[int, ...], reason: str
) -> None:
    directory = save_with_scales(tmp_path, {"k_scale": value, "v_scale": value}, shape)

    with pytest.raises(StartupError, match=reason):
        LocalShard.load(tiny_options(directory, kv_cache_dtype=E4M3))


async def test_the_cache_holds_as_many_more_tokens_as_its_elements_are_smaller(saved_models: SavedModels) -> None:
    capacities = {}
    for cache in (None, E4M3, E5M2):
        shard = LocalShard.load(tiny_options(saved_models["llama"].directory, kv_cache_dtype=cache))
        reply = await warm_up(shard, CHUNK_BUDGET)
        capacities[cache] = reply.max_supported_total_tokens or 0
        assert reply.backends["kv_cache"] == {None: "float32", E4M3: "float8_e4m3fn", E5M2: "float8_e5m2"}[cache]
        shard.close()

    # The compute type of these tests is float32; a block has 16 tokens.
    assert capacities[E4M3] == capacities[E5M2]
    assert abs(capacities[E4M3] - 4 * (capacities[None] or 0)) <= 4 * 16


@pytest.mark.parametrize(
    ("tier", "name", "cache"),
    [
        ("padded", "gpt-neo", E4M3),
        pytest.param("padded", "codegen", E5M2, marks=pytest.mark.slow),
        pytest.param("pair", "t5", E4M3, marks=pytest.mark.slow),
        ("pair", "bart", E5M2),
    ],
)
async def test_the_padded_tiers_equal_the_rounded_reference(
    tmp_path: Path, tier: str, name: str, cache: CacheType
) -> None:
    model = save_model(tmp_path, (PADDED if tier == "padded" else ENCODER_DECODER)[name])
    shard = LocalShard.load(tiny_options(tmp_path, kv_cache_dtype=cache))
    await warm_up(shard)

    found = await run_together(shard)

    shard.close()
    assert found == expected_of(model, cache, guesses=found)


def test_a_model_without_keys_and_values_is_refused_by_name(tmp_path: Path) -> None:
    save_model(tmp_path, RECURRENT["mamba"])

    with pytest.raises(UnsupportedError, match=r"`--kv-cache-dtype fp8_e5m2` cannot be served with MambaForCausalLM"):
        LocalShard.load(tiny_options(tmp_path, kv_cache_dtype=E5M2))

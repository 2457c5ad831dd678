"""Decoders of the padded tier: prompt logprobs, refusals and settings. test_lower_tiers.py has the generated ids."""

import math
from pathlib import Path

import pytest
import torch

from reference_server.errors import ShardError, UnsupportedError
from reference_server.model_server.calls.local_shard import LocalShard
from reference_server.model_server.distributed import RankGroup
from reference_server.model_server.models import loader
from tests.support.models.lower_tiers import PADDED, PROMPTS, save_model, unplaced
from tests.support.models.shard_driver import ShardDriver
from tests.support.models.tiny_shards import tiny_options, warm_up

pytestmark = pytest.mark.xdist_group("padded")


async def test_prompt_logprobs_of_padded_rows_equal_a_full_forward(tmp_path: Path) -> None:
    model = save_model(tmp_path, PADDED["gpt-neo"])
    # Only the ragged tier needs `request_logprobs`.
    shard = LocalShard.load(tiny_options(tmp_path, request_logprobs=False))
    await warm_up(shard)
    driver = ShardDriver(shard)

    outcomes = await driver.run(
        *(unplaced(driver, id_, prompt, 2, prefill_logprobs=True) for id_, prompt in enumerate(PROMPTS))
    )
    shard.close()

    for prompt, outcome in zip(PROMPTS, outcomes, strict=True):
        with torch.no_grad():
            logprobs = model(torch.tensor([prompt])).logits[0].log_softmax(-1)
        assert outcome.prefill_tokens is not None
        assert outcome.prefill_tokens.ids == tuple(prompt)
        assert math.isnan(outcome.prefill_tokens.logprobs[0])
        expected = [float(logprobs[place, id_]) for place, id_ in enumerate(prompt[1:])]
        assert outcome.prefill_tokens.logprobs[1:] == pytest.approx(expected, abs=1e-4)


async def test_a_cache_too_small_for_one_request_fails_the_warm_up(tmp_path: Path) -> None:
    save_model(tmp_path, PADDED["gpt-neo"])
    shard = LocalShard.load(tiny_options(tmp_path))

    with pytest.raises(ShardError, match=r"`max_total_tokens` is 1000000, but the key-value cache holds \d+ tokens"):
        await warm_up(shard, max_total_tokens=1_000_000)
    shard.close()


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"model_type": "bert", "hidden_size": 48, "num_attention_heads": 4, "intermediate_size": 80}, "differ"),
        ({"model_type": "rwkv", "hidden_size": 48, "context_length": 64}, "keeps nothing in the cache"),
    ],
    ids=["sees later tokens", "has no cache"],
)
def test_a_model_that_fails_the_self_check_is_refused(tmp_path: Path, settings: dict[str, object], reason: str) -> None:
    model = save_model(tmp_path, {"num_hidden_layers": 2, **settings})

    with pytest.raises(UnsupportedError, match=rf"{type(model).__name__} cannot be served.*{reason}"):
        LocalShard.load(tiny_options(tmp_path))


@pytest.mark.parametrize("by_position", [True, False])
def test_hardening_R16_attention_that_depends_on_the_longest_row_is_refused(tmp_path: Path, by_position: bool) -> None:
    # Llama 4 scales its attention by the position in the batch, from 8192 tokens on.
    mixture = {"num_local_experts": 2, "intermediate_size_mlp": 80, "num_key_value_heads": 2, "head_dim": 12}
    sizes = {"hidden_size": 48, "num_attention_heads": 4, "intermediate_size": 80, "num_hidden_layers": 4}
    settings = {"model_type": "llama4_text", "max_position_embeddings": 32768, "pad_token_id": 0, **sizes, **mixture}
    save_model(tmp_path, {**settings, "attn_temperature_tuning": by_position})

    if by_position:
        with pytest.raises(UnsupportedError, match="outputs in a batch differ from those of each prompt alone"):
            LocalShard.load(tiny_options(tmp_path))
    else:
        LocalShard.load(tiny_options(tmp_path)).close()


async def test_prefix_caching_is_off_for_a_padded_model_with_a_log_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save_model(tmp_path, PADDED["codegen"])

    shard = LocalShard.load(tiny_options(tmp_path, prefix_caching=True))
    info = await shard.info()
    shard.close()

    assert not info.use_prefix_caching
    assert "prefix caching is off: CodeGenForCausalLM" in caplog.text


@pytest.mark.parametrize(
    ("settings", "name"), [(PADDED["gpt-neo"], "GPT-Neo"), (PADDED["biogpt, by no record"], "biogpt")]
)
def test_a_padded_model_cannot_be_sharded(tmp_path: Path, settings: dict[str, object], name: str) -> None:
    save_model(tmp_path, settings)
    options = tiny_options(tmp_path)

    with pytest.raises(UnsupportedError, match=f"sharded {name} is not supported"):
        loader.load(options, loader.locate(options), RankGroup(0, 2))


def test_a_hybrid_of_states_and_attention_is_refused(tmp_path: Path) -> None:
    attention = {"num_attention_heads": 4, "num_key_value_heads": 2, "attn_layer_period": 2, "attn_layer_offset": 1}
    sizes = {"hidden_size": 48, "num_hidden_layers": 2, "intermediate_size": 80}
    save_model(tmp_path, {"model_type": "jamba", **sizes, **attention})

    with pytest.raises(UnsupportedError, match="JambaForCausalLM cannot be served through the padded tier"):
        LocalShard.load(tiny_options(tmp_path))

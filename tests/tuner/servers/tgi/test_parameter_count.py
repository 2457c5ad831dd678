from typing import Any

import pytest

from reference_server.launcher.model_facts import read_model_config
from tuner.errors import ModelSizeError
from tuner.servers.tgi.parameter_count import PARTS, count_parameters, with_common_names

LLAMA_2_7B = {
    "model_type": "llama",
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_attention_heads": 32,
    "vocab_size": 32000,
}
LLAMA_3_70B = {
    "model_type": "llama",
    "num_hidden_layers": 80,
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
}


def preset(name: str) -> dict[str, Any]:
    return dict(read_model_config(f"preset:{name}") or {})


@pytest.mark.parametrize(
    ("config", "parameters"),
    [
        (LLAMA_2_7B, 6_738_415_616),
        (preset("llama-3.1-8b"), 8_030_261_248),
        (preset("llama-3.2-1b"), 1_235_814_400),
        (LLAMA_3_70B, 70_553_706_496),
        (preset("qwen2.5-7b"), 7_615_616_512),
        (preset("bloom-560m"), 559_214_592),
    ],
)
def test_parameters_are_the_published_numbers(config, parameters):
    assert count_parameters(with_common_names(config)).total == parameters


COMMON = {
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "hidden_size": 64,
    "intermediate_size": 96,
    "vocab_size": 160,
    "max_position_embeddings": 48,
}
GROUPED = {**COMMON, "num_key_value_heads": 2}
OLDER = {
    "gpt2": {"n_layer": 3, "n_head": 4, "n_embd": 64, "vocab_size": 160, "n_positions": 48},
    "bloom": {"n_layer": 3, "n_head": 4, "hidden_size": 64, "vocab_size": 160},
    "opt": {**COMMON, "ffn_dim": 96, "word_embed_proj_dim": 64},
    "gpt_neox": COMMON,
}
HEAD_DIMS = ("qwen3", "gemma", "gemma2", "gemma3_text")


@pytest.mark.slow
@pytest.mark.parametrize("model_type", sorted(PARTS))
def test_every_family_has_the_parameters_of_its_model(model_type):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    numbers = OLDER.get(model_type, GROUPED)
    if model_type in HEAD_DIMS:
        numbers = {**numbers, "head_dim": 32}
    config = transformers.AutoConfig.for_model(model_type, **numbers, pad_token_id=0)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)

    counted = count_parameters(with_common_names(config.to_dict()))

    assert counted.total == sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("name", ["num_hidden_layers", "vocab_size", "hidden_size"])
def test_a_missing_number_is_named(name):
    config = {key: value for key, value in LLAMA_2_7B.items() if key != name}

    with pytest.raises(ModelSizeError, match=f"`{name}`"):
        count_parameters(with_common_names(config))


def test_an_unknown_family_is_refused_with_the_known_ones():
    with pytest.raises(
        ModelSizeError, match="`model_type` is deepseek_v3, but parameters can be counted only for bloom, gemma"
    ):
        count_parameters({**LLAMA_2_7B, "model_type": "deepseek_v3"})

import json

import jinja2
import pytest
import torch

from reference_server.errors import UnsupportedError
from reference_server.presets.catalog import PRESETS, SPECULATORS, find
from reference_server.tokenizer import load_tokenizer

# The published numbers of parameters; the tied ones count their embedding once.
PARAMETERS = {
    "tiny-llama": 2_066_112,
    "llama-125m": 134_105_856,
    "bloom-560m": 559_214_592,
    "llama-3.2-1b": 1_235_814_400,
    "llama-3.1-8b": 8_030_261_248,
    "qwen2.5-7b": 7_615_616_512,
}


def test_speculators_are_found_and_ship_small_weights():
    for preset in SPECULATORS:
        assert find(preset.model_id) == preset
        assert preset.has_weights
        assert sum(path.stat().st_size for path in preset.directory.iterdir()) < 4_000_000


def test_a_model_id_that_is_no_preset_is_not_found():
    assert find("bigscience/bloom-560m") is None
    assert find("/models/preset") is None


def test_an_unknown_preset_is_refused_with_the_names_there_are():
    with pytest.raises(UnsupportedError, match=r"'preset:llama-9'.*preset:tiny-llama, preset:llama-125m"):
        find("preset:llama-9")


@pytest.mark.parametrize("preset", PRESETS, ids=lambda preset: preset.name)
def test_a_preset_is_found_by_its_name(preset):
    assert find(f"preset:{preset.name}") == preset


@pytest.mark.parametrize("preset", PRESETS, ids=lambda preset: preset.name)
def test_shapes_are_the_published_ones(preset):
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(preset.directory))

    assert sum(parameter.numel() for parameter in model.parameters()) == PARAMETERS[preset.name]


@pytest.mark.parametrize("preset", PRESETS, ids=lambda preset: preset.name)
def test_config_and_tokenizer_agree_on_bos_and_eos(preset):
    tokenizer = load_tokenizer(preset.tokenizer_directory)

    for name in ("config.json", "generation_config.json"):
        settings = json.loads((preset.directory / name).read_text())
        assert settings["bos_token_id"] == tokenizer.bos_id
        assert settings["eos_token_id"] == tokenizer.eos_id


@pytest.mark.parametrize(("name", "factor"), [("llama-3.2-1b", 32.0), ("llama-3.1-8b", 8.0)])
def test_llama_3_rope_scaling_is_understood(name, factor):
    from transformers import AutoConfig

    rope = AutoConfig.from_pretrained(find(f"preset:{name}").directory).rope_parameters

    assert rope == {
        "rope_type": "llama3",
        "rope_theta": 500_000.0,
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }


def test_the_tokenizer_is_small_and_its_template_ends_with_the_assistants_header():
    directory = find("preset:tiny-llama").tokenizer_directory
    settings = json.loads((directory / "tokenizer_config.json").read_text())
    template = jinja2.Environment().from_string(settings["chat_template"])
    messages = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hi"}]

    text = template.render(messages=messages, bos_token="<s>", eos_token="</s>", add_generation_prompt=True)

    assert text == "<s><|system|>\nBe kind.</s>\n<|user|>\nHi</s>\n<|assistant|>\n"
    assert (directory / "tokenizer.json").stat().st_size < 300_000

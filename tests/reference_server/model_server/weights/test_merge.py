"""An adapter in peft's files, merged into its base model: by the formula, like peft, or refused by name."""

import json
import math

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from reference_server.errors import StartupError, UnsupportedError
from reference_server.model_server.weights import merge as merge_module
from reference_server.model_server.weights.adapter import UNSUPPORTED, Adapter
from reference_server.model_server.weights.merge import merge
from tests.support.models.tiny_models import save_tiny_model

RANK = 4
Q_PROJ = "model.layers.0.self_attn.q_proj"
DOWN_PROJ = "model.layers.1.mlp.down_proj"


@pytest.fixture
def base(tmp_path):
    return save_tiny_model(tmp_path / "base", "llama")


def save_adapter(directory, base, tensors=None, **settings):
    """Save an adapter of two modules of a tiny Llama, or of `tensors`. Returns each weight's change at scaling 1."""
    weights = load_file(base / "model.safetensors")
    generator = torch.Generator().manual_seed(3)
    if tensors is None:
        tensors = {}
        for module in (Q_PROJ, DOWN_PROJ):
            rows, columns = weights[f"{module}.weight"].shape
            tensors[f"{module}.lora_A"] = torch.randn(RANK, columns, generator=generator)
            tensors[f"{module}.lora_B"] = torch.randn(rows, RANK, generator=generator)
    directory.mkdir(exist_ok=True)
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": 8, "base_model_name_or_path": str(base), "bias": "none"}
    (directory / "adapter_config.json").write_text(json.dumps(config | settings))
    named = {f"base_model.model.{name}.weight": tensor for name, tensor in tensors.items()}
    save_file(named, directory / "adapter_model.safetensors")
    return {
        module: tensors[f"{module}.lora_B"] @ tensors[f"{module}.lora_A"]
        for module in (Q_PROJ, DOWN_PROJ)
        if f"{module}.lora_B" in tensors
    }


@pytest.mark.parametrize(("use_rslora", "scaling"), [(False, 8 / RANK), (True, 8 / math.sqrt(RANK))])
def test_the_changed_weights_gain_the_product_and_the_others_stay(tmp_path, base, use_rslora, scaling):
    gains = save_adapter(tmp_path / "adapter", base, use_rslora=use_rslora)

    merge(Adapter.open(tmp_path / "adapter"), base, tmp_path / "merged")

    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("base", "merged"))
    assert before.keys() == after.keys()
    for name, weight in before.items():
        gain = gains.get(name.removesuffix(".weight"))
        assert torch.equal(after[name], weight if gain is None else weight + gain * scaling)


def test_the_merged_model_has_the_base_models_config_and_tokenizer(tmp_path, base):
    save_adapter(tmp_path / "adapter", base)

    merge(Adapter.open(tmp_path / "adapter"), base, tmp_path / "merged")

    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / "merged" / name).read_bytes() == (base / name).read_bytes()
    modes = {path.stat().st_mode for path in (tmp_path / "merged").iterdir()}
    assert len(modes) == 1
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_a_model_in_several_files_is_indexed(tmp_path, base, monkeypatch):
    save_adapter(tmp_path / "adapter", base)
    monkeypatch.setattr(merge_module, "SHARD_SIZE", "50KB")

    merge(Adapter.open(tmp_path / "adapter"), base, tmp_path / "merged")

    index = json.loads((tmp_path / "merged" / "model.safetensors.index.json").read_text())
    files = {path.name for path in (tmp_path / "merged").glob("*.safetensors")}
    assert set(index["weight_map"].values()) == files
    assert len(files) > 1


def test_the_adapters_own_files_stay_when_it_is_merged_where_it_lies(tmp_path, base):
    save_adapter(tmp_path / "adapter", base)
    (tmp_path / "adapter" / "tokenizer_config.json").write_text('{"chat_template": "its own"}')

    merge(Adapter.open(tmp_path / "adapter"), base, tmp_path / "adapter")

    assert (tmp_path / "adapter" / "tokenizer_config.json").read_text() == '{"chat_template": "its own"}'
    assert (tmp_path / "adapter" / "config.json").is_file()
    assert (tmp_path / "adapter" / "model.safetensors").is_file()


@pytest.mark.slow
# Of peft's, which asks Transformers by an old name.
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_the_result_is_pefts_own(tmp_path, family, dtype):
    # Imported here: it takes seconds.
    import peft

    save_tiny_model(tmp_path / "float32", family)
    AutoModelForCausalLM.from_pretrained(tmp_path / "float32", dtype=dtype).save_pretrained(tmp_path / "base")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=dtype)
    targets = ["c_attn", "c_proj"] if family == "gpt2" else ["q_proj", "v_proj", "down_proj"]
    settings = peft.LoraConfig(
        r=RANK, lora_alpha=6, target_modules=targets, task_type="CAUSAL_LM", fan_in_fan_out=family == "gpt2"
    )
    adapted = peft.get_peft_model(model, settings)
    torch.manual_seed(0)
    for name, parameter in adapted.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter)
    adapted.save_pretrained(tmp_path / "adapter")

    merge(Adapter.open(tmp_path / "adapter"), tmp_path / "base", tmp_path / "merged")

    expected = adapted.merge_and_unload().state_dict()
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype="auto").state_dict()
    assert merged.keys() == expected.keys()
    assert all(torch.equal(merged[name], weight) and merged[name].dtype == dtype for name, weight in expected.items())


@pytest.mark.parametrize(
    "settings",
    [
        {"peft_type": "LOHA"},
        {"bias": "all"},
        {"init_lora_weights": "pissa"},
        *({name: {"lm_head": 2}} for name in UNSUPPORTED),
    ],
    ids=lambda settings: next(iter(settings)),
)
def test_model_server_D25_an_adapter_of_more_than_two_factors_is_refused_by_name(tmp_path, base, settings):
    save_adapter(tmp_path / "adapter", base, **settings)

    with pytest.raises(UnsupportedError, match=f"`{next(iter(settings))}`"):
        Adapter.open(tmp_path / "adapter")


@pytest.mark.parametrize(
    ("tensors", "reason"),
    [
        ({"lm_head.lora_embedding_A": torch.ones(RANK, 2)}, "is not a LoRA factor of a linear layer"),
        ({f"{Q_PROJ}.lora_A": torch.ones(RANK, 64)}, "has only one of lora_A and lora_B"),
        ({f"{Q_PROJ}.lora_A": torch.ones(2, 64), f"{Q_PROJ}.lora_B": torch.ones(64, 2)}, "but `r` is 4"),
        ({}, "holds no weights"),
    ],
)
def test_reliability_104_factors_that_are_no_pairs_are_refused(tmp_path, base, tensors, reason):
    save_adapter(tmp_path / "adapter", base, tensors)

    with pytest.raises(StartupError, match=reason):
        Adapter.open(tmp_path / "adapter")


@pytest.mark.parametrize(
    ("module", "reason"),
    [
        ("model.layers.9.mlp.down_proj", "which is no module of LlamaForCausalLM"),
        ("model.layers.0.mlp", "which is LlamaMLP of LlamaForCausalLM"),
        ("..", "which is no module"),
        (Q_PROJ, r"is \(7, 5\), the base's"),
    ],
)
def test_reliability_104_an_adapter_of_another_model_is_refused(tmp_path, base, module, reason):
    pair = {f"{module}.lora_A": torch.ones(RANK, 5), f"{module}.lora_B": torch.ones(7, RANK)}
    save_adapter(tmp_path / "adapter", base, pair)

    with pytest.raises(StartupError, match=reason):
        merge(Adapter.open(tmp_path / "adapter"), base, tmp_path / "merged")
    assert not (tmp_path / "merged").exists()


def test_a_quantized_base_is_refused(tmp_path, base):
    save_adapter(tmp_path / "adapter", base)
    config = json.loads((base / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "gptq", "bits": 4}
    (base / "config.json").write_text(json.dumps(config))

    with pytest.raises(UnsupportedError, match="is quantized, and an adapter is merged into whole weights only"):
        merge(Adapter.open(tmp_path / "adapter"), base, tmp_path / "merged")


def test_a_base_that_is_an_adapter_too_is_refused(tmp_path, base):
    save_adapter(tmp_path / "adapter", base)

    with pytest.raises(StartupError, match="is no model to merge an adapter into"):
        merge(Adapter.open(tmp_path / "adapter"), tmp_path / "adapter", tmp_path / "merged")


def test_a_base_without_some_of_its_weights_is_refused(tmp_path, base):
    save_adapter(tmp_path / "adapter", base)
    weights = load_file(base / "model.safetensors")
    del weights["model.norm.weight"]
    save_file(weights, base / "model.safetensors", {"format": "pt"})

    with pytest.raises(StartupError, match=r"has no weights for model\.norm\.weight"):
        merge(Adapter.open(tmp_path / "adapter"), base, tmp_path / "merged")


def test_a_place_that_cannot_be_written_is_named(tmp_path, base):
    save_adapter(tmp_path / "adapter", base)
    (tmp_path / "file").touch()

    with pytest.raises(StartupError, match=r"the merged model cannot be written to .*file/merged"):
        merge(Adapter.open(tmp_path / "adapter"), base, tmp_path / "file" / "merged")

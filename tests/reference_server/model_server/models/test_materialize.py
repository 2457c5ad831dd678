"""Loading weights: names and formats of checkpoints, parts of ranks, refusals."""

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from reference_server.errors import StartupError
from reference_server.model_server.distributed import RankGroup
from reference_server.model_server.memory.cache_blocks import PeakTensorBytes
from reference_server.model_server.models import loader
from reference_server.model_server.models.tensor_parallel.plans import PLANS
from reference_server.model_server.options import EngineOptions
from tests.support.models.tiny_configs import CONFIGS
from tests.support.models.tiny_models import make_tiny_model, save_tiny_model


def load(directory: Path, rank: int = 0, world_size: int = 1, **options: Any) -> Any:
    chosen = EngineOptions(str(directory), **{"dtype": "float32", **options})
    return loader.load(chosen, loader.locate(chosen), RankGroup(rank, world_size)).model


def rewritten(directory: Path, change: Any) -> Path:
    path = directory / "model.safetensors"
    weights = load_file(path)
    change(weights)
    save_file(weights, path, metadata={"format": "pt"})
    return directory


def assert_equal_weights(model: Any, expected: Any) -> None:
    state = model.state_dict()
    for name, weight in expected.state_dict().items():
        assert torch.equal(state[name], weight), name
    buffers = dict(model.named_buffers())
    for name, buffer in expected.named_buffers():
        assert torch.equal(buffers[name], buffer), name


@pytest.mark.parametrize("name", sorted({config["model_type"]: name for name, config in CONFIGS.items()}.values()))
def test_every_family_gets_its_weights_and_buffers(tmp_path: Path, name: str) -> None:
    directory = save_tiny_model(tmp_path, name)

    # Shims rename weights: tests/families compares their generated ids.
    assert_equal_weights(load(directory), make_tiny_model(name))


def test_indexed_files_and_pickles_give_the_same_weights(tmp_path: Path) -> None:
    model = make_tiny_model("mixtral")
    model.save_pretrained(tmp_path / "indexed", max_shard_size="40KB")
    save_tiny_model(tmp_path / "pickled", "mixtral")
    whole = load_file(tmp_path / "pickled" / "model.safetensors")
    torch.save(whole, tmp_path / "pickled" / "pytorch_model.bin")
    (tmp_path / "pickled" / "model.safetensors").unlink()

    assert len(list((tmp_path / "indexed").glob("*.safetensors"))) > 1
    for kind in ("indexed", "pickled"):
        assert_equal_weights(load(tmp_path / kind), model)


def test_model_server_M26_tied_weights_are_shared_under_any_name(tmp_path: Path) -> None:
    name = "llama-tied-llama3-rope"
    model = make_tiny_model(name)
    directory = save_tiny_model(tmp_path, name)

    def rename(weights: dict[str, Tensor]) -> None:
        weights["lm_head.weight"] = weights.pop("model.embed_tokens.weight")

    def both(weights: dict[str, Tensor]) -> None:
        weights["model.embed_tokens.weight"] = weights["lm_head.weight"].clone()

    for change in (None, rename, both):
        loaded = load(directory if change is None else rewritten(directory, change))
        assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
        assert_equal_weights(loaded, model)


def test_tied_weights_that_differ_are_both_kept(tmp_path: Path) -> None:
    def differ(weights: dict[str, Tensor]) -> None:
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"] + 1

    loaded = load(rewritten(save_tiny_model(tmp_path, "llama-tied-llama3-rope"), differ))

    assert torch.equal(loaded.lm_head.weight, loaded.model.embed_tokens.weight + 1)


def test_names_without_the_prefix_of_the_model_are_found(tmp_path: Path) -> None:
    def strip(weights: dict[str, Tensor]) -> None:
        for name in list(weights):
            weights[name.removeprefix("transformer.")] = weights.pop(name)

    loaded = load(rewritten(save_tiny_model(tmp_path, "gpt2"), strip))

    assert_equal_weights(loaded, make_tiny_model("gpt2"))


def test_unused_weights_are_no_error(tmp_path: Path) -> None:
    def add(weights: dict[str, Tensor]) -> None:
        weights["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(6)
        weights["model.mtp.head.weight"] = torch.ones(3)

    assert_equal_weights(load(rewritten(save_tiny_model(tmp_path, "llama"), add)), make_tiny_model("llama"))


def _without_a_norm(weights: dict[str, Tensor]) -> None:
    del weights["model.norm.weight"]


def _with_a_bias(weights: dict[str, Tensor]) -> None:
    weights["model.layers.1.self_attn.q_proj.bias"] = torch.ones(48)


def _of_another_shape(weights: dict[str, Tensor]) -> None:
    weights["model.norm.weight"] = torch.ones(47)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (_without_a_norm, r"do not fit LlamaForCausalLM: missing: model\.norm\.weight"),
        (_with_a_bias, r"unexpected: model\.layers\.1\.self_attn\.q_proj\.bias"),
        (_of_another_shape, r"model\.norm\.weight has shape \(47,\), but the model's config requires \(48,\)"),
    ],
)
def test_weights_that_do_not_fit_are_named(tmp_path: Path, change: Any, reason: str) -> None:
    directory = rewritten(save_tiny_model(tmp_path, "llama"), change)

    with pytest.raises(StartupError, match=reason):
        load(directory)


def test_weights_have_the_configured_dtype_except_those_kept_in_float32(tmp_path: Path) -> None:
    model = load(save_tiny_model(tmp_path, "deepseek-v3"), dtype="bfloat16")

    kept = {name for name, weight in model.state_dict().items() if weight.dtype == torch.float32}
    assert kept == {"model.layers.1.mlp.gate.e_score_correction_bias"}
    assert model.model.rotary_emb.inv_freq.dtype == torch.float32


@pytest.mark.parametrize("name", ["llama-tied-llama3-rope", "mixtral", "gpt2", "phi3"])
def test_dummy_weights_are_equal_on_every_sharding(tmp_path: Path, name: str) -> None:
    directory = save_tiny_model(tmp_path, name)
    # Saved dummy weights of one rank are loaded by two.
    dummy = load(directory, load_format="dummy")
    dummy.save_pretrained(directory)

    for rank in (0, 1):
        drawn, read = load(directory, rank, 2, load_format="dummy"), load(directory, rank, 2)
        assert_equal_weights(drawn, read)


class OwnTensorBytes(PeakTensorBytes):  # type: ignore[no-untyped-call]
    """Ignores tensors without memory, and mapped files, whose pages the kernel can drop."""

    def _add(self, storage: torch.UntypedStorage) -> None:
        if storage.filename is None and storage.device.type != "meta":
            super()._add(storage)


_LARGE = {"num_hidden_layers": 8, "vocab_size": 8000, "num_key_value_heads": 4}


@pytest.mark.parametrize("load_format", ["auto", pytest.param("dummy", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        pytest.param("llama", {"hidden_size": 512, "intermediate_size": 2048, **_LARGE}, marks=pytest.mark.slow),
        ("mixtral", {"hidden_size": 256, "intermediate_size": 1024, **_LARGE}),
    ],
)
def test_a_rank_never_holds_weights_of_another_rank(
    tmp_path: Path, name: str, sizes: dict[str, int], load_format: str
) -> None:
    model = make_tiny_model(name, **sizes)
    whole = sum(weight.nbytes for weight in model.parameters())
    largest = max(weight.nbytes for weight in model.parameters())
    model.save_pretrained(tmp_path)
    del model
    gc.collect()

    with torch.no_grad(), OwnTensorBytes() as tensors:
        share = load(tmp_path, 1, 4, load_format=load_format)

    own = sum(weight.nbytes for weight in share.parameters())
    assert whole > 80e6
    assert own < whole / 4 * 1.05
    # Temporary: a copy of one weight, or the rows that are drawn at a time.
    assert tensors.peak < own + max(largest, 2 * 16 * 2**20)
    assert tensors.peak < whole / 2


def test_every_plan_belongs_to_a_tested_family() -> None:
    with_images = {"qwen2_vl_text", "qwen2_5_vl_text"}
    assert set(PLANS) - with_images <= {config["model_type"] for config in CONFIGS.values()}

"""Quantized checkpoints of every format: logits equal those of the dequantized weights, in few bits."""

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from reference_server.errors import StartupError, UnsupportedError
from reference_server.messages import Batch, ChooserParameters, Request, StoppingParameters, WarmupRequest
from reference_server.model_server.calls.local_shard import LocalShard
from reference_server.model_server.cpu_kernels import build
from reference_server.model_server.distributed import RankGroup
from reference_server.model_server.models import loader
from reference_server.model_server.options import EngineOptions
from reference_server.model_server.quantization.integers import can_compile, float_products, instructions
from reference_server.model_server.quantization.linear import QuantizedLinear
from tests.support.models.checkpoints.quantized_checkpoints import METHODS, save_quantized
from tests.support.models.rank_process import run_load
from tests.support.models.tiny_models import random_prompt, save_tiny_model, save_word_tokenizer

# Sizes that torch's packed int4 product supports.
SIZES = {"hidden_size": 64, "intermediate_size": 128}
IDS = torch.tensor([random_prompt(40)])
# Bits of a weight, with a scale of two or four bytes and a zero of one for each group of 32.
MOST_BITS = {
    "gptq-8-bit": 9.5,
    "gptq-2-bit": 3.5,
    "gptq-act-order": 7.5,
    # The compiled kernel has four more bytes for each output, here of 64 inputs.
    "ct-int8-group": 9.1,
    # 4.5 bits on average, and eight bytes per input for its order.
    "exl2": 6.3,
    "fp8": 8.5,
    "fp8-output": 8.8,
    # The compiled product has a scale for each output and block of inputs, and these blocks are small.
    "fp8-block": 9.2,
}
LINEAR_WEIGHTS = 2 * (64 * 64 * 2 + 64 * 32 * 2 + 3 * 64 * 128)


def load(directory: Path, rank: int = 0, world_size: int = 1, **options: Any) -> loader.LoadedModel:
    """In float32 with products of float inputs, for exact results on every processor."""
    chosen = EngineOptions(str(directory), tier="padded" if world_size == 1 else None, **options)
    with float_products() if options.get("dtype") == "float32" else nullcontext():
        return loader.load(chosen, loader.locate(chosen), RankGroup(rank, world_size))


@torch.no_grad()
def distance(loaded: loader.LoadedModel, expected: Any) -> float:
    """Relative error of the logits."""
    loaded.model.set_attn_implementation("eager")
    found = loaded.model(IDS, use_cache=False).logits.float()
    wanted = expected(IDS, use_cache=False).logits
    return ((found - wanted).norm() / wanted.norm()).item()


def layer_linears(loaded: loader.LoadedModel) -> list[QuantizedLinear]:
    """The quantized linears without the head."""
    head = loaded.model.get_output_embeddings()
    return [each for each in loaded.model.modules() if isinstance(each, QuantizedLinear) and each is not head]


@pytest.mark.parametrize("method", METHODS)
def test_a_quantized_checkpoint_is_recognised_and_stays_in_its_bits(tmp_path: Path, method: str) -> None:
    directory, dequantized = save_quantized(tmp_path, "llama", method, **SIZES)

    exact, fast = load(directory, dtype="float32"), load(directory, dtype="bfloat16")

    assert exact.quantization is not None
    assert exact.quantization.scheme.name == {"ct": "compressed-tensors"}.get(name := method.split("-")[0], name)
    assert distance(exact, dequantized) < 1e-5
    assert distance(fast, dequantized) < 0.04
    assert sum(linear.nbytes for linear in layer_linears(fast)) * 8 / LINEAR_WEIGHTS < MOST_BITS.get(
        method, 8.8 if "8" in method else 5.5
    )


def test_four_and_eight_bits_use_the_fastest_product_of_the_processor(tmp_path: Path) -> None:
    is_compiled = can_compile(torch.bfloat16, torch.device("cpu"))
    for method in ("gptq", "gptq-act-order", "awq", "ct-int4", "ct-int8", "ct-int8-group"):
        directory, _ = save_quantized(tmp_path / method, "llama", method, **SIZES)
        bits = 8 if "int8" in method else 4
        plain = {"ct-int8": "int8pack", "ct-int8-group": "dequantize"}.get(method, "int4pack")

        fast = load(directory, dtype="bfloat16").kernels
        with float_products():
            forced = load(directory, dtype="bfloat16").kernels

        # The head has eight bits.
        assert fast == (sorted({f"int{each}-{instructions()}" for each in (bits, 8)}) if is_compiled else [plain])
        assert forced == [plain]
        assert load(directory, dtype="float32").kernels == ["dequantize"]


SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in ("phi3", "bloom", "opt", "gemma2", "qwen3")]


# Short: fused layers, transposed weights, experts, FalconLinear. `test_sharded.py` has packed projections.
@pytest.mark.parametrize("name", ["llama", "gpt2", "mixtral", "falcon", *SLOW])
async def test_a_family_generates_the_same_from_gptq_as_from_the_dequantized_weights(tmp_path: Path, name: str) -> None:
    changes = {"n_embd": 64} if name == "gpt2" else {} if name == "falcon" else {"hidden_size": 64}
    directory, dequantized = save_quantized(tmp_path / "quantized", name, "gptq", **changes)
    dequantized.save_pretrained(tmp_path / "plain")
    save_word_tokenizer(tmp_path / "plain")

    quantized, plain = [await run_load(each, 0, 1) for each in (directory, tmp_path / "plain")]

    assert quantized["outcomes"] == plain["outcomes"]
    assert quantized["bytes"] < plain["bytes"]
    assert quantized["kernels"] == f"{plain['kernels']},dequantize"


def test_biases_of_zeros_that_a_tool_added_are_ignored(tmp_path: Path) -> None:
    directory, dequantized = save_quantized(tmp_path, "llama", "gptq", **SIZES)
    weights = load_file(directory / "model.safetensors")
    weights["model.layers.0.mlp.up_proj.bias"] = torch.zeros(128)
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})

    assert distance(load(directory, dtype="float32"), dequantized) < 1e-5

    weights["model.layers.0.mlp.up_proj.bias"][3] = 1.0
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(StartupError, match=r"unexpected: model\.layers\.0\.mlp\.up_proj\.bias"):
        load(directory, dtype="float32")


def test_settings_of_older_tools_are_read_from_their_own_file(tmp_path: Path) -> None:
    directory, dequantized = save_quantized(tmp_path, "llama", "gptq", **SIZES)
    config = json.loads((directory / "config.json").read_text())
    (directory / "quantize_config.json").write_text(json.dumps({"bits": 4, "group_size": 32, "desc_act": False}))
    (directory / "config.json").write_text(json.dumps({**config, "quantization_config": None}))

    loaded = load(directory, dtype="float32")

    assert loaded.quantization is not None
    assert loaded.quantization.scheme.name == "gptq"
    assert distance(loaded, dequantized) < 1e-5


def test_bits_stored_among_the_weights_override_the_config(tmp_path: Path) -> None:
    directory, dequantized = save_quantized(tmp_path, "llama", "gptq-8-bit", **SIZES)
    weights = load_file(directory / "model.safetensors")
    labels = {"gptq_bits": torch.tensor([8]), "gptq_groupsize": torch.tensor([32]), "gptq_sym": torch.tensor([False])}
    save_file({**weights, **labels}, directory / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((directory / "config.json").read_text())
    config["quantization_config"]["bits"] = 4
    (directory / "config.json").write_text(json.dumps(config))

    assert distance(load(directory, dtype="float32"), dequantized) < 1e-5


def test_exl2_cannot_be_sharded(tmp_path: Path) -> None:
    directory, _ = save_quantized(tmp_path, "llama", "exl2", **SIZES)

    with pytest.raises(UnsupportedError, match=r"exl2 weights cannot be sharded: use one shard"):
        load(directory, rank=0, world_size=2)


def test_a_weight_of_the_wrong_size_is_named(tmp_path: Path) -> None:
    directory, _ = save_quantized(tmp_path, "llama", "gptq", **SIZES)
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, "intermediate_size": 96}))

    with pytest.raises(StartupError, match=r"model\.layers\.0\.mlp\.(down|gate|up)_proj\.weight has shape \("):
        load(directory, dtype="float32")


# Limits for the trained preset:tiny-llama: bits per weight, relative error of the logits.
METHODS_ON_THE_FLY = {
    "eetq": (8.2, 0.02), "int4": (4.5, 0.15), "fp8": (8.3, 0.02), "bitsandbytes": (8.3, 0.025),
    "bitsandbytes-nf4": (4.6, 0.12), "bitsandbytes-fp4": (4.6, 0.16),
}  # fmt: skip


@pytest.mark.parametrize(
    "method",
    [pytest.param(each, marks=pytest.mark.slow if "bitsandbytes" in each else ()) for each in METHODS_ON_THE_FLY],
)
def test_model_server_M28_a_plain_checkpoint_is_quantized_as_it_is_loaded(method: str) -> None:
    preset = Path("preset:tiny-llama")
    expected, plain = load(preset, dtype="float32").model, load(preset, dtype="bfloat16")
    expected.set_attn_implementation("eager")

    loaded = load(preset, dtype="bfloat16", quantize=method)

    linears, head = layer_linears(loaded), loaded.model.get_output_embeddings()
    weights = sum(linear.in_features * linear.out_features for linear in linears)
    most_bits, most_distance = METHODS_ON_THE_FLY[method]
    assert sum(linear.nbytes for linear in linears) * 8 / weights <= most_bits
    saved = weights * (16 - most_bits) / 8
    if isinstance(head, QuantizedLinear):
        saved += plain.model.get_output_embeddings().weight.nbytes - head.nbytes
    assert loaded.weight_bytes == pytest.approx(plain.weight_bytes - saved, rel=0.03)
    assert 0.002 < distance(loaded, expected) < most_distance


@pytest.mark.skipif(not can_compile(torch.bfloat16, torch.device("cpu")), reason="there is no compiled product")
def test_the_head_has_eight_bits_beside_weights_of_the_compiled_product() -> None:
    preset = Path("preset:tiny-llama")
    rounded = load(preset, dtype="bfloat16", quantize="eetq").model
    with float_products():
        exact = load(preset, dtype="bfloat16", quantize="eetq").model
    fp8 = load(preset, dtype="bfloat16", quantize="fp8").model

    head, weight = rounded.get_output_embeddings(), exact.get_output_embeddings().weight
    step = weight.abs().amax(1, keepdim=True) / 127
    assert head.product.kernel == f"int8-{instructions()}"
    assert ((head.product.dequantize() - weight).abs() <= step + weight.abs() * 2**-8).all()
    assert rounded.get_input_embeddings().weight.dtype == torch.bfloat16
    assert [type(model.get_output_embeddings()) for model in (exact, fp8)] == [torch.nn.Linear] * 2


def test_fp8_quantizes_only_the_inner_mlps_of_a_plain_model() -> None:
    model = load(Path("preset:tiny-llama"), dtype="bfloat16", quantize="fp8").model

    quantized = [name for name, module in model.named_modules() if isinstance(module, QuantizedLinear)]

    inner = range(1, model.config.num_hidden_layers - 1)
    assert quantized == [f"model.layers.{layer}.mlp.{name}_proj" for layer in inner for name in ("gate", "up", "down")]


@pytest.mark.parametrize(
    ("name", "method"),
    [
        ("gpt2", "eetq"),
        ("gpt2", "bitsandbytes-nf4"),
        pytest.param("gpt2", "int4", marks=pytest.mark.slow),
        ("llama", "fp8"),
        ("llama", "bitsandbytes"),
        pytest.param("llama", "bitsandbytes-fp4", marks=pytest.mark.slow),
    ],
)
def test_each_rank_quantizes_its_own_part(tmp_path: Path, method: str, name: str) -> None:
    sizes = {"n_embd": 64, "n_layer": 4} if name == "gpt2" else {**SIZES, "num_hidden_layers": 4}
    directory = save_tiny_model(tmp_path, name, **sizes)
    prefix, leaves = ("transformer.h.1.mlp", ("c_fc", "c_proj")) if name == "gpt2" else (
        "model.layers.1.mlp", ("up_proj", "down_proj"),
    )  # fmt: skip

    for rank in (0, 1):
        quantized = load(directory, rank, 2, dtype="float32", quantize=method)
        plain = load(directory, rank, 2, dtype="float32")

        for leaf in leaves:
            linear = quantized.model.get_submodule(f"{prefix}.{leaf}")
            weight = plain.model.get_submodule(f"{prefix}.{leaf}").weight
            weight = weight.t() if name == "gpt2" else weight
            error = (linear.product.dequantize() - weight).norm() / weight.norm()
            assert error < (0.15 if "4" in method else 0.03)


FP8 = "walk,fp8-bf16" if hasattr(build.kernels(), "float8_linear") else "dequantize"
INT8 = f"walk,int8-{instructions()}" if can_compile(torch.bfloat16, torch.device("cpu")) else "int8pack"


@pytest.mark.parametrize(("method", "kernel"), [("eetq", INT8), ("fp8", FP8)])
async def test_a_shard_reports_its_quantization_and_kernels(method: str, kernel: str) -> None:
    options = EngineOptions("preset:tiny-llama", dtype="bfloat16", quantize=method, cpu_memory_gib=0.1)
    shard = LocalShard.load(options)

    request = Request(0, ("a story",), 16, ChooserParameters(), StoppingParameters(1))
    reply = await shard.warmup(WarmupRequest(Batch(0, (request,)), 64))

    assert reply.backends["quantize"] == method
    assert reply.backends["kernels"] == f"fused,{kernel}"
    shard.close()

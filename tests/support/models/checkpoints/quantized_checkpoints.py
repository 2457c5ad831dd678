"""Quantized checkpoints of tiny models, written independently of the product, and the dequantized models."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

from tests.support.models.tiny_models import make_tiny_model, save_word_tokenizer

Tensors = dict[str, Tensor]
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
GROUP = 32


def save_quantized(directory: Path, name: str, method: str, **changes: Any) -> tuple[Path, PreTrainedModel]:
    """Write `CONFIGS[name]` with quantized linears; returns the directory and the model with dequantized weights."""
    model = make_tiny_model(name, **changes)
    write, settings = METHODS[method]
    quantized: Tensors = {}
    for path, module in model.named_modules():
        is_conv = type(module).__name__ == "Conv1D"
        if (isinstance(module, torch.nn.Linear) or is_conv) and module is not model.get_output_embeddings():
            weight = module.weight.detach().t() if is_conv else module.weight.detach()
            tensors, dequantized = write(weight.contiguous())
            module.weight.data.copy_(dequantized.t() if is_conv else dequantized)
            quantized |= {f"{path}.{leaf}": tensor for leaf, tensor in tensors.items()}
    model.save_pretrained(directory)
    plain = load_file(directory / "model.safetensors")
    replaced = {name.rpartition(".")[0] + ".weight" for name in quantized}
    kept = {name: tensor for name, tensor in plain.items() if name not in replaced or name in quantized}
    save_file({**kept, **quantized}, directory / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, "quantization_config": settings}))
    save_word_tokenizer(directory)
    return directory, model


def rounded(weight: Tensor, bits: int, group_of: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Codes [outputs, inputs], scales and zeros [outputs, groups], dequantized weight; scales are float16 values."""
    groups = int(group_of.max()) + 1
    scales, zeros = torch.empty(len(weight), groups), torch.empty(len(weight), groups)
    codes, dequantized = torch.empty(weight.shape, dtype=torch.int64), torch.empty_like(weight)
    top = (1 << bits) - 1
    for group in range(groups):
        columns = group_of == group
        part = weight[:, columns]
        low, high = part.amin(1).clamp(max=0), part.amax(1).clamp(min=0)
        scale = ((high - low) / top).half().float()
        zero = (-low / scale).round().clamp(1, top)
        codes[:, columns] = (part / scale[:, None] + zero[:, None]).round().clamp(0, top).long()
        dequantized[:, columns] = (codes[:, columns] - zero[:, None]) * scale[:, None]
        scales[:, group], zeros[:, group] = scale, zero
    return codes, scales, zeros, dequantized


def packed(codes: Tensor, bits: int) -> Tensor:
    """Rows of integers as 32-bit words, lowest bits first."""
    per_word = 32 // bits
    words = [
        [sum(int(code) << (bits * place) for place, code in enumerate(row[first : first + per_word]))
         for first in range(0, len(row), per_word)]
        for row in codes.tolist()
    ]  # fmt: skip
    return torch.from_numpy(np.array(words, dtype=np.uint32).view(np.int32))


def gptq(bits: int = 4, act_order: bool = False, offset: int = 1) -> Callable[[Tensor], tuple[Tensors, Tensor]]:
    def write(weight: Tensor) -> tuple[Tensors, Tensor]:
        group_of = torch.arange(weight.shape[1]) // GROUP
        if act_order:
            group_of = group_of[torch.randperm(len(group_of), generator=torch.Generator().manual_seed(5))]
        codes, scales, zeros, dequantized = rounded(weight, bits, group_of)
        tensors = {
            "qweight": packed(codes, bits).t().contiguous(),
            "qzeros": packed(zeros.long().t() - offset, bits),
            "scales": scales.t().half().contiguous(),
            "g_idx": group_of.int(),
        }
        return tensors, dequantized

    return write


def awq(weight: Tensor) -> tuple[Tensors, Tensor]:
    codes, scales, zeros, dequantized = rounded(weight, 4, torch.arange(weight.shape[1]) // GROUP)

    def words(values: Tensor) -> Tensor:
        return packed(values.long().unflatten(1, (-1, 8))[..., AWQ_ORDER].flatten(1), 4)

    return {
        "qweight": words(codes.t()),
        "qzeros": words(zeros.t()),
        "scales": scales.t().half().contiguous(),
    }, dequantized


def exl2(weight: Tensor) -> tuple[Tensors, Tensor]:
    """Groups of 32 inputs of every number of bits, the inputs shuffled."""
    inputs = weight.shape[1]
    order = torch.randperm(inputs, generator=torch.Generator().manual_seed(6))
    bits = sorted(((6, 3, 4, 5, 2, 8)[group % 6] for group in range(inputs // GROUP)), reverse=True)
    words, groups, steps, largest = [], [], [], []
    dequantized = torch.empty_like(weight)
    for group, width in enumerate(bits):
        columns = order[group * GROUP : (group + 1) * GROUP]
        part, top = weight[:, columns], 1 << (width - 1)
        needed = part.abs().amax(1) / top
        most = needed.max().half()
        step = (needed / most.float() * 256).sqrt().ceil().clamp(1, 16)
        scale = step**2 * most.float() / 256
        codes = (part / scale[:, None] + top).round().clamp(0, 2 * top - 1).long()
        dequantized[:, columns] = (codes - top) * scale[:, None]
        groups += [width, sum(map(len, words))]
        # The integers of an output form one long number, which is cut into words.
        streams = [sum(int(code) << (width * place) for place, code in enumerate(row)) for row in codes.tolist()]
        cut = [[stream >> (32 * word) & 0xFFFFFFFF for stream in streams] for word in range(width * GROUP // 32)]
        words.append(torch.from_numpy(np.array(cut, dtype=np.uint32).view(np.int32)))
        steps.append(step.long() - 1)
        largest.append(most)
    tensors = {
        "q_weight": torch.cat(words),
        "q_scale": packed(torch.stack(steps), 4),
        "q_scale_max": torch.stack(largest),
        "q_groups": torch.tensor(groups, dtype=torch.int16),
        "q_invperm": order.argsort().short(),
    }
    return tensors, dequantized


def float8(per: str) -> Callable[[Tensor], tuple[Tensors, Tensor]]:
    def write(weight: Tensor) -> tuple[Tensors, Tensor]:
        if per == "block":
            blocks = weight.unflatten(0, (-1, GROUP)).unflatten(2, (-1, GROUP))
            scale = blocks.abs().amax((1, 3)) / 448
            spread = scale.repeat_interleave(GROUP, 0).repeat_interleave(GROUP, 1)
        elif per == "output":
            scale = spread = weight.abs().amax(1, keepdim=True) / 448
        else:
            scale = spread = weight.abs().max().reshape(1) / 448
        values = (weight / spread).to(torch.float8_e4m3fn)
        name = "weight_scale_inv" if per == "block" else "weight_scale"
        return {"weight": values, name: scale}, values.float() * spread

    return write


def compressed_tensors(**weights: Any) -> Callable[[Tensor], tuple[Tensors, Tensor]]:
    """Compress with the library itself."""

    def write(weight: Tensor) -> tuple[Tensors, Tensor]:
        from compressed_tensors.compressors import BaseCompressor
        from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
        from compressed_tensors.quantization.utils import calculate_qparams

        scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**weights))
        grouped = weight.unflatten(1, (-1, weights.get("group_size") or weight.shape[1]))
        scale, zero = calculate_qparams(grouped.amin(2), grouped.amax(2), scheme.weights)
        state = {"weight": weight, "weight_scale": scale, "weight_zero_point": zero}
        form = "pack-quantized" if "group_size" in weights else "naive-quantized"
        compressor: Any = BaseCompressor.get_value_from_registry(form)
        stored = compressor.compress(state, scheme)
        return dict(stored), compressor.decompress(stored, scheme)["weight"]

    return write


def _compressed_settings(form: str, bits: int, kind: str) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": {"num_bits": bits, "type": kind}}
    return {
        "quant_method": "compressed-tensors", "format": form, "quantization_status": "compressed",
        "config_groups": {"group_0": group}, "ignore": ["lm_head"],
    }  # fmt: skip


def _gptq_settings(bits: int = 4, **more: Any) -> dict[str, Any]:
    return {"quant_method": "gptq", "bits": bits, "group_size": GROUP, "sym": False, **more}


METHODS: dict[str, tuple[Callable[[Tensor], tuple[Tensors, Tensor]], dict[str, Any]]] = {
    "gptq": (gptq(), _gptq_settings()),
    "gptq-act-order": (gptq(act_order=True), _gptq_settings(desc_act=True)),
    "gptq-8-bit": (gptq(bits=8), _gptq_settings(bits=8)),
    "gptq-2-bit": (gptq(bits=2), _gptq_settings(bits=2)),
    "gptq-v2": (gptq(offset=0), _gptq_settings(checkpoint_format="gptq_v2")),
    "awq": (awq, {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm", "zero_point": True}),
    "exl2": (exl2, {"quant_method": "exl2", "version": "0.0.13", "bits": 6.0}),
    "fp8": (float8("tensor"), {"quant_method": "fp8"}),
    "fp8-output": (float8("output"), {"quant_method": "fbgemm_fp8"}),
    "fp8-block": (float8("block"), {"quant_method": "fp8", "weight_block_size": [GROUP, GROUP]}),
    "ct-int4": (
        compressed_tensors(num_bits=4, strategy="group", group_size=GROUP, symmetric=True),
        _compressed_settings("pack-quantized", 4, "int"),
    ),
    "ct-int4-zeros": (
        compressed_tensors(num_bits=4, strategy="group", group_size=GROUP, symmetric=False),
        _compressed_settings("pack-quantized", 4, "int"),
    ),
    "ct-int8-group": (
        compressed_tensors(num_bits=8, strategy="group", group_size=GROUP, symmetric=True),
        _compressed_settings("pack-quantized", 8, "int"),
    ),
    "ct-int8": (
        compressed_tensors(num_bits=8, strategy="channel", symmetric=True),
        _compressed_settings("int-quantized", 8, "int"),
    ),
    "ct-float8": (
        compressed_tensors(num_bits=8, type="float", strategy="channel", symmetric=True),
        _compressed_settings("float-quantized", 8, "float"),
    ),
}

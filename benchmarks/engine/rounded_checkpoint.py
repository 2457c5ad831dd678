"""Write a checkpoint with linears rounded to nearest in four bits, in the format of a quantization method."""

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from reference_server.model_server.distributed import RankGroup
from reference_server.model_server.models import loader
from reference_server.model_server.models.quantizer import quantizable
from reference_server.model_server.options import EngineOptions
from reference_server.model_server.quantization import int4
from reference_server.model_server.quantization.schemes import Quantization, find

GROUP = 32
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)

_GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "sym": True, "desc_act": False}
SETTINGS: dict[str, dict[str, Any]] = {
    "gptq": _GPTQ,
    "marlin": _GPTQ,
    "awq": {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm", "zero_point": True},
    "compressed-tensors": {
        "quant_method": "compressed-tensors", "format": "pack-quantized", "quantization_status": "compressed",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": {"num_bits": 4, "type": "int"}}},
    },
    "exl2": {"quant_method": "exl2", "bits": 4.0},
}  # fmt: skip
"""`quantization_config` of each supported method."""


def save_rounded(model_id: str, method: str, directory: Path) -> Path:
    """Write the checkpoint with its tokenizer; `method` is one of SETTINGS."""
    options = EngineOptions(model_id, dtype="float32", tier="padded")
    files = loader.locate(options)
    directory.mkdir()
    for source in {files.directory, files.tokenizer_directory}:
        for path in source.glob("*.json"):
            shutil.copy(path, directory)
    (directory / "model.safetensors.index.json").unlink(missing_ok=True)
    model = loader.load(options, files, RankGroup(0, 1)).model
    # Safetensors cannot store shared tensors: a tied head is omitted.
    tied = model.config.tie_word_embeddings
    tensors = {
        name: tensor.contiguous()
        for name, tensor in model.state_dict().items()
        if not (tied and name == "lm_head.weight")
    }
    for name in quantizable(model, Quantization(find("eetq"), None)):
        prefix = name.removesuffix(".weight")
        tensors |= {f"{prefix}.{leaf}": part for leaf, part in stored(method, tensors.pop(name)).items()}
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": SETTINGS[method]}))
    return directory


def stored(method: str, weight: Tensor) -> dict[str, Tensor]:
    """Round a weight [outputs, inputs] to four bits, symmetric, in groups of 32 inputs; returns its tensors."""
    groups = weight.view(len(weight), -1, GROUP)
    scales = (groups.abs().amax(2) / 7).clamp(min=1e-8).half()
    codes = (groups / scales.float()[..., None]).round().clamp(-8, 7).add(8).to(torch.uint8).flatten(1)
    zeros = torch.full(scales.shape, 8, dtype=torch.uint8)
    if method == "compressed-tensors":
        shape = torch.tensor(weight.shape)
        return {"weight_packed": int4.pack(codes, 4, 1), "weight_scale": scales, "weight_shape": shape}
    if method == "exl2":
        return mixed_bits(groups)
    by_input = scales.t().contiguous()
    if method == "awq":
        parts = {name: part.t().reshape(part.shape[1], -1, 8)[..., AWQ_ORDER].flatten(1)
                 for name, part in (("qweight", codes), ("qzeros", zeros))}  # fmt: skip
        return {name: int4.pack(part, 4, 1) for name, part in parts.items()} | {"scales": by_input}
    return {
        "qweight": int4.pack(codes.t().contiguous(), 4, 0),
        "qzeros": int4.pack(zeros.t() - 1, 4, 1),
        "scales": by_input,
        "g_idx": (torch.arange(weight.shape[1]) // GROUP).int(),
    }


def mixed_bits(groups: Tensor) -> dict[str, Tensor]:
    """EXL2 tensors with four bits in every group; `scale = step^2 * largest / 256`.

    groups: [outputs, groups, GROUP].
    """
    needed = groups.abs().amax(2).clamp(min=1e-8) / 8
    largest = needed.amax(0).half()
    steps = (needed / largest.float() * 256).sqrt().ceil().clamp(1, 16)
    scales = steps**2 * largest.float() / 256
    codes = (groups / scales[..., None]).round().clamp(-8, 7).add(8).to(torch.uint8).flatten(1)
    words_each = GROUP * 4 // int4.WORD_BITS
    return {
        "q_weight": int4.pack(codes.t().contiguous(), 4, 0),
        "q_scale": int4.pack(steps.t().to(torch.uint8) - 1, 4, 1),
        "q_scale_max": largest,
        "q_groups": torch.tensor([[4, group * words_each] for group in range(groups.shape[1])]).flatten().short(),
        "q_invperm": torch.arange(codes.shape[1]).short(),
    }

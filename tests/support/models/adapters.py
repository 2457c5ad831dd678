"""LoRA adapters of tiny models in peft's files, and the models with these adapters merged into their weights."""

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from reference_server.model_server.models.adapters.linears import shapes_of


def save_adapter(
    directory: Path,
    model: PreTrainedModel,
    rank: int,
    seed: int = 0,
    targets: Callable[[str], bool] = lambda _: True,
    **settings: Any,
) -> Path:
    """Write a random adapter over the model's linears whose names `targets` takes."""
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    names = [name for name in shapes_of(model) if targets(name)]
    for name in names:
        outputs, inputs, _ = shapes_of(model)[name]
        prefix = f"base_model.model.{name}.lora_"
        weights[f"{prefix}A.weight"] = torch.randn(rank, inputs, generator=generator) * inputs**-0.5
        weights[f"{prefix}B.weight"] = torch.randn(outputs, rank, generator=generator) * 0.5 * rank**-0.5
    directory.mkdir(parents=True, exist_ok=True)
    save_file(weights, directory / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "base_model_name_or_path": "tests/tiny",
        "r": rank,
        "lora_alpha": 2 * rank,
        "target_modules": sorted({name.rpartition(".")[2] for name in names}),
        "bias": "none",
        **settings,
    }
    (directory / "adapter_config.json").write_text(json.dumps(config))
    return directory


@torch.no_grad()
def merged(model: PreTrainedModel, directory: Path) -> PreTrainedModel:
    """A copy of the model with `scaling * B @ A` added to its weights: the definition of LoRA, written again."""
    config = json.loads((directory / "adapter_config.json").read_text())
    scaling = config["lora_alpha"] / config["r"] ** (0.5 if config.get("use_rslora") else 1.0)
    factors = load_file(directory / "adapter_model.safetensors")
    whole = copy.deepcopy(model)
    for key, a in factors.items():
        if key.endswith(".lora_A.weight"):
            name = key.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
            delta = scaling * factors[key.replace("lora_A", "lora_B")] @ a
            module = whole.get_submodule(name)
            module.weight += delta.T if type(module).__name__ == "Conv1D" else delta
    return whole

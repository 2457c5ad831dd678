"""Speculators in TGI's layouts: with random weights, or fitted to the outputs of their base model."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel

Shapes = Mapping[str, tuple[int, ...]]


def save_medusa(
    directory: Path, base: Path, *, vocab_size: int, hidden_size: int, num_heads: int = 3, num_layers: int = 1,
    version: int = 1, fitted: Mapping[str, Tensor] | None = None,
) -> Path:  # fmt: skip
    """Medusa heads; those of V2 have no output matrix. fitted: weights that replace the random ones."""
    shapes: dict[str, tuple[int, ...]] = {}
    for head in range(num_heads):
        for layer in range(num_layers):
            shapes[f"{head}.{layer}.linear.weight"] = (hidden_size, hidden_size)
            shapes[f"{head}.{layer}.linear.bias"] = (hidden_size,)
        if version == 1:
            shapes[f"{head}.{num_layers}.weight"] = (vocab_size, hidden_size)
    config = {"base_model_name_or_path": str(base), "medusa_num_heads": num_heads, "medusa_num_layers": num_layers}
    return _save(directory, "medusa_lm_head.safetensors", config, {**_random(shapes), **(fitted or {})})


@torch.no_grad()
def save_fitted_medusa(
    directory: Path, base: Path, model: PreTrainedModel, prompts: Sequence[list[int]], outputs: Sequence[list[int]],
    num_heads: int = 3,
) -> Path:  # fmt: skip
    """Medusa V1 heads that guess exactly these outputs, from the hidden states that the model's output head reads."""
    states: list[Tensor] = []
    head: Any = model.get_output_embeddings()
    hook = head.register_forward_pre_hook(lambda _, inputs: states.append(inputs[0][0]))
    for prompt, output in zip(prompts, outputs, strict=True):
        model(torch.tensor([prompt + output]))
    hook.remove()
    vocab_size, hidden_size = head.weight.shape
    fitted: dict[str, Tensor] = {}
    for place in range(num_heads):
        known = [
            (own[len(prompt) - 1 + number], output[number + 1 + place])
            for own, prompt, output in zip(states, prompts, outputs, strict=True)
            for number in range(len(output) - 1 - place)
        ]
        targets = torch.nn.functional.one_hot(torch.tensor([id_ for _, id_ in known]), vocab_size).double()
        weight = torch.linalg.pinv(torch.stack([state for state, _ in known]).double()) @ targets
        fitted[f"{place}.0.linear.weight"] = torch.zeros(hidden_size, hidden_size)
        fitted[f"{place}.0.linear.bias"] = torch.zeros(hidden_size)
        fitted[f"{place}.1.weight"] = weight.T.float().contiguous()
    return save_medusa(
        directory, base, vocab_size=vocab_size, hidden_size=hidden_size, num_heads=num_heads, fitted=fitted
    )


def save_mlp_speculator(
    directory: Path, base: Path, *, vocab_size: int, hidden_size: int, inner_dim: int = 24, num_heads: int = 3,
    tied: bool = False, scale_input: bool = False,
) -> Path:  # fmt: skip
    """An MLP speculator; `tied` heads share all but the first projection."""
    shapes: dict[str, tuple[int, ...]] = {}
    for head in range(2 if tied else num_heads):
        shapes[f"speculator.proj.{head}.weight"] = (inner_dim, inner_dim if head else hidden_size)
    for head in range(1 if tied else num_heads):
        shapes[f"speculator.emb.{head}.weight"] = (vocab_size, inner_dim)
        shapes[f"speculator.head.{head}.weight"] = (vocab_size, inner_dim)
        shapes[f"speculator.ln.{head}.weight"] = (inner_dim,)
        shapes[f"speculator.ln.{head}.bias"] = (inner_dim,)
    config = {
        "architectures": ["MLPSpeculatorPreTrainedModel"], "model_type": "mlp_speculator", "inner_dim": inner_dim,
        "base_model_name_or_path": str(base), "emb_dim": hidden_size, "n_predict": num_heads, "vocab_size": vocab_size,
        "tie_weights": tied, "scale_input": scale_input,
    }  # fmt: skip
    return _save(directory, "model.safetensors", config, _random(shapes))


def _random(shapes: Shapes) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(5)
    return {name: 0.3 * torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def _save(directory: Path, name: str, config: Mapping[str, object], weights: dict[str, Tensor]) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    save_file(weights, directory / name)
    return directory

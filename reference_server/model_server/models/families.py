"""The model families that are served: how each runs, what it needs, and what is refused by name."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from torch import nn

from reference_server.errors import UnsupportedError
from reference_server.model_server.models.shims import bloom


@dataclass(frozen=True, slots=True)
class ModelFamily:
    """One architecture of Transformers and how it reaches the paged attention.

    tier: which forward runs it.
    shim: replaces inline attention modules, for a class that does not offer Transformers' attention interface.
    shardable: whether a tensor-parallel plan exists for it.
    """

    name: str
    model_type: str
    tier: Literal["ragged", "padded", "encoder_decoder", "recurrent"] = "ragged"
    shim: Callable[[nn.Module], None] | None = None
    shardable: bool = False


FAMILIES = (
    ModelFamily("Llama", "llama", shardable=True),
    ModelFamily("Mistral", "mistral", shardable=True),
    ModelFamily("Qwen2", "qwen2", shardable=True),
    ModelFamily("GPT-2", "gpt2"),
    ModelFamily("GPT-NeoX", "gpt_neox", shardable=True),
    ModelFamily("BLOOM", "bloom", shim=bloom.install),
)


def find_family(config: dict[str, Any]) -> ModelFamily:
    """The family of a raw `config.json`; what is not served is refused by name."""
    model_type = config.get("model_type")
    if model_type is None and "ssm_cfg" not in config:
        raise UnsupportedError("config.json has no `model_type`, so the architecture is not known")
    for family in FAMILIES:
        if family.model_type == model_type:
            return family
    served = ", ".join(f"{family.name} ({family.model_type})" for family in FAMILIES)
    raise UnsupportedError(f"Unsupported model type {model_type or 'mamba'}; served are {served}")

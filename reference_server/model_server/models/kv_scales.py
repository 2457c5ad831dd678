"""Scales of an eight-bit K/V cache in a checkpoint, in the layouts that TGI reads.

P.k_scale, P.v_scale     one number each; P is an attention module
P.kv_scale               an older layout: one number for both, used if the two above are not there
"""

import math
from collections.abc import Iterable
from typing import Protocol

from torch import Tensor

from reference_server.errors import StartupError
from reference_server.model_server.memory.kv_cache import KVScales

LEAVES = ("k_scale", "v_scale", "kv_scale")


class ReadableWeights(Protocol):
    """The part of a checkpoint that is read here."""

    shapes: dict[str, tuple[int, ...]]

    def read(self, name: str) -> Tensor: ...


def is_scale(name: str) -> bool:
    """Whether a weight that the model lacks is a scale of the K/V cache."""
    return name.rpartition(".")[2] in LEAVES


def read_scales(checkpoint: ReadableWeights, modules: Iterable[str], base_prefix: str) -> dict[str, KVScales]:
    """The scales in the checkpoint of the model's attention modules, by the module's name.

    base_prefix: missing in the names of a base model's checkpoint. Raises StartupError for a scale that is not a
    positive number.
    """
    found = {}
    for module in modules:
        for name in (module, module.removeprefix(f"{base_prefix}.")):
            if (scales := _scales_of(checkpoint, name)) is not None:
                found[module] = scales
                break
    return found


def _scales_of(checkpoint: ReadableWeights, module: str) -> KVScales | None:
    key, value, both = (f"{module}.{leaf}" for leaf in LEAVES)
    if key in checkpoint.shapes and value in checkpoint.shapes:
        return KVScales(_number(checkpoint, key), _number(checkpoint, value))
    if both in checkpoint.shapes:
        scale = _number(checkpoint, both)
        return KVScales(scale, scale)
    return None


def _number(checkpoint: ReadableWeights, name: str) -> float:
    tensor = checkpoint.read(name)
    if tensor.numel() != 1:
        raise StartupError(f"weight {name} has shape {tuple(tensor.shape)}, but a scale of the K/V cache is one number")
    scale = float(tensor.float())
    if not (math.isfinite(scale) and scale > 0):
        raise StartupError(f"weight {name} is {scale}, but a scale of the K/V cache is a positive number")
    return scale

"""Connects a Transformers model to our attention: one registered function, a probe, a paged layer per module.

An attention module first has a `ProbeLayer`, which records K/V geometry and options in a two-token forward, then the
`PagedLayer` of its place in the cache. A probe is right also under tensor parallelism, grouped heads and nested
configs.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface

from reference_server.errors import UnsupportedError
from reference_server.model_server.attention.kernel import AttentionNeeds, AttentionOptions
from reference_server.model_server.attention.paged import PagedLayer
from reference_server.model_server.attention.select import AttentionChoice
from reference_server.model_server.memory.kv_cache import LayerShape
from reference_server.model_server.step_state import StepState

ATTENTION_NAME = "paged_kv"


@dataclass(frozen=True, slots=True)
class ProbedLayer:
    """The record of one attention module in the probe."""

    module: nn.Module
    shape: LayerShape
    options: AttentionOptions


class ProbeLayer:
    """Takes the place of the paged layer during the probe."""

    def __init__(self, module: nn.Module, probed: list[ProbedLayer]) -> None:
        self._module = module
        self._probed = probed

    def record(self, query: Tensor, key_value: Tensor, options: AttentionOptions) -> Tensor:
        shape = LayerShape(num_kv_heads=key_value.shape[2], head_dim=key_value.shape[3])
        self._probed.append(ProbedLayer(self._module, shape, options))
        return query


class PagedAttentionModule(nn.Module):
    """Base of the shims' attention modules: `paged` calls the attached layer."""

    attached: PagedLayer | ProbeLayer

    def paged(self, query: Tensor, key_value: Tensor, options: AttentionOptions) -> Tensor:
        return _call(self.attached, query, key_value, options)


def _call(layer: PagedLayer | ProbeLayer, query: Tensor, key_value: Tensor, options: AttentionOptions) -> Tensor:
    if isinstance(layer, ProbeLayer):
        return layer.record(query, key_value, options)
    return layer(query, key_value)


def register() -> None:
    """Register our attention with Transformers. No mask is registered under its name, so none is ever built."""
    AttentionInterface.register(ATTENTION_NAME, attention_forward)


def attention_forward(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Transformers' attention signature. query: [1, num_heads, tokens, head_dim]; returns [1, tokens, heads, dim]."""
    assert attention_mask is None, "a mask was built for the paged attention"
    if others.get("s_aux") is not None:
        raise UnsupportedError(f"{type(module).__name__} has attention sinks, which no kernel offers")
    window = others["sliding_window"] if "sliding_window" in others else _window_of(module)
    options = AttentionOptions(scaling or query.shape[-1] ** -0.5, window, softcap)
    value_dim = value.shape[-1]
    if value_dim != key.shape[-1]:
        query, key, value = _padded_to_widest(query, key, value)
    key_value = torch.stack((key[0], value[0])).permute(2, 0, 1, 3)
    attended = _call(module.attached, query[0].transpose(0, 1), key_value, options)
    return attended[None, ..., :value_dim], None


def _window_of(module: Any) -> int | None:
    """The window of a layer that does not pass it: its model applies it only in the mask, which is not built here."""
    config = getattr(module, "config", None)
    # Other configs may have a `sliding_window` that their model ignores.
    if not hasattr(sys.modules[type(module).__module__], "create_sliding_window_causal_mask"):
        return None
    layer_types = getattr(config, "layer_types", None)
    if layer_types is not None and layer_types[module.layer_idx] != "sliding_attention":
        return None
    return getattr(config, "sliding_window", None) or None


def _padded_to_widest(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Pad all to the widest with zeros: latent attention has keys wider than values, the cache has one width."""
    width = max(tensor.shape[-1] for tensor in tensors)
    return tuple(F.pad(tensor, (0, width - tensor.shape[-1])) for tensor in tensors)


@torch.no_grad()
def probe(model: nn.Module) -> list[ProbedLayer]:
    """Run two tokens through the model; returns its attention layers in the order of their calls."""
    probed: list[ProbedLayer] = []
    for module in model.modules():
        if getattr(module, "layer_idx", None) is not None:
            module.attached = ProbeLayer(module, probed)  # type: ignore[assignment]
    device = next(model.parameters()).device
    tokens = torch.zeros((1, 2), dtype=torch.long, device=device)
    model(input_ids=tokens, position_ids=torch.arange(2, device=device)[None], use_cache=False)
    if not probed:
        raise UnsupportedError(f"{type(model).__name__} never called the paged attention")
    return probed


def needs_of(
    layers: Sequence[ProbedLayer], device: torch.device, dtype: torch.dtype, cache_dtype: torch.dtype | None = None
) -> AttentionNeeds:
    """The requirements of all these layers together. cache_dtype: an eight-bit type of the cache."""
    return AttentionNeeds(
        device_type=device.type,
        dtype=dtype,
        head_dims=frozenset(layer.shape.head_dim for layer in layers),
        has_window=any(layer.options.window is not None for layer in layers),
        has_softcap=any(layer.options.softcap is not None for layer in layers),
        has_alibi=any(layer.options.alibi_slopes is not None for layer in layers),
        cache_dtype=cache_dtype,
    )


def attach(layers: Sequence[ProbedLayer], state: StepState, choice: AttentionChoice) -> None:
    """Give every attention module its place in the cache."""
    for index, layer in enumerate(layers):
        layer.module.attached = PagedLayer(state, index, choice, layer.options)  # type: ignore[assignment]

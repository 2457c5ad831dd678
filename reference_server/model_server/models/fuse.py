"""Run the layers of a loaded model with fewer operators, where its structure is recognised.

A decoder is recognised by what its modules are and hold, not by its family's name: pre-norm layers, q/k/v and gate/up
projections (apart or packed), half-split rotary positions, a gated MLP, a plain output head; heads, attention and MLP
may be normed, residuals scaled. Its projections of one input become one product and its layers are walked in a straight
line (`walk.py`). Before the modules give their weights up, the first layer is run both ways; where they differ, or the
structure is another, everything keeps Transformers' modules. Decoders with a plain MLP are those of `fuse_plain.py`.
"""

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from reference_server.model_server.models import fuse_plain
from reference_server.model_server.models.fuse_plain import PlainDecoder, children, stand_in
from reference_server.model_server.models.fused_linear import can_stack, is_head, is_output, shape_of, stacked, taken
from reference_server.model_server.models.packed_linear import can_pack
from reference_server.model_server.models.walk import (
    ROPE_TYPES,
    FusedLayer,
    Heads,
    Norm,
    RotaryTable,
    Walk,
    known_norm,
    norm_of,
    operators_for,
)

logger = logging.getLogger(__name__)

Decoder = Callable[[Tensor, Tensor, Tensor | None, int], Tensor]

SEPARATE = {"q_proj", "k_proj", "v_proj", "o_proj"}
PACKED = {"qkv_proj", "o_proj"}
HEAD_NORMS = {"q_norm", "k_norm"}
LAYER = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
NORMED_DELTAS = {"pre_feedforward_layernorm", "post_feedforward_layernorm"}
MULTIPLIERS = {"residual_multiplier", "embedding_multiplier"}


class FusedDecoder:
    """The whole walk from token ids to logits, for a recognised decoder."""

    def __init__(self, model: Any) -> None:
        inner = model.model
        self._embed = inner.embed_tokens
        self._multiplier: float = getattr(inner, "embedding_multiplier", 1.0)
        embedding: Tensor = inner.embed_tokens.weight.detach()
        self._rotary = RotaryTable(inner.rotary_emb, embedding)
        heads, operators = _heads(inner.layers[0].self_attn), operators_for(embedding)
        self._walk = Walk([_fuse_layer(layer) for layer in inner.layers], heads, operators)
        self._norm = known_norm(inner.norm)
        is_tied = is_head(model.lm_head) and model.lm_head.weight.data_ptr() == embedding.data_ptr()
        self._head = taken(model.lm_head, keep=is_tied)
        self._softcap: float | None = getattr(model.config, "final_logit_softcapping", None)
        self._divisor: float = getattr(model.config, "logits_scaling", 1.0)
        self.added_bytes = embedding.nbytes if is_tied and can_pack(embedding) else 0

    def __call__(self, input_ids: Tensor, positions: Tensor, logits_index: Tensor | None, max_position: int) -> Tensor:
        hidden = self._embed(input_ids)
        if self._multiplier != 1:
            hidden = hidden * self._multiplier
        table = self._rotary.up_to(max_position)
        logits = self._head(self._walk(hidden, table, positions, logits_index, self._norm))
        if self._divisor != 1:
            logits = logits / self._divisor
        return logits if self._softcap is None else torch.tanh(logits / self._softcap) * self._softcap


def fuse(model: Any) -> FusedDecoder | PlainDecoder | None:
    """The fused walk of a model whose attention layers are attached, or None if its structure is not a known one.

    The walk takes the weights over: the modules are left without them, so that nothing is held twice.
    """
    if not _is_known_decoder(model):
        return fuse_plain.fuse(model)
    if not _first_layer_agrees(model):
        logger.warning("%s looks like a decoder that is fused, but computes something else", type(model).__name__)
        return None
    return FusedDecoder(model)


@torch.no_grad()
def _first_layer_agrees(model: Any) -> bool:
    """Whether the first layer gives in one walk what its modules give, with a stand-in for attention in both."""
    layer = model.model.layers[0]
    attached = layer.self_attn.attached
    weight = model.model.embed_tokens.weight
    hidden = torch.randn((3, weight.shape[1]), generator=torch.Generator().manual_seed(3)).to(weight)
    positions = torch.arange(3, device=weight.device)
    layer.self_attn.attached = stand_in
    try:
        angles = model.model.rotary_emb(hidden[None], positions[None])
        output = layer(hidden[None], attention_mask=None, position_embeddings=angles, position_ids=positions[None])
        expected = (output[0] if isinstance(output, tuple) else output)[0]
        fused = replace(_fuse_layer(layer, keep=True), attention=stand_in)
        table = RotaryTable(model.model.rotary_emb, weight.detach()).up_to(3)
        walk = Walk([fused], _heads(layer.self_attn), operators_for(weight))
        norm = Norm(torch.ones_like(hidden[0]), 1e-6)
        found = walk(hidden.clone(), table, positions, None, norm)
        expected = operators_for(weight).add_norm(expected.contiguous(), None, norm)
    finally:
        layer.self_attn.attached = attached
    tolerance = 1e-4 if weight.dtype == torch.float32 else 6e-2
    return torch.allclose(found, expected, rtol=tolerance, atol=tolerance)


def _is_known_decoder(model: Any) -> bool:
    """Whether every module is one that the walk reproduces."""
    if children(model) != {"model", "lm_head"}:
        return False
    inner: Any = model.model
    return (
        children(inner) == {"embed_tokens", "layers", "norm", "rotary_emb"}
        and isinstance(inner.embed_tokens.weight, Tensor)
        and is_head(model.lm_head)
        and norm_of(inner.norm) is not None
        and getattr(inner.rotary_emb, "rope_type", None) in ROPE_TYPES
        and not _has_other_multiplier(inner)
        and all(_is_known_layer(layer) for layer in inner.layers)
    )


def _is_known_layer(layer: Any) -> bool:
    parts = children(layer)
    if parts not in (LAYER, LAYER | NORMED_DELTAS) or _has_other_multiplier(layer):
        return False
    attention, mlp = layer.self_attn, layer.mlp
    if children(attention) - HEAD_NORMS not in (SEPARATE, PACKED):
        return False
    norms = [getattr(layer, name) for name in parts if name.endswith("norm")]
    head_norms = [getattr(attention, name) for name in HEAD_NORMS if hasattr(attention, name)]
    return (
        can_stack(_projections(attention))
        and is_output(attention.o_proj)
        and _is_known_mlp(mlp)
        and all(norm_of(norm) is not None for norm in norms + head_norms)
        # OLMo 2's are over all heads together.
        and all(len(norm.weight) == attention.head_dim and not known_norm(norm).centered for norm in head_norms)
        and len(head_norms) in (0, 2)
    )


def _is_known_mlp(mlp: Any) -> bool:
    if children(mlp) not in (
        {"gate_proj", "up_proj", "down_proj", "act_fn"},
        {"gate_up_proj", "down_proj", "activation_fn"},
    ):
        return False
    return can_stack(_gates(mlp)) and is_output(mlp.down_proj)


def _projections(attention: Any) -> list[Any]:
    if hasattr(attention, "qkv_proj"):
        return [attention.qkv_proj]
    return [attention.q_proj, attention.k_proj, attention.v_proj]


def _gates(mlp: Any) -> list[Any]:
    return [mlp.gate_up_proj] if hasattr(mlp, "gate_up_proj") else [mlp.gate_proj, mlp.up_proj]


def _has_other_multiplier(module: Any) -> bool:
    """Whether a plain number of the module's own, that the walk does not know, scales what passes through it."""
    return any(isinstance(value, float) and name not in MULTIPLIERS for name, value in vars(module).items())


def _is_silu(activation: Any) -> bool:
    sample = torch.linspace(-3.0, 3.0, 7)
    return torch.equal(activation(sample), F.silu(sample))


def _heads(attention: Any) -> Heads:
    head_dim: int = attention.head_dim
    num_heads = shape_of(attention.o_proj)[1] // head_dim
    rows = sum(shape_of(linear)[0] for linear in _projections(attention))
    return Heads(num_heads, (rows // head_dim - num_heads) // 2, head_dim)


def _fuse_layer(layer: Any, keep: bool = False) -> FusedLayer:
    """The layer's fused form; its modules lose their weights unless told to keep them."""
    attention, mlp = layer.self_attn, layer.mlp
    normed_deltas = hasattr(layer, "pre_feedforward_layernorm")
    has_head_norms = hasattr(attention, "q_norm")
    activation = mlp.act_fn if hasattr(mlp, "act_fn") else mlp.activation_fn
    return FusedLayer(
        input_norm=known_norm(layer.input_layernorm),
        qkv=taken(stacked(*_projections(attention), keep=keep), keep=keep),
        attention=attention.attached,
        output=taken(attention.o_proj, keep=keep),
        post_norm=known_norm(layer.pre_feedforward_layernorm if normed_deltas else layer.post_attention_layernorm),
        up=taken(stacked(*_gates(mlp), keep=keep), keep=keep),
        down=taken(mlp.down_proj, keep=keep),
        query_norm=known_norm(attention.q_norm) if has_head_norms else None,
        key_norm=known_norm(attention.k_norm) if has_head_norms else None,
        attended_norm=known_norm(layer.post_attention_layernorm) if normed_deltas else None,
        mlp_norm=known_norm(layer.post_feedforward_layernorm) if normed_deltas else None,
        activation=None if _is_silu(activation) else activation,
        multiplier=getattr(layer, "residual_multiplier", 1.0),
    )

"""Run the layers of a loaded model with fewer operators, where its structure is recognised.

A decoder is recognised by what its modules are and hold, not by its family's name: pre-norm layers with RMS norms,
separate q/k/v and gate/up projections, half-split rotary positions and a plain output head. Its projections of one
input are packed into one product and its layers are walked in a straight line; everything else keeps Transformers'
modules. The result is tested against those modules (tests/families).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from reference_server.model_server.attention.paged import PagedLayer

Decoder = Callable[[Tensor, Tensor, Tensor | None], Tensor]


@dataclass(frozen=True, slots=True)
class RMSNorm:
    """One root-mean-square norm as one operator."""

    weight: Tensor
    epsilon: float

    def __call__(self, hidden: Tensor) -> Tensor:
        return F.rms_norm(hidden, self.weight.shape, self.weight, self.epsilon)


@dataclass(frozen=True, slots=True)
class FusedLayer:
    """The tensors of one decoder layer, packed.

    qkv: [(num_heads + 2 * num_kv_heads) * head_dim, hidden]. gate_up: [2 * intermediate, hidden].
    output and down are kept transposed, as `addmm` reads them.
    """

    input_norm: RMSNorm
    qkv: Tensor
    qkv_bias: Tensor | None
    attention: PagedLayer
    output: Tensor
    output_bias: Tensor | None
    post_norm: RMSNorm
    gate_up: Tensor
    down: Tensor


class FusedDecoder:
    """The whole walk from token ids to logits, for a recognised decoder."""

    def __init__(self, model: Any, layers: list[FusedLayer]) -> None:
        inner = model.model
        attention = inner.layers[0].self_attn
        self._embedding: Tensor = inner.embed_tokens.weight
        self._rotary = inner.rotary_emb
        self._layers = layers
        self._norm = _norm(inner.norm)
        self._head: Tensor = model.lm_head.weight
        self._head_dim: int = attention.head_dim
        self._num_heads = attention.q_proj.out_features // self._head_dim
        self._num_kv_heads = attention.k_proj.out_features // self._head_dim

    def __call__(self, input_ids: Tensor, positions: Tensor, logits_index: Tensor | None) -> Tensor:
        tokens = input_ids.shape[0]
        heads, kv_heads, head_dim = self._num_heads, self._num_kv_heads, self._head_dim
        hidden = F.embedding(input_ids, self._embedding)
        cos, signed_sin = self._rotary_tables(hidden, positions)
        for layer in self._layers:
            qkv = F.linear(layer.input_norm(hidden), layer.qkv, layer.qkv_bias)
            qkv = qkv.view(tokens, heads + 2 * kv_heads, head_dim)
            turned = qkv[:, : heads + kv_heads]
            rotated = torch.addcmul(turned * cos, turned.roll(head_dim // 2, -1), signed_sin)
            key_value = torch.cat((rotated[:, heads:], qkv[:, heads + kv_heads :]), 1)
            attended = layer.attention(rotated[:, :heads], key_value.view(tokens, 2, kv_heads, head_dim))
            if layer.output_bias is not None:
                hidden = hidden + layer.output_bias
            hidden = torch.addmm(hidden, attended.reshape(tokens, heads * head_dim), layer.output)
            gate, up = F.linear(layer.post_norm(hidden), layer.gate_up).chunk(2, -1)
            hidden = torch.addmm(hidden, F.silu(gate).mul_(up), layer.down)
        if logits_index is not None:
            hidden = hidden.index_select(0, logits_index)
        return F.linear(self._norm(hidden), self._head)

    def _rotary_tables(self, hidden: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """[tokens, 1, head_dim] each; the sine carries the sign of the half that is turned."""
        cos, sin = self._rotary(hidden, positions[None])
        cos, sin = cos[0, :, None], sin[0, :, None]
        half = self._head_dim // 2
        return cos, torch.cat((-sin[..., :half], sin[..., half:]), -1)


def fuse(model: Any) -> FusedDecoder | None:
    """The fused walk of a model whose attention layers are attached, or None if its structure is not this one.

    Packing replaces the modules' own weights by views of the packed ones, so nothing is held twice.
    """
    if not _is_plain_decoder(model):
        return None
    return FusedDecoder(model, [_fuse_layer(layer) for layer in model.model.layers])


def _is_plain_decoder(model: Any) -> bool:
    """Whether every module is one the walk reproduces."""
    if {name for name, _ in model.named_children()} != {"model", "lm_head"}:
        return False
    inner: Any = model.model
    if {name for name, _ in inner.named_children()} != {"embed_tokens", "layers", "norm", "rotary_emb"}:
        return False
    kinds = type(inner.embed_tokens), type(model.lm_head)
    if kinds != (nn.Embedding, nn.Linear) or model.lm_head.bias is not None:
        return False
    return (
        _is_rms_norm(inner.norm)
        and inner.rotary_emb.rope_type in ("default", "linear", "llama3")
        and all(_is_plain_layer(layer) for layer in inner.layers)
    )


def _is_plain_layer(layer: Any) -> bool:
    names = {name for name, _ in layer.named_children()}
    if names != {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}:
        return False
    attention, mlp = layer.self_attn, layer.mlp
    if {name for name, _ in attention.named_children()} != {"q_proj", "k_proj", "v_proj", "o_proj"}:
        return False
    if {name for name, _ in mlp.named_children()} != {"gate_proj", "up_proj", "down_proj", "act_fn"}:
        return False
    linears = [
        *(attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj),
        *(mlp.gate_proj, mlp.up_proj, mlp.down_proj),
    ]
    return (
        all(type(linear) is nn.Linear for linear in linears)
        and all(linear.bias is None for linear in (mlp.gate_proj, mlp.up_proj, mlp.down_proj))
        and _is_silu(mlp.act_fn)
        and _is_rms_norm(layer.input_layernorm)
        and _is_rms_norm(layer.post_attention_layernorm)
    )


def _is_rms_norm(module: Any) -> bool:
    """A root-mean-square norm whose weight multiplies as it is (Gemma's adds one)."""
    if not (hasattr(module, "weight") and hasattr(module, "variance_epsilon")):
        return False
    sample = torch.linspace(-2.0, 3.0, module.weight.shape[0], dtype=module.weight.dtype)
    expected = module(sample[None])[0]
    return torch.allclose(_norm(module)(sample), expected, rtol=2e-2, atol=2e-2)


def _is_silu(module: Any) -> bool:
    sample = torch.linspace(-3.0, 3.0, 7)
    return torch.equal(module(sample), F.silu(sample))


def _norm(module: Any) -> RMSNorm:
    return RMSNorm(module.weight.detach(), module.variance_epsilon)


def _fuse_layer(layer: Any) -> FusedLayer:
    attention, mlp = layer.self_attn, layer.mlp
    qkv, qkv_bias = pack(attention.q_proj, attention.k_proj, attention.v_proj)
    gate_up, _ = pack(mlp.gate_proj, mlp.up_proj)
    return FusedLayer(
        input_norm=_norm(layer.input_layernorm),
        qkv=qkv,
        qkv_bias=qkv_bias,
        attention=attention.attached,
        output=attention.o_proj.weight.detach().t(),
        output_bias=None if attention.o_proj.bias is None else attention.o_proj.bias.detach(),
        post_norm=_norm(layer.post_attention_layernorm),
        gate_up=gate_up,
        down=mlp.down_proj.weight.detach().t(),
    )


def pack(*linears: nn.Linear) -> tuple[Tensor, Tensor | None]:
    """One weight (and bias) of all rows, of which the linears' own become views."""
    weight = torch.cat([linear.weight.detach() for linear in linears])
    bias = None
    if linears[0].bias is not None:
        bias = torch.cat([linear.bias.detach() for linear in linears])
    first = 0
    for linear in linears:
        rows = slice(first, first + linear.out_features)
        linear.weight.data = weight[rows]
        if bias is not None:
            linear.bias.data = bias[rows]
        first += linear.out_features
    return weight, bias

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
from reference_server.model_server.models.packed_linear import PackedLinear, can_pack
from reference_server.model_server.models.parallel import GatheredLinear, RowParallelLinear

Decoder = Callable[[Tensor, Tensor, Tensor | None, int], Tensor]
Linear = Callable[[Tensor], Tensor]

INITIAL_POSITIONS = 4096
"""What a rotary table holds from the start; a few megabytes at most."""


class RMSNorm:
    """A root-mean-square norm as one normalising operator.

    The row [x, -x] has mean 0 and variance mean(x^2), so its layer norm begins with the RMS norm of x. On a CPU torch
    has a kernel for the one, and eight operators for the other.
    """

    def __init__(self, weight: Tensor, epsilon: float) -> None:
        self._size = weight.shape[0]
        self._doubled_shape = (2 * self._size,)
        self._doubled_weight = torch.cat((weight, weight))
        self._epsilon = epsilon

    def __call__(self, hidden: Tensor) -> Tensor:
        """hidden: [..., size]; returns the same shape, a view."""
        doubled = torch.cat((hidden, -hidden), -1)
        normed = torch.layer_norm(doubled, self._doubled_shape, self._doubled_weight, None, self._epsilon)
        return normed[..., : self._size]


class RotaryTable:
    """Cosines and sines of every position so far, as the model's own rotary module computes them.

    It serves rope types whose values depend on the position alone; it grows by powers of two.
    """

    def __init__(self, rotary: Any, like: Tensor) -> None:
        self._rotary = rotary
        self._like = like
        self._rows: Tensor
        self._grow(INITIAL_POSITIONS)

    def __call__(self, positions: Tensor, max_position: int) -> tuple[Tensor, Tensor]:
        """[tokens, 1, head_dim] each; the sine carries the sign of the half that is turned."""
        if max_position >= len(self._rows):
            self._grow(1 << max_position.bit_length())
        cos, sin = self._rows.index_select(0, positions).chunk(2, 1)
        return cos, sin

    @torch.no_grad()
    def _grow(self, num_positions: int) -> None:
        positions = torch.arange(num_positions, device=self._like.device)[None]
        cos, sin = self._rotary(self._like, positions)
        half = cos.shape[-1] // 2
        signed_sin = torch.cat((-sin[0, :, :half], sin[0, :, half:]), -1)
        self._rows = torch.stack((cos[0], signed_sin), 1)


@dataclass(frozen=True, slots=True)
class FusedLayer:
    """One decoder layer with few operators.

    qkv gives [tokens, (num_heads + 2 * num_kv_heads) * head_dim], gate_up [tokens, 2 * intermediate]. With several
    ranks these are one rank's share, and output and down sum over the ranks.
    """

    input_norm: RMSNorm
    qkv: Linear
    attention: PagedLayer
    output: Linear
    post_norm: RMSNorm
    gate_up: Linear
    down: Linear


class FusedDecoder:
    """The whole walk from token ids to logits, for a recognised decoder."""

    def __init__(self, model: Any) -> None:
        inner = model.model
        attention = inner.layers[0].self_attn
        self._head_dim: int = attention.head_dim
        self._num_heads = attention.q_proj.out_features // self._head_dim
        self._num_kv_heads = attention.k_proj.out_features // self._head_dim
        self._embedding: Tensor = inner.embed_tokens.weight.detach()
        self._rotary = RotaryTable(inner.rotary_emb, self._embedding)
        self._layers = [_fuse_layer(layer) for layer in inner.layers]
        self._norm = _norm(inner.norm)
        is_tied = _is_linear(model.lm_head) and model.lm_head.weight.data_ptr() == self._embedding.data_ptr()
        self._head = _linear(model.lm_head, keep=is_tied)
        self.added_bytes = self._embedding.nbytes if is_tied and can_pack(self._embedding) else 0

    def __call__(self, input_ids: Tensor, positions: Tensor, logits_index: Tensor | None, max_position: int) -> Tensor:
        tokens = input_ids.shape[0]
        heads, kv_heads, head_dim = self._num_heads, self._num_kv_heads, self._head_dim
        hidden = F.embedding(input_ids, self._embedding)
        cos, signed_sin = self._rotary(positions, max_position)
        for layer in self._layers:
            qkv = layer.qkv(layer.input_norm(hidden)).view(tokens, heads + 2 * kv_heads, head_dim)
            turned = qkv[:, : heads + kv_heads]
            rotated = torch.addcmul(turned * cos, turned.roll(head_dim // 2, -1), signed_sin)
            key_value = torch.cat((rotated[:, heads:], qkv[:, heads + kv_heads :]), 1)
            attended = layer.attention(rotated[:, :heads], key_value.view(tokens, 2, kv_heads, head_dim))
            hidden = hidden + layer.output(attended.reshape(tokens, heads * head_dim))
            gate, up = layer.gate_up(layer.post_norm(hidden)).chunk(2, -1)
            hidden = hidden + layer.down(F.silu(gate).mul_(up))
        if logits_index is not None:
            hidden = hidden.index_select(0, logits_index)
        return self._head(self._norm(hidden))


def fuse(model: Any) -> FusedDecoder | None:
    """The fused walk of a model whose attention layers are attached, or None if its structure is not this one.

    The walk takes the weights over: the modules are left without them, so that nothing is held twice.
    """
    return FusedDecoder(model) if _is_plain_decoder(model) else None


def _is_plain_decoder(model: Any) -> bool:
    """Whether every module is one the walk reproduces."""
    if {name for name, _ in model.named_children()} != {"model", "lm_head"}:
        return False
    inner: Any = model.model
    if {name for name, _ in inner.named_children()} != {"embed_tokens", "layers", "norm", "rotary_emb"}:
        return False
    return (
        type(inner.embed_tokens) is nn.Embedding
        and _is_linear(model.lm_head, GatheredLinear)
        and _is_rms_norm(inner.norm)
        and inner.rotary_emb.rope_type in ("default", "linear", "llama3")
        and not _has_multiplier(inner)
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
    split = (attention.q_proj, attention.k_proj, attention.v_proj, mlp.gate_proj, mlp.up_proj)
    return (
        all(_is_linear(linear) for linear in split)
        and len({linear.bias is None for linear in split[:3]}) == 1
        and len({linear.bias is None for linear in split[3:]}) == 1
        and _is_linear(attention.o_proj, RowParallelLinear)
        and _is_linear(mlp.down_proj, RowParallelLinear)
        and _is_silu(mlp.act_fn)
        and _is_rms_norm(layer.input_layernorm)
        and _is_rms_norm(layer.post_attention_layernorm)
        and not _has_multiplier(layer)
    )


def _has_multiplier(module: Any) -> bool:
    """Whether a plain number of the module's own scales what passes through it, as in Granite's."""
    return any(isinstance(value, float) for value in vars(module).values())


def _is_linear(module: Any, sharded: type[nn.Module] = nn.Linear) -> bool:
    """A plain linear, or what takes its place on one of several ranks."""
    return type(module) in (nn.Linear, sharded)


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
    return FusedLayer(
        input_norm=_norm(layer.input_layernorm),
        qkv=_linear(stacked(attention.q_proj, attention.k_proj, attention.v_proj)),
        attention=attention.attached,
        output=_linear(attention.o_proj),
        post_norm=_norm(layer.post_attention_layernorm),
        gate_up=_linear(stacked(mlp.gate_proj, mlp.up_proj)),
        down=_linear(mlp.down_proj),
    )


def stacked(*linears: nn.Linear) -> nn.Linear:
    """One linear that gives the outputs of all, which are left without their weights."""
    whole = nn.Linear(1, 1, bias=linears[0].bias is not None, device="meta")
    whole.weight = nn.Parameter(torch.cat([linear.weight.detach() for linear in linears]), requires_grad=False)
    if whole.bias is not None:
        whole.bias = nn.Parameter(torch.cat([linear.bias.detach() for linear in linears]), requires_grad=False)
    for linear in linears:
        _empty(linear)
    return whole


def _linear(module: Any, keep: bool = False) -> Linear:
    """A linear in the form that its device multiplies fastest; the module loses its weight unless told to keep it."""
    if not _is_linear(module) or not can_pack(module.weight):
        plain: Linear = module
        return plain
    packed = PackedLinear(module.weight, module.bias)
    if not keep:
        _empty(module)
    # Not the module itself, whose call costs as much as a small product.
    return packed.forward


def _empty(module: Any) -> None:
    module.weight = nn.Parameter(module.weight.new_empty(0), requires_grad=False)

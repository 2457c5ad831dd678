"""Runs a decoder's fused layers one after the other, with few operators: from embeddings to normed hidden states."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from reference_server.model_server.models.fused.operators import Norm, Operators

Linear = Callable[[Tensor], Tensor]
Activation = Callable[[Tensor], Tensor]
Attention = Callable[[Tensor, Tensor], Tensor]

MLP_TOKENS = 1024
"""Tokens of one pass through an MLP on a CPU: its intermediate results are the largest of a prefill."""
ROPE_TYPES = ("default", "linear", "llama3", "yarn")
"""Rope types whose angles depend on the position only."""
INITIAL_POSITIONS = 4096
"""Rows of a new rotary table; a few megabytes at most."""


class RotaryTable:
    """Cosines and sines by position, computed by the model's own rotary module; grows by powers of two.

    For rope types whose values depend on the position only.
    """

    def __init__(self, rotary: Any, like: Tensor) -> None:
        self._rotary = rotary
        self._like = like
        self._rows: Tensor
        self._grow(INITIAL_POSITIONS)

    def up_to(self, max_position: int) -> Tensor:
        """[positions, 2, rotary_dim]: cosines, then sines, negated in the first half."""
        if max_position >= self._rows.size(0):
            self._grow(1 << max_position.bit_length())
        return self._rows

    @torch.no_grad()
    def _grow(self, num_positions: int) -> None:
        positions = torch.arange(num_positions, device=self._like.device)[None]
        cos, sin = self._rotary(self._like, positions)
        half = cos.shape[-1] // 2
        signed_sin = torch.cat((-sin[0, :, :half], sin[0, :, half:]), -1)
        self._rows = torch.stack((cos[0], signed_sin), 1)


@dataclass(frozen=True, slots=True)
class FusedLayer:
    """One pre-norm decoder layer.

    qkv gives [tokens, (num_heads + 2 * num_kv_heads) * head_dim]; up gives [tokens, intermediate], or for a gated MLP
    [tokens, 2 * intermediate], gates first. With several ranks these are one rank's share, and output and down sum over
    the ranks. query_norm, key_norm: over each head. attended_norm, mlp_norm: of the results of attention and MLP,
    before they are added. activation: None is silu. multiplier: of the results that are added to the residual.
    query_scale: of
    queries before attention. is_parallel: attention and MLP read the same residual, through a norm each, or through one
    norm if there is no post_norm.
    """

    input_norm: Norm
    qkv: Linear
    attention: Attention
    output: Linear
    post_norm: Norm | None
    up: Linear
    down: Linear
    query_norm: Norm | None = None
    key_norm: Norm | None = None
    attended_norm: Norm | None = None
    mlp_norm: Norm | None = None
    activation: Activation | None = None
    multiplier: float = 1.0
    query_scale: float = 1.0
    is_gated: bool = True
    is_parallel: bool = False


@dataclass(frozen=True, slots=True)
class Heads:
    """Attention geometry on this rank."""

    num_heads: int
    num_kv_heads: int
    head_dim: int


class Walk:
    """Runs layers over packed tokens."""

    def __init__(self, layers: Sequence[FusedLayer], heads: Heads, operators: Operators) -> None:
        self._layers = layers
        self._heads = heads
        self._operators = operators

    def __call__(
        self, hidden: Tensor, table: Tensor | None, positions: Tensor, kept: Tensor | None, final_norm: Norm
    ) -> Tensor:
        """The normed hidden states of the tokens `kept`, all if None.

        hidden: [tokens, size], overwritten. table: of a RotaryTable; None if the layers use no rotary positions.
        """
        delta = None
        for layer in self._layers:
            normed = self._operators.add_norm(hidden, delta, layer.input_norm)
            attended = self._attend(layer, normed, table, positions)
            if kept is not None and layer is self._layers[-1]:
                # The last layer's output of the other tokens is not used.
                hidden, normed, attended = (part.index_select(0, kept) for part in (hidden, normed, attended))
            delta = self._scaled(layer.output(attended), layer.attended_norm, layer.multiplier)
            if layer.is_parallel:
                if layer.post_norm is not None:
                    normed = self._operators.add_norm(hidden, None, layer.post_norm)
                delta = delta.add_(self._mlp(layer, normed))
                continue
            assert layer.post_norm is not None, "sequential attention and MLP have a norm each"
            normed = self._operators.add_norm(hidden, delta, layer.post_norm)
            delta = self._scaled(self._mlp(layer, normed), layer.mlp_norm, layer.multiplier)
        return self._operators.add_norm(hidden, delta, final_norm)

    def _attend(self, layer: FusedLayer, normed: Tensor, table: Tensor | None, positions: Tensor) -> Tensor:
        """[tokens, num_heads * head_dim]."""
        heads, kv_heads, head_dim = self._heads.num_heads, self._heads.num_kv_heads, self._heads.head_dim
        # `len` of a tensor is a Python function that costs as much as an operator.
        tokens = normed.size(0)
        qkv = layer.qkv(normed).view(tokens, heads + 2 * kv_heads, head_dim)
        query, key_value = qkv[:, :heads], qkv[:, heads:]
        if layer.query_norm is not None and layer.key_norm is not None:
            self._operators.norm_heads(query, layer.query_norm)
            self._operators.norm_heads(key_value[:, :kv_heads], layer.key_norm)
        if layer.query_scale != 1:
            query.mul_(layer.query_scale)
        if table is not None:
            self._operators.rotate(qkv[:, : heads + kv_heads], table, positions)
        attended = layer.attention(query, key_value.view(tokens, 2, kv_heads, head_dim))
        return attended.reshape(tokens, heads * head_dim)

    def _mlp(self, layer: FusedLayer, normed: Tensor) -> Tensor:
        if normed.size(0) <= MLP_TOKENS or normed.device.type != "cpu":
            return self._mlp_part(layer, normed)
        return torch.cat([self._mlp_part(layer, part) for part in torch.split(normed, MLP_TOKENS)])

    def _mlp_part(self, layer: FusedLayer, normed: Tensor) -> Tensor:
        up = layer.up(normed)
        if not layer.is_gated:
            return layer.down(F.silu(up) if layer.activation is None else layer.activation(up))
        if layer.activation is None:
            return layer.down(self._operators.silu_mul(up))
        gate, up = up.chunk(2, -1)
        return layer.down(layer.activation(gate) * up)

    def _scaled(self, delta: Tensor, norm: Norm | None, multiplier: float) -> Tensor:
        if norm is not None:
            delta = self._operators.add_norm(delta, None, norm)
        return delta if multiplier == 1 else delta.mul_(multiplier)

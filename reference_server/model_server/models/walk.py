"""A decoder's layers walked in a straight line with few operators, from token ids to logits.

What lies between two products (residual and norm, rotary positions, the gate of an MLP) is one operator each where
the compiled CPU kernels are there, and the plain torch of `TorchOperators` elsewhere, which is also their reference.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from reference_server.model_server.attention import triton_backend
from reference_server.model_server.cpu_kernels import build

Linear = Callable[[Tensor], Tensor]
Activation = Callable[[Tensor], Tensor]
Attention = Callable[[Tensor, Tensor], Tensor]

ROPE_TYPES = ("default", "linear", "llama3", "yarn")
"""Those whose angles depend on the position alone."""
INITIAL_POSITIONS = 4096
"""What a rotary table holds from the start; a few megabytes at most."""


@dataclass(frozen=True, slots=True)
class Norm:
    """A root-mean-square norm, or, centered, a layer norm; `weight` is what multiplies, an offset of one included."""

    weight: Tensor
    epsilon: float
    bias: Tensor | None = None
    centered: bool = False


class Operators(Protocol):
    """The work between the products."""

    def add_norm(self, residual: Tensor, delta: Tensor | None, norm: Norm) -> Tensor:
        """Add `delta` to `residual` in place, then return the norm of the sum. Both: [tokens, hidden]."""
        ...

    def norm_heads(self, heads: Tensor, norm: Norm) -> None:
        """The root-mean-square norm of every head, in place. heads: [tokens, heads, head_dim]."""
        ...

    def rotate(self, heads: Tensor, table: Tensor, positions: Tensor) -> None:
        """Turn heads by their positions, in place. table: as RotaryTable's rows."""
        ...

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """silu(gate) * up. gate_up: [tokens, 2 * intermediate], gates first."""
        ...


class TorchOperators:
    """In torch alone."""

    def add_norm(self, residual: Tensor, delta: Tensor | None, norm: Norm) -> Tensor:
        hidden = residual if delta is None else residual.add_(delta)
        if norm.centered:
            return torch.layer_norm(hidden, norm.weight.shape, norm.weight, norm.bias, norm.epsilon)
        return _rms_norm(hidden, norm)

    def norm_heads(self, heads: Tensor, norm: Norm) -> None:
        heads.copy_(_rms_norm(heads, norm))

    def rotate(self, heads: Tensor, table: Tensor, positions: Tensor) -> None:
        cos, signed_sin = table.index_select(0, positions).chunk(2, 1)
        turned = heads[..., : table.shape[-1]]
        turned.copy_(torch.addcmul(turned * cos, turned.roll(table.shape[-1] // 2, -1), signed_sin))

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, -1)
        return F.silu(gate).mul_(up)


def _rms_norm(hidden: Tensor, norm: Norm) -> Tensor:
    """One normalising operator.

    The row [x, -x] has mean 0 and variance mean(x^2), so its layer norm begins with the RMS norm of x. On a CPU torch
    has a kernel for the one, and eight operators for the other.
    """
    size = len(norm.weight)
    doubled = torch.cat((hidden, -hidden), -1)
    return torch.layer_norm(doubled, (2 * size,), torch.cat((norm.weight, norm.weight)), None, norm.epsilon)[..., :size]


class CompiledOperators:
    """The compiled CPU kernels, float32 and bfloat16."""

    def __init__(self, operators: Any) -> None:
        self._add_norm = operators.add_norm.default
        self._norm_heads = operators.norm_heads.default
        self._silu_mul = operators.silu_mul.default
        self.rotate = operators.rotate.default

    def add_norm(self, residual: Tensor, delta: Tensor | None, norm: Norm) -> Tensor:
        normed: Tensor = self._add_norm(residual, delta, norm.weight, norm.bias, norm.epsilon, norm.centered)
        return normed

    def norm_heads(self, heads: Tensor, norm: Norm) -> None:
        self._norm_heads(heads, norm.weight, norm.epsilon)

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        product: Tensor = self._silu_mul(gate_up)
        return product


def operators_for(like: Tensor) -> Operators:
    """The fastest that serve this device and type."""
    compiles = like.device.type == "cpu" and like.dtype in (torch.float32, torch.bfloat16)
    if like.device.type == "cuda" and triton_backend.launches():
        from reference_server.model_server.models.triton_operators import TritonOperators

        return TritonOperators()
    kernels = build.kernels() if compiles else None
    return TorchOperators() if kernels is None else CompiledOperators(kernels)


@torch.no_grad()
def norm_of(module: Any) -> Norm | None:
    """The norm that a module computes, or None if it is another.

    A layer norm, or a root-mean-square norm whose weight multiplies as it is or with one added, as Gemma's.
    """
    epsilon = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    weight = getattr(module, "weight", None)
    if epsilon is None or weight is None or weight.dim() != 1:
        return None
    weight, bias = weight.detach(), getattr(module, "bias", None)
    candidates = [Norm(weight, epsilon, None if bias is None else bias.detach(), centered=True)]
    if bias is None:
        candidates += [Norm(weight, epsilon), Norm(1 + weight, epsilon)]
    sample = torch.linspace(-2.0, 3.0, weight.shape[0], dtype=weight.dtype, device=weight.device)
    expected = module(sample[None])
    for norm in candidates:
        if torch.allclose(operators_for(weight).add_norm(sample[None], None, norm), expected, rtol=2e-2, atol=2e-2):
            return norm
    return None


def known_norm(module: Any) -> Norm:
    """The norm of a module that was recognised before."""
    norm = norm_of(module)
    assert norm is not None, "a module that is no norm"
    return norm


class RotaryTable:
    """Cosines and sines of every position so far, as the model's own rotary module computes them.

    It serves rope types whose values depend on the position alone; it grows by powers of two.
    """

    def __init__(self, rotary: Any, like: Tensor) -> None:
        self._rotary = rotary
        self._like = like
        self._rows: Tensor
        self._grow(INITIAL_POSITIONS)

    def up_to(self, max_position: int) -> Tensor:
        """[positions, 2, rotary_dim]: cosines, then sines with the sign of the half that is turned."""
        if max_position >= len(self._rows):
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

    qkv gives [tokens, (num_heads + 2 * num_kv_heads) * head_dim], up [tokens, intermediate], or [tokens,
    2 * intermediate], gates first, of an MLP that is gated. With several ranks these are one rank's share, and output
    and down sum over the ranks. query_norm, key_norm: of every head. attended_norm, mlp_norm: of what attention and MLP
    give, before it is added. activation: None is silu. multiplier: of what is added to the residual. query_scale: of
    queries before attention. is_parallel: attention and MLP read the same residual, through a norm each, or through one
    where there is no post_norm.
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
    """Runs layers over packed tokens. It holds no weight but the layers'."""

    def __init__(self, layers: Sequence[FusedLayer], heads: Heads, operators: Operators) -> None:
        self._layers = layers
        self._heads = heads
        self._operators = operators

    def __call__(
        self, hidden: Tensor, table: Tensor | None, positions: Tensor, kept: Tensor | None, final_norm: Norm
    ) -> Tensor:
        """The normed hidden state of the tokens `kept`, all if None.

        hidden: [tokens, size], which is written to. table: None where positions are no matter of the layers.
        """
        delta = None
        for layer in self._layers:
            normed = self._operators.add_norm(hidden, delta, layer.input_norm)
            attended = self._attend(layer, normed, table, positions)
            if kept is not None and layer is self._layers[-1]:
                # No later token reads what the last layer makes of the others.
                hidden, normed, attended = (part.index_select(0, kept) for part in (hidden, normed, attended))
            delta = self._scaled(layer.output(attended), layer.attended_norm, layer.multiplier)
            if layer.is_parallel:
                if layer.post_norm is not None:
                    normed = self._operators.add_norm(hidden, None, layer.post_norm)
                delta = delta.add_(self._mlp(layer, normed))
                continue
            assert layer.post_norm is not None, "one after the other, attention and MLP have a norm each"
            normed = self._operators.add_norm(hidden, delta, layer.post_norm)
            delta = self._scaled(self._mlp(layer, normed), layer.mlp_norm, layer.multiplier)
        return self._operators.add_norm(hidden, delta, final_norm)

    def _attend(self, layer: FusedLayer, normed: Tensor, table: Tensor | None, positions: Tensor) -> Tensor:
        """[tokens, num_heads * head_dim]."""
        heads, kv_heads, head_dim = self._heads.num_heads, self._heads.num_kv_heads, self._heads.head_dim
        qkv = layer.qkv(normed).view(len(normed), heads + 2 * kv_heads, head_dim)
        query, key_value = qkv[:, :heads], qkv[:, heads:]
        if layer.query_norm is not None and layer.key_norm is not None:
            self._operators.norm_heads(query, layer.query_norm)
            self._operators.norm_heads(key_value[:, :kv_heads], layer.key_norm)
        if layer.query_scale != 1:
            query.mul_(layer.query_scale)
        if table is not None:
            self._operators.rotate(qkv[:, : heads + kv_heads], table, positions)
        attended = layer.attention(query, key_value.view(len(normed), 2, kv_heads, head_dim))
        return attended.reshape(len(normed), heads * head_dim)

    def _mlp(self, layer: FusedLayer, normed: Tensor) -> Tensor:
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

"""The operators between two products of a decoder layer: residual and norm, rotary positions, the gate of an MLP.

One kernel each where the compiled CPU kernels or Triton's are available; plain torch elsewhere, which is also their
reference.
"""

from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from reference_server.model_server.attention import triton_backend
from reference_server.model_server.cpu_kernels import build


@dataclass(frozen=True, slots=True)
class Norm:
    """A root-mean-square norm, or a layer norm (centered). `weight` is the whole factor, an offset of one included."""

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
        """Rotate heads by their positions, in place. table: as RotaryTable's rows."""
        ...

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """silu(gate) * up. gate_up: [tokens, 2 * intermediate], gates first."""
        ...


def operators_for(like: Tensor) -> Operators:
    """The fastest operators that serve this device and type."""
    if like.device.type == "cuda" and triton_backend.launches():
        return TritonOperators()
    is_compiled = like.device.type == "cpu" and like.dtype in (torch.float32, torch.bfloat16)
    kernels = build.kernels() if is_compiled else None
    return TorchOperators() if kernels is None else CompiledOperators(kernels)


class TorchOperators:
    """Plain torch."""

    def add_norm(self, residual: Tensor, delta: Tensor | None, norm: Norm) -> Tensor:
        hidden = residual if delta is None else residual.add_(delta)
        if norm.centered:
            return torch.layer_norm(hidden, norm.weight.shape, norm.weight, norm.bias, norm.epsilon)
        return _rms_norm(hidden, norm)

    def norm_heads(self, heads: Tensor, norm: Norm) -> None:
        heads.copy_(_rms_norm(heads, norm))

    def rotate(self, heads: Tensor, table: Tensor, positions: Tensor) -> None:
        cos, signed_sin = table.index_select(0, positions).chunk(2, 1)
        rotated = heads[..., : table.shape[-1]]
        rotated.copy_(torch.addcmul(rotated * cos, rotated.roll(table.shape[-1] // 2, -1), signed_sin))

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, -1)
        return F.silu(gate).mul_(up)


def _rms_norm(hidden: Tensor, norm: Norm) -> Tensor:
    """The norm in one operator.

    The row [x, -x] has mean 0 and variance mean(x^2), so its layer norm begins with the RMS norm of x. On a CPU torch
    has one kernel for a layer norm, and needs eight operators for an RMS norm.
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


class TritonOperators:
    """Triton kernels. Half precision is computed in float32 and rounded once."""

    def __init__(self) -> None:
        from reference_server.model_server.models.fused import operator_kernels

        self._kernels: Any = operator_kernels

    def add_norm(self, residual: Tensor, delta: Tensor | None, norm: Norm) -> Tensor:
        tokens, size = residual.shape
        normed = torch.empty((tokens, size), dtype=residual.dtype, device=residual.device)
        block = block_of(size)
        self._kernels.add_norm[(tokens,)](
            *(residual, residual if delta is None else delta, norm.weight),
            *(norm.weight if norm.bias is None else norm.bias, normed),
            *(residual.stride(0), residual.stride(0) if delta is None else delta.stride(0), size, norm.epsilon),
            HAS_DELTA=delta is not None,
            HAS_BIAS=norm.bias is not None,
            CENTERED=norm.centered,
            BLOCK=block,
            num_warps=warps_of(block),
        )
        return normed

    def norm_heads(self, heads: Tensor, norm: Norm) -> None:
        tokens, num_heads, head_dim = heads.shape
        self._kernels.norm_heads[(tokens, num_heads)](
            *(heads, norm.weight, heads.stride(0), heads.stride(1), head_dim, norm.epsilon),
            BLOCK=block_of(head_dim),
            num_warps=1,
        )

    def rotate(self, heads: Tensor, table: Tensor, positions: Tensor) -> None:
        tokens, num_heads, _ = heads.shape
        half = table.shape[-1] // 2
        self._kernels.rotate[(tokens,)](
            *(heads, table, positions, heads.stride(0), heads.stride(1), num_heads, half),
            HEADS=block_of(num_heads),
            HALF=block_of(half),
            num_warps=4,
        )

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        tokens, double = gate_up.shape
        size = double // 2
        product = torch.empty((tokens, size), dtype=gate_up.dtype, device=gate_up.device)
        block = min(1024, block_of(size))
        self._kernels.silu_mul[(tokens, -(-size // block))](
            *(gate_up, product, gate_up.stride(0), size), BLOCK=block, num_warps=4
        )
        return product


def block_of(size: int) -> int:
    """The power of two that covers a row."""
    return 1 << (size - 1).bit_length()


def warps_of(block: int) -> int:
    """Warps for a row: about eight elements a thread.

    >>> [warps_of(block) for block in (128, 2048, 16384)]
    [1, 8, 16]
    """
    return max(1, min(16, block // 256))


@torch.no_grad()
def norm_of(module: Any) -> Norm | None:
    """The norm that a module computes, or None if it computes something else.

    A layer norm, or a root-mean-square norm whose factor is its weight, or its weight plus one as Gemma's.
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

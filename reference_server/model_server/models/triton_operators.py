"""What lies between a decoder's products on a GPU, one Triton kernel each."""

from typing import Any

import torch
from torch import Tensor

from reference_server.model_server.models.walk import Norm


class TritonOperators:
    """The operators of walk.py. Half precision is computed in float32 and rounded once."""

    def __init__(self) -> None:
        from reference_server.model_server.models import triton_kernels

        self._kernels: Any = triton_kernels

    def add_norm(self, residual: Tensor, delta: Tensor | None, norm: Norm) -> Tensor:
        """Add `delta` to `residual` in place, then return the norm of the sum. Both: [tokens, hidden]."""
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
        """The norm of every head, in place. heads: [tokens, heads, head_dim]."""
        tokens, num_heads, head_dim = heads.shape
        self._kernels.norm_heads[(tokens, num_heads)](
            *(heads, norm.weight, heads.stride(0), heads.stride(1), head_dim, norm.epsilon),
            BLOCK=block_of(head_dim),
            num_warps=1,
        )

    def rotate(self, heads: Tensor, table: Tensor, positions: Tensor) -> None:
        """Turn heads by their positions, in place. table: as RotaryTable's rows."""
        tokens, num_heads, _ = heads.shape
        half = table.shape[-1] // 2
        self._kernels.rotate[(tokens,)](
            *(heads, table, positions, heads.stride(0), heads.stride(1), num_heads, half),
            HEADS=block_of(num_heads),
            HALF=block_of(half),
            num_warps=4,
        )

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """silu(gate) * up. gate_up: [tokens, 2 * intermediate], gates first."""
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
    """Threads for a row: some eight elements each.

    >>> [warps_of(block) for block in (128, 2048, 16384)]
    [1, 8, 16]
    """
    return max(1, min(16, block // 256))

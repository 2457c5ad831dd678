"""The K/V cache: one buffer of fixed-size blocks per layer, and the arithmetic of blocks and slots.

    layer buffer   [num_blocks, 2, num_kv_heads, block_size, head_dim]     0 is keys, 1 is values
    slot           block * block_size + offset: one token's place, the same number in every layer

The elements have the compute type or eight bits (`float8.py`).

A block's keys of one head lie together, so the torch kernel gathers the keys and values of a batch with one
`index_select` of long rows, in the order that a batched product reads.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from reference_server.model_server.memory import float8

_ALIGNMENT = 64


@dataclass(frozen=True, slots=True)
class LayerShape:
    """K/V geometry of one layer on this rank, as the probe recorded it."""

    num_kv_heads: int
    head_dim: int

    @property
    def elements_per_token(self) -> int:
        return 2 * self.num_kv_heads * self.head_dim


@dataclass(frozen=True, slots=True)
class KVScales:
    """The factors by which one layer's stored keys and values are multiplied; 1 if they are stored as computed."""

    key: float = 1.0
    value: float = 1.0


UNSCALED = KVScales()


@dataclass(frozen=True, slots=True, eq=False)
class LayerCache:
    """One layer's blocks. Kernels read the elements without the scales, which `PagedLayer` applies."""

    buffer: Tensor
    scales: KVScales = UNSCALED

    @property
    def shape(self) -> LayerShape:
        return LayerShape(self.buffer.shape[2], self.buffer.shape[4])

    @property
    def block_size(self) -> int:
        return self.buffer.shape[3]

    def pages(self) -> tuple[Tensor, Tensor]:
        """Keys and values, each [num_blocks, block_size, num_kv_heads, head_dim], without a copy."""
        keys, values = self.buffer.unbind(1)
        return keys.transpose(1, 2), values.transpose(1, 2)

    @property
    def factors(self) -> tuple[float, float]:
        """The factors by which keys and values are multiplied before they are rounded to eight bits."""
        return 1 / self.scales.key, 1 / self.scales.value

    def rounded(self, key_value: Tensor) -> Tensor:
        """Keys and values in the type of the buffer, without their scales. key_value: [tokens, 2, ...]."""
        if not float8.is_float8(self.buffer.dtype):
            return key_value
        if self.scales != UNSCALED:
            key_factor, value_factor = self.factors
            key, value = key_value.unbind(1)
            key_value = torch.stack((key.float() * key_factor, value.float() * value_factor), 1)
        return float8.rounded(key_value, self.buffer.dtype)


class KVCache:
    """Blocks for every layer, allocated once and reused."""

    def __init__(
        self,
        shapes: Sequence[LayerShape],
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
        scales: Sequence[KVScales] = (),
    ) -> None:
        """scales: of each layer; empty without scales."""
        self.num_blocks = num_blocks
        self.block_size = block_size
        # Normal tensors even if the calling thread is in inference mode: other threads may write them.
        with torch.inference_mode(False):
            self.layers = tuple(
                LayerCache(_zeros((num_blocks, 2, shape.num_kv_heads, block_size, shape.head_dim), dtype, device), own)
                for shape, own in zip(shapes, scales or [UNSCALED] * len(shapes), strict=True)
            )

    @property
    def num_slots(self) -> int:
        return self.num_blocks * self.block_size

    def zero_nonfinite(self, blocks: NDArray[np.int64]) -> None:
        """Replace NaN and infinite elements of some blocks by 0: kernels read whole pages, those of a new owner too."""
        for layer in self.layers:
            index = torch.from_numpy(blocks).to(layer.buffer.device)
            pages = layer.buffer[index]
            wide = pages.float() if float8.is_float8(pages.dtype) else pages
            layer.buffer[index] = torch.nan_to_num(wide, nan=0.0, posinf=0.0, neginf=0.0).to(pages.dtype)


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros that a CPU commits page by page as they are written: `torch.zeros` would touch gigabytes at start."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    size = math.prod(shape) * dtype.itemsize
    memory = torch.from_numpy(np.zeros(size + _ALIGNMENT, dtype=np.uint8))
    first = -memory.data_ptr() % _ALIGNMENT
    return memory[first : first + size].view(dtype).view(shape)


def bytes_per_block(shapes: Sequence[LayerShape], block_size: int, dtype: torch.dtype) -> int:
    """Bytes of one block in all layers of this rank."""
    return sum(shape.elements_per_token for shape in shapes) * block_size * dtype.itemsize


def blocks_for(tokens: int, block_size: int) -> int:
    """Blocks that hold `tokens` tokens.

    >>> [blocks_for(tokens, 16) for tokens in (0, 1, 16, 17)]
    [0, 1, 1, 2]
    """
    return -(-tokens // block_size)

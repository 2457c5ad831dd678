"""Writing a step's keys and values into the paged cache: in torch, by the compiled CPU kernel, by Triton."""

import numpy as np
import torch
from torch import Tensor

from reference_server.model_server.attention import triton_backend
from reference_server.model_server.attention.kernel import PerStep
from reference_server.model_server.memory.kv_cache import LayerCache
from reference_server.model_server.step_state import IntArray, Step


class TorchStore:
    """The reference, on any device."""

    def __init__(self) -> None:
        # By the number of K/V heads, which may differ between layers.
        self._indices: PerStep[dict[int, Tensor]] = PerStep()

    def __call__(self, key_value: Tensor, cache: LayerCache, step: Step) -> None:
        _, _, num_kv_heads, block_size, head_dim = cache.buffer.shape
        indices = self._indices.of(step, dict)
        if num_kv_heads not in indices:
            index = line_index(step.metadata.slots, num_kv_heads, block_size)
            indices[num_kv_heads] = torch.from_numpy(index).to(cache.buffer.device)
        lines = cache.rounded(key_value).reshape(-1, head_dim)
        cache.buffer.view(-1, head_dim).index_put_((indices[num_kv_heads],), lines)


def line_index(slots: IntArray, num_kv_heads: int, block_size: int) -> IntArray:
    """[tokens * 2 * num_kv_heads] int64: the lines of the slots in the cache viewed as [lines, head_dim]."""
    block, offset = np.divmod(slots, block_size)
    planes = np.arange(2 * num_kv_heads)
    lines: IntArray = (block[:, None] * (2 * num_kv_heads) + planes) * block_size + offset[:, None]
    return lines.reshape(-1)


class CompiledStore:
    """The compiled CPU kernel; `cpu_kernels.build.kernels()` has loaded it."""

    def __init__(self) -> None:
        self._store = torch.ops.reference_server_cpu.store.default

    def __call__(self, key_value: Tensor, cache: LayerCache, step: Step) -> None:
        if key_value.stride(3) != 1:
            key_value = key_value.contiguous()
        self._store(cache.buffer, key_value, step.tensors.slots, *cache.factors)


class TritonStore:
    """The Triton kernel; skips negative slots."""

    def __call__(self, key_value: Tensor, cache: LayerCache, step: Step) -> None:
        _, _, num_kv_heads, block_size, head_dim = cache.buffer.shape
        if key_value.stride(3) != 1:
            key_value = key_value.contiguous()
        triton_backend.kernels().store[(len(key_value), 2)](
            *(key_value, triton_backend.elements(cache.buffer), step.tensors.slots),
            *(key_value.stride(0), key_value.stride(1), key_value.stride(2)),
            *(num_kv_heads, head_dim, block_size, *cache.factors),
            HEADS=triton_backend.power_of_two(num_kv_heads),
            DIM=triton_backend.power_of_two(head_dim),
            FLOAT8=triton_backend.mantissa_bits(cache.buffer.dtype),
            num_warps=2,
        )

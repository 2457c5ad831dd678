"""What kernels on an accelerator read of a step: the host's plan, brought over in one copy that nothing waits for."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from reference_server.model_server.attention.state import AttentionMetadata

# Where an array begins in the buffer of a step: kernels read aligned words.
ALIGNMENT = 16


@dataclass(frozen=True, slots=True)
class DeviceMetadata:
    """The tensors of an AttentionMetadata that kernels read on the device.

    slots: [tokens] int64. block_table: [rows, blocks] int32. seqlen_k: [rows] int32. cu_seqlen_q, cu_seqlen_k:
    [rows of several tokens + 1] int32, counted from the first token that is no decode row's.
    """

    slots: Tensor
    block_table: Tensor
    seqlen_k: Tensor
    cu_seqlen_q: Tensor
    cu_seqlen_k: Tensor


def host_arrays(metadata: AttentionMetadata) -> list[NDArray[Any]]:
    """The arrays of a DeviceMetadata, in its fields' order."""
    prefill = slice(metadata.num_decode_rows, None)
    return [
        metadata.slots,
        metadata.block_table.astype(np.int32),
        metadata.seqlen_k.astype(np.int32),
        _cumulative(metadata.seqlen_q[prefill]),
        _cumulative(metadata.seqlen_k[prefill]),
    ]


def on_device(metadata: AttentionMetadata, device: torch.device) -> DeviceMetadata:
    """The step's tensors, brought over once."""
    placed: DeviceMetadata | None = metadata.step_memo.get(DeviceMetadata)
    if placed is None:
        placed = metadata.step_memo[DeviceMetadata] = DeviceMetadata(*stage(host_arrays(metadata), device))
    return placed


def stage(arrays: Sequence[NDArray[Any]], device: torch.device) -> list[Tensor]:
    """The arrays as tensors of a device: one buffer in pinned memory, one copy, one view for each.

    The buffer may be let go at once: the allocator of pinned memory keeps it until the copy is done.
    """
    offsets = layout(arrays)
    if device.type == "cuda":
        buffer = torch.empty(offsets[-1], dtype=torch.uint8, pin_memory=True)
        fill(buffer.numpy(), arrays, offsets)
    else:
        plain = np.empty(offsets[-1], dtype=np.uint8)
        fill(plain, arrays, offsets)
        buffer = torch.from_numpy(plain)
    return views(buffer.to(device, non_blocking=True), arrays, offsets)


def layout(arrays: Sequence[NDArray[Any]]) -> list[int]:
    """Where each array begins, and last the size of them all.

    >>> layout([np.zeros(3, np.int64), np.zeros(1, np.int32)])
    [0, 32, 48]
    """
    offsets = [0]
    for array in arrays:
        offsets.append(-(-(offsets[-1] + array.nbytes) // ALIGNMENT) * ALIGNMENT)
    return offsets


def fill(buffer: NDArray[np.uint8], arrays: Sequence[NDArray[Any]], offsets: Sequence[int]) -> None:
    """Write each array at its place."""
    for array, first in zip(arrays, offsets, strict=False):
        buffer[first : first + array.nbytes].view(array.dtype)[:] = array.reshape(-1)


def views(buffer: Tensor, arrays: Sequence[NDArray[Any]], offsets: Sequence[int]) -> list[Tensor]:
    """What `fill` wrote, as tensors."""
    return [
        buffer[first : first + array.nbytes].view(_torch_dtype(array.dtype)).view(array.shape)
        for array, first in zip(arrays, offsets, strict=False)
    ]


def _torch_dtype(dtype: np.dtype[Any]) -> torch.dtype:
    return {np.dtype(np.int64): torch.int64, np.dtype(np.int32): torch.int32}[dtype]


def _cumulative(lengths: NDArray[np.int64]) -> NDArray[np.int32]:
    ends = np.zeros(len(lengths) + 1, dtype=np.int32)
    np.cumsum(lengths, out=ends[1:])
    return ends

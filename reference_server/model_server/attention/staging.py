"""Copies host arrays to an accelerator: one buffer in pinned memory, one asynchronous copy, one view for each array."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from reference_server.model_server.step_state import StepMetadata, StepTensors, cumulative

# Kernels read aligned words, so each array begins at a multiple of this in the buffer.
ALIGNMENT = 16


def host_arrays(metadata: StepMetadata) -> list[NDArray[Any]]:
    """The arrays of a step's StepTensors, in the order of its fields."""
    long_rows = slice(metadata.num_single_rows, None)
    return [
        metadata.slots,
        metadata.block_table.astype(np.int32),
        metadata.seqlen_k.astype(np.int32),
        cumulative(metadata.seqlen_q[long_rows]),
        cumulative(metadata.seqlen_k[long_rows]),
    ]


def upload(metadata: StepMetadata, device: torch.device) -> StepTensors:
    """A step's tensors by one copy."""
    return StepTensors(*stage(host_arrays(metadata), device))


def tensors_on(device: torch.device, metadata: StepMetadata) -> StepTensors:
    """A step's tensors: views of the host's arrays on a CPU, copies on any other device."""
    return StepTensors.of_host(metadata) if device.type == "cpu" else upload(metadata, device)


def stage(arrays: Sequence[NDArray[Any]], device: torch.device) -> list[Tensor]:
    """The arrays as tensors of a device; nothing waits for the copy.

    The buffer may be released at once: the allocator of pinned memory keeps it until the copy is done.
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
    """The offset of each array, then the size of the buffer.

    >>> layout([np.zeros(3, np.int64), np.zeros(1, np.int32)])
    [0, 32, 48]
    """
    offsets = [0]
    for array in arrays:
        offsets.append(-(-(offsets[-1] + array.nbytes) // ALIGNMENT) * ALIGNMENT)
    return offsets


def fill(buffer: NDArray[np.uint8], arrays: Sequence[NDArray[Any]], offsets: Sequence[int]) -> None:
    """Write each array at its offset."""
    for array, first in zip(arrays, offsets, strict=False):
        buffer[first : first + array.nbytes].view(array.dtype)[:] = array.reshape(-1)


def views(buffer: Tensor, arrays: Sequence[NDArray[Any]], offsets: Sequence[int]) -> list[Tensor]:
    """A tensor for each array that `fill` wrote."""
    return [
        buffer[first : first + array.nbytes].view(_torch_dtype(array.dtype)).view(array.shape)
        for array, first in zip(arrays, offsets, strict=False)
    ]


def _torch_dtype(dtype: np.dtype[Any]) -> torch.dtype:
    return {np.dtype(np.int64): torch.int64, np.dtype(np.int32): torch.int32}[dtype]

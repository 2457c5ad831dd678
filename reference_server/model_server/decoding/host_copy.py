"""Copies small tensors between host and device; only reading waits for the device."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


def to_device(
    values: Sequence[Any] | NDArray[Any], device: torch.device, dtype: type[np.number[Any]] | None = None
) -> Tensor:
    """The values on a device, through pinned memory: `torch.tensor(values, device=...)` would wait for the copy.

    Lists of floats become float32 and lists of integers int64, unless `dtype` is set.
    """
    array = values if isinstance(values, np.ndarray) else np.asarray(values, dtype=dtype)
    host = torch.from_numpy(array.astype(np.float32) if array.dtype == np.float64 else array)
    if device.type == "cpu":
        return host
    if device.type == "cuda":
        host = host.pin_memory()
    return host.to(device, non_blocking=True)


class HostCopy:
    """Copies of some tensors, started at construction. Reading waits for these copies, not for later launches."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._tensors = tensors
        self._copied: torch.cuda.Event | None = None
        if tensors[0].is_cuda:
            # To pinned memory.
            self._tensors = [tensor.to("cpu", non_blocking=True) for tensor in tensors]
            self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._copied.record()

    def read(self) -> list[Any]:
        """Every tensor as a nested list."""
        if self._copied is not None:
            self._copied.synchronize()
        return [tensor.tolist() for tensor in self._tensors]

"""Small results on their way from the device to the host."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


class HostCopy:
    """Copies of some tensors, begun when made. Reading waits for them alone, not for what was launched after them."""

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

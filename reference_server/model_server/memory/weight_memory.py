"""Memory for weights, which stay as long as their model: side by side, in pages of 2 MiB where the system has them.

A decode step reads every weight once, so it waits for the address translation of all their pages. Memory from the C
library begins at any address: a weight in it has few whole pages of 2 MiB, and a small weight has none.
"""

import mmap
from contextlib import suppress

import torch
from torch import Tensor

PAGE_BYTES = 2 << 20
# Pages that no weight has reached take no memory.
REGION_BYTES = 64 << 20
ALIGNMENT = 128


class WeightMemory:
    """Regions that are filled from front to back. A region is freed with the last of its weights."""

    def __init__(self) -> None:
        self._region: mmap.mmap | None = None
        self._first = self._end = 0

    def place(self, weight: Tensor) -> Tensor:
        """A contiguous copy in this memory; the tensor itself if it is not on a CPU or the system lacks such pages."""
        if weight.device.type != "cpu" or not weight.numel() or not hasattr(mmap, "MADV_HUGEPAGE"):
            return weight
        size = -(-weight.nbytes // ALIGNMENT) * ALIGNMENT
        if self._region is None or self._first + size > self._end:
            self._begin(max(size, REGION_BYTES))
        assert self._region is not None
        memory = torch.frombuffer(self._region, dtype=weight.dtype, count=weight.numel(), offset=self._first)
        self._first += size
        return memory.view(weight.shape).copy_(weight)

    def _begin(self, size: int) -> None:
        """Start a new region; weights keep the old one alive."""
        # Pages of 2 MiB begin at multiples of their size.
        region = mmap.mmap(-1, size + PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        # A kernel may be built without such pages.
        with suppress(OSError):
            region.madvise(mmap.MADV_HUGEPAGE)
        self._first = -torch.frombuffer(region, dtype=torch.uint8).data_ptr() % PAGE_BYTES
        self._region, self._end = region, self._first + size


_memory = WeightMemory()


def placed(weight: Tensor) -> Tensor:
    """A copy in the memory of this process for weights, or the tensor itself: `WeightMemory.place`."""
    return _memory.place(weight)

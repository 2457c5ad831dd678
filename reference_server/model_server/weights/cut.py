"""The part of a tensor that a rank holds, taken without loading the rest."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Cut:
    """`spans` of one dimension, each `[start, end)` of the full tensor, concatenated, then `padding` zeros.

    >>> Cut(0, ((0, 256), (512, 640), (768, 896))).shape((1024, 8))
    (512, 8)
    """

    dim: int
    spans: tuple[tuple[int, int], ...]
    padding: int = 0

    @property
    def size(self) -> int:
        return sum(end - start for start, end in self.spans) + self.padding

    def shape(self, full: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of this part of a tensor of shape `full`."""
        return (*full[: self.dim], self.size, *full[self.dim + 1 :])

    def take(self, source: Any) -> Tensor:
        """This part of `source`, a tensor or a lazy slice of a file. May share memory with it."""
        before = (slice(None),) * self.dim
        parts = [source[(*before, slice(start, end))] for start, end in self.spans]
        own: Tensor = parts[0] if len(parts) == 1 else torch.cat(parts, self.dim)
        if not self.padding:
            return own
        return F.pad(own, (0, 0) * (own.dim() - 1 - self.dim) + (0, self.padding))


def even(size: int, dim: int, rank: int, world_size: int, blocks: tuple[int, ...] = (1,)) -> Cut:
    """The rank's equal share of each block; block sizes are in proportion to `blocks`.

    Raises ValueError naming a size that is not divisible by the ranks.

    >>> even(1024, 0, rank=0, world_size=2, blocks=(2, 1, 1)).spans
    ((0, 256), (512, 640), (768, 896))
    """
    unit, rest = divmod(size, sum(blocks))
    spans, first = [], 0
    for block in blocks:
        length = unit * block
        if rest or length % world_size:
            raise ValueError(f"a size of {length if not rest else size} cannot be divided over {world_size} shards")
        share = length // world_size
        spans.append((first + rank * share, first + (rank + 1) * share))
        first += length
    return Cut(dim, tuple(spans))


def vocabulary(size: int, rank: int, world_size: int) -> Cut:
    """The rank's rows of an embedding or a head: equal shares, the last ones padded with zeros.

    >>> [vocabulary(17, rank, 2) for rank in (0, 1)]
    [Cut(dim=0, spans=((0, 9),), padding=0), Cut(dim=0, spans=((9, 17),), padding=1)]
    """
    share = -(-size // world_size)
    start, end = min(rank * share, size), min((rank + 1) * share, size)
    return Cut(0, ((start, end),), share - (end - start))

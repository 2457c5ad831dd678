"""Seeded random weights: each rank draws the same full tensor in every run, and keeps its cut.

A tensor is drawn by rows from a generator seeded with its name, so that only a few rows are in memory.
"""

import hashlib
import math
from collections.abc import Iterator

import torch
from torch import Tensor

from reference_server.model_server.weights.cut import Cut

# initializer_range of most published configs.
STD = 0.02
# A CPU generator draws sixteen normal numbers at a time: chunks of a multiple draw the same as one call.
_VECTOR = 16
_CHUNK_ELEMENTS = 1 << 22


def random_weight(
    name: str, shape: tuple[int, ...], cut: Cut | None, seed: int, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """The part `cut` of the weight `name` of full `shape`: normal; ones or zeros if it has one dimension."""
    own_shape = shape if cut is None else cut.shape(shape)
    if len(shape) == 1:
        return torch.full(own_shape, 0.0 if name.endswith("bias") else 1.0, dtype=dtype, device=device)
    own = torch.zeros(own_shape, dtype=dtype, device=device)
    filled = 0
    for first, rows in _rows(name, shape, seed, dtype, device):
        if cut is None:
            own[first : first + len(rows)] = rows
        elif cut.dim > 0:
            own[first : first + len(rows)] = cut.take(rows)
        else:
            for start, end in cut.spans:
                low, high = max(start, first), min(end, first + len(rows))
                if low < high:
                    own[filled : filled + high - low] = rows[low - first : high - first]
                    filled += high - low
    return own


def _rows(
    name: str, shape: tuple[int, ...], seed: int, dtype: torch.dtype, device: torch.device
) -> Iterator[tuple[int, Tensor]]:
    """The whole tensor in order: the first row of each chunk, and the chunk."""
    digest = hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=8).digest()
    generator = torch.Generator(device).manual_seed(int.from_bytes(digest, "little"))
    row_size = math.prod(shape[1:])
    least = _VECTOR // math.gcd(_VECTOR, row_size)
    num_rows = least * max(1, _CHUNK_ELEMENTS // (row_size * least))
    first = 0
    while first < shape[0]:
        end = min(first + num_rows, shape[0])
        if (shape[0] - end) * row_size < _VECTOR:
            # Fewer than _VECTOR numbers would be drawn by another algorithm.
            end = shape[0]
        chunk = torch.empty((end - first, *shape[1:]), dtype=dtype, device=device)
        yield first, chunk.normal_(0.0, STD, generator=generator)
        first = end

"""Seeded random weights: the same full tensor on every rank and in every run, of which each rank keeps its cut.

A tensor is drawn row by row from a generator of its own name, so no more of it is in memory than some rows.
"""

import hashlib
import math
from collections.abc import Iterator

import torch
from torch import Tensor

from reference_server.model_server.weights.cut import Cut

# What initializer_range is in most published configs.
STD = 0.02
# A CPU's generator draws sixteen normal numbers at a time: chunks of a multiple draw what one call would.
_VECTOR = 16
_CHUNK_ELEMENTS = 1 << 22


def random_weight(
    name: str, shape: tuple[int, ...], cut: Cut | None, seed: int, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """The part `cut` of the weight `name` of full `shape`: normal, but ones or zeros where it has one dimension."""
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
            # A few last numbers alone would be drawn in another way.
            end = shape[0]
        chunk = torch.empty((end - first, *shape[1:]), dtype=dtype, device=device)
        yield first, chunk.normal_(0.0, STD, generator=generator)
        first = end

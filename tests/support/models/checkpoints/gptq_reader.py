"""Reads GPTQ's first format by its definition, without code of the server."""

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.generic]


def read_weight(tensors: Mapping[str, Array], bits: int) -> NDArray[np.float32]:
    """W[n, k] = scales[g_idx[k], n] * (q[k, n] - (qzeros[g_idx[k], n] + 1)): [outputs, inputs]."""
    codes = _unpacked(tensors["qweight"], bits, axis=0)
    zeros = _unpacked(tensors["qzeros"], bits, axis=1) + 1
    groups = tensors["g_idx"].astype(np.int64)
    scales = tensors["scales"].astype(np.float32)
    return ((codes - zeros[groups]).astype(np.float32) * scales[groups]).T


def _unpacked(words: Array, bits: int, axis: int) -> NDArray[np.int64]:
    """Lowest bits first, 32 / bits integers of a word one after the other along `axis`."""
    unsigned = words.view(np.uint32).astype(np.int64)
    parts = [(unsigned >> shift) & ((1 << bits) - 1) for shift in range(0, 32, bits)]
    stacked = np.stack(parts, axis=axis + 1)
    shape = list(words.shape)
    shape[axis] *= len(parts)
    return stacked.reshape(shape)

"""Transformers' cache protocol over the paged cache, for the forwards that pad: rows side by side, ends aligned.

A step of three rows with 2, 4 and 3 tokens in all, one new token each:

    keys      |  .  .  0  1  |      `.` is padding: masked, and read from the row's own first slot, so that
              |  0  1  2  3  |      nothing of another row is ever seen
              |  .  0  1  2  |
    queries            ^ the last columns
"""

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from reference_server.model_server.attention.state import AttentionMetadata, AttentionState
from reference_server.model_server.attention.torch_backend import store
from reference_server.model_server.kv_cache import LayerShape


@dataclass(frozen=True, slots=True)
class Places:
    """Where each key of a padded step lies. block, offset: [rows, keys]; is_real: [rows, keys] bool."""

    block: Tensor
    offset: Tensor
    is_real: Tensor

    @classmethod
    def of(cls, positions: NDArray[np.int64], table: NDArray[np.int64], block_size: int, device: Any) -> "Places":
        """positions: [rows, keys], token positions of each row, negative for padding. table: [rows, blocks]."""
        inside = positions.clip(min=0)
        block = np.take_along_axis(table, inside // block_size, axis=1)
        arrays = (block, inside % block_size, positions >= 0)
        return cls(*(torch.from_numpy(array).to(device) for array in arrays))

    def gather(self, layer: Tensor) -> Tensor:
        """[rows, keys, 2, num_kv_heads, head_dim] of one layer of the cache."""
        return layer[self.block, :, :, self.offset]


class PaddedStep:
    """The geometry of one padded forward: which cells of [rows, longest] hold the packed tokens, and their keys."""

    def __init__(self, metadata: AttentionMetadata, block_size: int, device: torch.device) -> None:
        seqlen_q, seqlen_k = metadata.seqlen_q, metadata.seqlen_k
        self.metadata = metadata
        self.num_rows = metadata.num_rows
        self.query_len = int(seqlen_q.max())
        self.key_len = metadata.max_k
        ends = np.cumsum(seqlen_q)
        self.rows = np.repeat(np.arange(self.num_rows), seqlen_q)
        self.columns = np.arange(ends[-1]) - np.repeat(ends, seqlen_q) + self.query_len
        positions = np.arange(self.key_len)[None] - (self.key_len - seqlen_k[:, None])
        self.keys = Places.of(positions, metadata.block_table, block_size, device)
        self.cells = torch.from_numpy(self.rows).to(device), torch.from_numpy(self.columns).to(device)

    @property
    def past_len(self) -> int:
        """Key columns before those of the queries."""
        return self.key_len - self.query_len

    def pad(self, packed: Tensor) -> Tensor:
        """[tokens] -> [rows, longest], padded on the left with 0."""
        padded = packed.new_zeros((self.num_rows, self.query_len))
        padded[self.cells] = packed
        return padded


class PagedKeys(CacheLayerMixin):  # type: ignore[misc]
    """One layer's self-attention K/V: new ones go to the step's slots, and all of the rows' come back."""

    def __init__(self, state: AttentionState, index: int, step: PaddedStep) -> None:
        super().__init__()
        self._state = state
        self._index = index
        self._step = step

    def update(self, key_states: Tensor, value_states: Tensor, *_: object, **__: object) -> tuple[Tensor, Tensor]:
        """key_states, value_states: [rows, num_kv_heads, longest, head_dim]. Returns all keys and values so far."""
        layer = layer_of(self._state, self._index)
        rows, columns = self._step.cells
        new = (key_states[rows, :, columns], value_states[rows, :, columns])
        store_pair(new, layer, self._step.metadata)
        gathered = self._step.keys.gather(layer).to(key_states.dtype)
        return split(gathered, key_states.shape[-1], value_states.shape[-1])

    def get_seq_length(self) -> int:
        return self._step.past_len

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._step.past_len + query_length, 0

    def get_max_length(self) -> int:
        return -1

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """The cache is allocated by the engine."""


def layer_of(state: AttentionState, index: int) -> Tensor:
    """[num_blocks, 2, num_kv_heads, block_size, head_dim]"""
    assert state.cache is not None, "attention before the cache is allocated"
    return state.cache.layers[index]


def store_pair(pair: tuple[Tensor, Tensor], layer: Tensor, metadata: AttentionMetadata) -> None:
    """Write packed keys and values, each [tokens, num_kv_heads, head_dim], padded to the width of the cache."""
    width = layer.shape[-1]
    padded = [F.pad(part, (0, width - part.shape[-1])) for part in pair]
    store(torch.stack(padded, dim=1).to(layer.dtype), layer, metadata)


def split(gathered: Tensor, key_dim: int, value_dim: int) -> tuple[Tensor, Tensor]:
    """[rows, keys, 2, num_kv_heads, width] -> keys and values, each [rows, num_kv_heads, keys, head_dim]."""
    keys, values = gathered.transpose(1, 3).unbind(2)
    return keys[..., :key_dim], values[..., :value_dim]


def shapes_of(caches: SequenceOf[Cache]) -> tuple[LayerShape, ...]:
    """The geometry of what a probe left in one or more dynamic caches that will share the paged one's layers.

    Raises ValueError where some layer kept nothing, or the caches differ in their heads.
    """
    shapes = []
    for layers in zip(*(cache.layers for cache in caches), strict=True):
        tensors = [tensor for layer in layers for tensor in (layer.keys, layer.values)]
        if any(tensor is None or tensor.dim() != 4 for tensor in tensors):
            raise ValueError("a layer keeps no keys and values per head")
        heads = {tensor.shape[1] for tensor in tensors}
        if len(heads) > 1:
            raise ValueError(f"its attentions keep {sorted(heads)} heads in one layer")
        shapes.append(LayerShape(heads.pop(), max(tensor.shape[-1] for tensor in tensors)))
    if not shapes:
        raise ValueError("it keeps nothing in the cache that it is given")
    return tuple(shapes)

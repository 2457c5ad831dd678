"""Transformers' cache protocol over the paged cache, for the forwards that pad: rows aligned at their ends.

A step of three rows with 2, 4 and 3 tokens in all, one new token each:

    keys      |  .  .  0  1  |      `.` is padding: masked, and read from the row's own first slot, so that
              |  0  1  2  3  |      no other row is read
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

from reference_server.model_server.attention.store import TorchStore
from reference_server.model_server.memory import float8
from reference_server.model_server.memory.kv_cache import LayerCache, LayerShape
from reference_server.model_server.step_state import Step, StepMetadata, StepState, StepTensors


@dataclass(frozen=True, slots=True)
class Places:
    """The place of each key of a padded step. block, offset: [rows, keys]; is_real: [rows, keys] bool."""

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

    def gather(self, layer: LayerCache, dtype: torch.dtype) -> Tensor:
        """[rows, keys, 2, num_kv_heads, head_dim] of one layer of the cache, in the compute type."""
        return layer.buffer[self.block, :, :, self.offset].to(dtype)


class PaddedStep:
    """The geometry of one padded forward: the cells of [rows, longest] that hold the packed tokens, and their keys."""

    def __init__(self, metadata: StepMetadata, block_size: int, device: torch.device) -> None:
        seqlen_q, seqlen_k = metadata.seqlen_q, metadata.seqlen_k
        self.writer = SlotWriter(metadata)
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
    """One layer's self-attention K/V: stores the new ones in the step's slots and returns all of the rows'."""

    def __init__(self, state: StepState, index: int, step: PaddedStep) -> None:
        super().__init__()
        self._state = state
        self._index = index
        self._step = step

    def update(self, key_states: Tensor, value_states: Tensor, *_: object, **__: object) -> tuple[Tensor, Tensor]:
        """key_states, value_states: [rows, num_kv_heads, longest, head_dim]. Returns all keys and values so far."""
        layer = layer_of(self._state, self._index)
        rows, columns = self._step.cells
        new = (key_states[rows, :, columns], value_states[rows, :, columns])
        self._step.writer.write(new, layer)
        gathered = self._step.keys.gather(layer, key_states.dtype)
        return split(gathered, key_states.shape[-1], value_states.shape[-1])

    def get_seq_length(self) -> int:
        return self._step.past_len

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._step.past_len + query_length, 0

    def get_max_length(self) -> int:
        return -1

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """The cache is allocated by the engine."""


def layer_of(state: StepState, index: int) -> LayerCache:
    assert state.cache is not None, "attention before the cache is allocated"
    return state.cache.layers[index]


class SlotWriter:
    """Writes packed keys and values into the slots of one forward, layer by layer."""

    def __init__(self, metadata: StepMetadata) -> None:
        self._step = Step(metadata, StepTensors.of_host(metadata))
        self._store = TorchStore()

    def write(self, pair: tuple[Tensor, Tensor], layer: LayerCache) -> None:
        """pair: keys and values, each [tokens, num_kv_heads, head_dim]; padded to the width of the cache."""
        width = layer.shape.head_dim
        padded = [F.pad(part, (0, width - part.shape[-1])) for part in pair]
        key_value = torch.stack(padded, dim=1)
        if not float8.is_float8(layer.buffer.dtype):
            key_value = key_value.to(layer.buffer.dtype)
        self._store(key_value, layer, self._step)


def split(gathered: Tensor, key_dim: int, value_dim: int) -> tuple[Tensor, Tensor]:
    """[rows, keys, 2, num_kv_heads, width] -> keys and values, each [rows, num_kv_heads, keys, head_dim]."""
    keys, values = gathered.transpose(1, 3).unbind(2)
    return keys[..., :key_dim], values[..., :value_dim]


def shapes_of(caches: SequenceOf[Cache]) -> tuple[LayerShape, ...]:
    """The geometry of one or more dynamic caches that a probe filled and that will share the paged one's layers.

    Raises ValueError if a layer kept nothing, or if the caches differ in their heads.
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
        raise ValueError("it keeps nothing in the cache")
    return tuple(shapes)

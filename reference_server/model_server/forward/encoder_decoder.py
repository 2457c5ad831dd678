"""The encoder-decoder forward: prompts through the encoder once, then one decoder token a row and step.

A sequence's blocks hold the decoder's K/V, then the encoder's as the cross attention projects them:

    tokens   |- max_new_tokens of the decoder -|---- prompt ----|

The decoder begins with the start token only, so each of its steps, also the first, is one token a row.
"""

import inspect
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache, EncoderDecoderCache
from transformers.modeling_outputs import BaseModelOutput

from reference_server.model_server.forward.inputs import RaggedInputs
from reference_server.model_server.forward.paged_cache import (
    PaddedStep,
    PagedKeys,
    Places,
    SlotWriter,
    layer_of,
    shapes_of,
    split,
)
from reference_server.model_server.memory import float8
from reference_server.model_server.memory.kv_cache import LayerShape
from reference_server.model_server.sequence import Sequence
from reference_server.model_server.step_state import StepMetadata, StepState


class EncoderDecoderForward:
    """Logits of a batch of decoder rows.

    equal_lengths: run rows of different decoder lengths one length at a time, for a decoder that gives every row the
    same position. A decoder with learned positions gets each row's own if its embedding accepts them.
    """

    def __init__(self, model: Any, state: StepState, device: torch.device, *, equal_lengths: bool) -> None:
        self._model = model
        self._state = state
        self._device = device
        self.equal_lengths = equal_lengths
        self._pad_id = model.config.pad_token_id or 0
        self._positions = _DecoderPositions(model.get_decoder())
        self._key_dims: list[tuple[int, int]] = []
        self._width = 0

    @torch.no_grad()
    def probe(self) -> tuple[LayerShape, ...]:
        """Run two tokens and a start; returns the K/V geometry of every layer. Raises ValueError without K/V."""
        caches = DynamicCache(), DynamicCache()
        prompt, start = torch.tensor([[1, 2]], device=self._device), torch.tensor([[1]], device=self._device)
        encoded = self._encode(prompt, torch.ones_like(prompt))
        self._width = encoded.shape[-1]
        self._model(
            encoder_outputs=BaseModelOutput(last_hidden_state=encoded),
            attention_mask=torch.ones_like(prompt),
            decoder_input_ids=start,
            past_key_values=EncoderDecoderCache(*caches),
            use_cache=True,
        )
        shapes = shapes_of(caches)
        self._key_dims = [(layer.keys.shape[-1], layer.values.shape[-1]) for layer in caches[1].layers]
        return shapes

    def __call__(self, inputs: RaggedInputs) -> Tensor:
        """[rows, vocab_size], in the model's dtype; the rows are `inputs.sampled` in order."""
        ids = torch.as_tensor(inputs.input_ids, device=self._device)
        lengths = inputs.metadata.seqlen_k
        if not self.equal_lengths or (lengths == lengths[0]).all():
            return self._run(inputs.sampled, ids, inputs.metadata)
        logits: dict[int, Tensor] = {}
        for length in np.unique(lengths):
            rows = np.flatnonzero(lengths == length)
            part = self._run(tuple(inputs.sampled[row] for row in rows), ids[rows], _rows_of(inputs.metadata, rows))
            logits.update(zip(rows.tolist(), part, strict=True))
        return torch.stack([logits[row] for row in range(len(lengths))])

    def _run(self, sequences: tuple[Sequence, ...], ids: Tensor, metadata: StepMetadata) -> Tensor:
        cache = self._state.cache
        assert cache is not None, "a forward before the cache is allocated"
        step = PaddedStep(metadata, cache.block_size, self._device)
        cross = _CrossStep(sequences, metadata.block_table, cache.block_size, self._device)
        is_first = [sequence.cache_len == 0 for sequence in sequences]
        assert all(is_first) or not any(is_first), "prompts and decodes of an encoder-decoder do not share a forward"
        if is_first[0]:
            encoded = self._encode(cross.pad(sequences, self._pad_id), cross.keys.is_real.long())
        else:
            # Only its shape is read: the cross attention has its keys and values in the cache.
            encoded = torch.zeros(1, device=self._device, dtype=self._model.dtype)
            encoded = encoded.expand(len(sequences), cross.keys.is_real.shape[1], self._width)
        num_layers = len(cache.layers)
        past = EncoderDecoderCache(
            Cache(layers=[PagedKeys(self._state, index, step) for index in range(num_layers)]),
            Cache(
                layers=[
                    _CrossKeys(self._state, index, cross, self._key_dims[index], self._model.dtype)
                    for index in range(num_layers)
                ]
            ),
        )
        past.is_updated = dict.fromkeys(range(num_layers), not is_first[0])
        with self._positions.of(metadata.seqlen_k - 1, self._device):
            output = self._model(
                encoder_outputs=BaseModelOutput(last_hidden_state=encoded),
                attention_mask=cross.keys.is_real.long(),
                decoder_input_ids=ids[:, None],
                decoder_attention_mask=step.keys.is_real.long(),
                past_key_values=past,
                use_cache=True,
            )
        logits: Tensor = output.logits[:, -1]
        return logits

    def _encode(self, ids: Tensor, mask: Tensor) -> Tensor:
        """[rows, prompt, hidden_size] of prompts padded on the right, because positions are absolute."""
        encoded: Tensor = self._model.get_encoder()(input_ids=ids, attention_mask=mask).last_hidden_state
        return encoded


class _CrossStep:
    """The prompts of the rows and the slots of their cross K/V."""

    def __init__(
        self, sequences: tuple[Sequence, ...], table: NDArray[np.int64], block_size: int, device: torch.device
    ) -> None:
        self._device = device
        lengths = np.array([len(sequence.encoder_ids) for sequence in sequences], dtype=np.int64)
        first = np.array([sequence.request.stopping.max_new_tokens for sequence in sequences], dtype=np.int64)
        columns = np.arange(lengths.max())[None]
        is_real = columns < lengths[:, None]
        # Padding reads the row's own first prompt token.
        places = Places.of(first[:, None] + np.where(is_real, columns, 0), table, block_size, device)
        self.keys = Places(places.block, places.offset, torch.from_numpy(is_real).to(device))
        slots = (places.block * block_size + places.offset).cpu().numpy()
        self.writer = SlotWriter(StepMetadata(slots[is_real], table, lengths, lengths, num_single_rows=0))

    def pad(self, sequences: tuple[Sequence, ...], pad_id: int) -> Tensor:
        """[rows, prompt] ids, padded on the right."""
        ids = torch.full(self.keys.is_real.shape, pad_id, dtype=torch.long, device=self._device)
        packed = [token for sequence in sequences for token in sequence.encoder_ids]
        ids[self.keys.is_real] = torch.tensor(packed, device=self._device)
        return ids


class _CrossKeys(CacheLayerMixin):  # type: ignore[misc]
    """One layer's cross-attention K/V: the first step writes them, every later step reads them from the cache."""

    def __init__(
        self, state: StepState, index: int, step: _CrossStep, key_dims: tuple[int, int], dtype: torch.dtype
    ) -> None:
        # Not the base's, which assigns `keys` and `values`.
        self.is_initialized = True
        self._state = state
        self._index = index
        self._step = step
        self._key_dims = key_dims
        self._dtype = dtype

    @property
    def keys(self) -> Tensor:
        """[rows, num_kv_heads, prompt, head_dim]"""
        return self._pair[0]

    @property
    def values(self) -> Tensor:
        return self._pair[1]

    @cached_property
    def _pair(self) -> tuple[Tensor, Tensor]:
        return split(self._step.keys.gather(layer_of(self._state, self._index), self._dtype), *self._key_dims)

    def update(self, key_states: Tensor, value_states: Tensor, *_: object, **__: object) -> tuple[Tensor, Tensor]:
        """key_states, value_states: [rows, num_kv_heads, prompt, head_dim], padded on the right."""
        is_real = self._step.keys.is_real
        new = (key_states.transpose(1, 2)[is_real], value_states.transpose(1, 2)[is_real])
        layer = layer_of(self._state, self._index)
        self._step.writer.write(new, layer)
        # All steps attend to the same keys, also if the cache rounds them.
        return self._pair if float8.is_float8(layer.buffer.dtype) else (key_states, value_states)

    def get_seq_length(self) -> int:
        return self._step.keys.is_real.shape[1]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:  # noqa: ARG002
        return self.get_seq_length(), 0

    def get_max_length(self) -> int:
        return -1

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """The cache is allocated by the engine."""


class _DecoderPositions:
    """Gives each decoder row its own position if the model gives all rows the same.

    Decoders with absolute positions count from the cache's length, one number for the whole batch. Their position
    embedding takes the positions of one row of tokens; the batch's newest tokens are passed as that row.
    """

    def __init__(self, decoder: nn.Module) -> None:
        self._positions: Tensor | None = None
        embedding = getattr(decoder, "embed_positions", None)
        if embedding is not None and "position_ids" in inspect.signature(embedding.forward).parameters:
            embedding.register_forward_hook(self._embed)

    def of(self, positions: NDArray[np.int64], device: torch.device) -> "_DecoderPositions":
        """A context in which row i of the decoder is at positions[i]."""
        self._positions = torch.from_numpy(positions).to(device)
        return self

    def __enter__(self) -> None:
        return None

    def __exit__(self, *_: object) -> None:
        self._positions = None

    def _embed(self, module: nn.Module, arguments: tuple[Any, ...], output: Tensor) -> Tensor:
        """Replaces `output`: [rows, 1, hidden_size]."""
        if self._positions is None:
            return output
        row = arguments[0].transpose(0, 1) if isinstance(arguments[0], Tensor) else arguments[0]
        # `forward`, because calling the module would call this hook again.
        embedded: Tensor = module.forward(row, position_ids=self._positions)
        return embedded.reshape(-1, 1, embedded.shape[-1])


def _rows_of(metadata: StepMetadata, rows: NDArray[np.int64]) -> StepMetadata:
    """The geometry of some rows of a forward with one token a row."""
    return StepMetadata(
        metadata.slots[rows],
        metadata.block_table[rows],
        metadata.seqlen_q[rows],
        metadata.seqlen_k[rows],
        num_single_rows=len(rows),
    )

"""Attention of one layer over the paged cache: store the new K/V, then attend, prefill and decode rows apart."""

from dataclasses import dataclass

import torch
from torch import Tensor

from reference_server.model_server.attention.backend import AttentionChoice
from reference_server.model_server.attention.state import AttentionOptions, AttentionState


@dataclass(slots=True)
class PagedLayer:
    """What an attention module calls; it stays attached to the module for the model's life."""

    state: AttentionState
    index: int
    choice: AttentionChoice
    options: AttentionOptions

    def __call__(self, query: Tensor, key_value: Tensor) -> Tensor:
        """Store `key_value` at the step's slots, then attend.

        query: [tokens, num_heads, head_dim], any stride. key_value: [tokens, 2, num_kv_heads, head_dim], any stride.
        Returns [tokens, num_heads, head_dim].
        """
        metadata, cache = self.state.metadata, self.state.cache
        assert metadata is not None, "attention outside a step"
        assert cache is not None, "attention before the cache is allocated"
        layer = cache.layers[self.index]
        self.choice.decode.store(key_value, layer, metadata)
        num_decode = metadata.num_decode_rows
        if num_decode == metadata.num_rows:
            return self.choice.decode(query, layer, metadata, self.options)
        if num_decode == 0:
            return self.choice.prefill(query, layer, metadata, self.options)
        decoded = self.choice.decode(query[:num_decode], layer, metadata, self.options)
        prefilled = self.choice.prefill(query[num_decode:], layer, metadata, self.options)
        return torch.cat((decoded, prefilled))

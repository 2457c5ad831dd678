"""Attention of one layer over the paged cache: store the new K/V, then attend short and long rows separately."""

from dataclasses import dataclass

import torch
from torch import Tensor

from reference_server.model_server.attention.kernel import AttentionOptions
from reference_server.model_server.attention.select import AttentionChoice
from reference_server.model_server.step_state import StepState


@dataclass(slots=True)
class PagedLayer:
    """The callable that an attention module keeps for the model's life."""

    state: StepState
    index: int
    choice: AttentionChoice
    options: AttentionOptions

    def __call__(self, query: Tensor, key_value: Tensor) -> Tensor:
        """Store `key_value` at the step's slots, then attend.

        query: [tokens, num_heads, head_dim], any stride. key_value: [tokens, 2, num_kv_heads, head_dim], any stride.
        Returns [tokens, num_heads, head_dim].
        """
        step, cache = self.state.step, self.state.cache
        assert step is not None, "attention outside a step"
        assert cache is not None, "attention before the cache is allocated"
        layer = cache.layers[self.index]
        self.choice.store(key_value, layer, step)
        num_single = step.metadata.num_single_rows
        if num_single == step.metadata.num_rows:
            return self.choice.decode(query, layer, step, self.options)
        if num_single == 0:
            return self.choice.prefill(query, layer, step, self.options)
        decoded = self.choice.decode(query[:num_single], layer, step, self.options)
        prefilled = self.choice.prefill(query[num_single:], layer, step, self.options)
        return torch.cat((decoded, prefilled))

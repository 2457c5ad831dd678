"""Attention of one layer over the paged cache: store the new K/V, then attend short and long rows separately."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from reference_server.model_server.attention.kernel import AttentionOptions
from reference_server.model_server.attention.select import AttentionChoice
from reference_server.model_server.attention.torch_backend import TorchPrefill
from reference_server.model_server.memory.kv_cache import UNSCALED, LayerCache
from reference_server.model_server.step_state import Step, StepState

NOT_CAUSAL = TorchPrefill()
"""The only kernel for prompts whose tokens attend to later ones."""


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
        if layer.scales == UNSCALED:
            return self._attend(query, layer, step, self.options)
        # The scale of the keys is applied to the scores, and the scale of the values to the result.
        scaled = replace(self.options, scaling=self.options.scaling * layer.scales.key)
        return self._attend(query, layer, step, scaled) * layer.scales.value

    def _attend(self, query: Tensor, layer: LayerCache, step: Step, options: AttentionOptions) -> Tensor:
        num_single = step.metadata.num_single_rows
        if num_single == step.metadata.num_rows:
            return self.choice.decode(query, layer, step, options)
        prefill = self.choice.prefill if step.metadata.bidirectional is None else NOT_CAUSAL
        if num_single == 0:
            return prefill(query, layer, step, options)
        decoded = self.choice.decode(query[:num_single], layer, step, options)
        prefilled = prefill(query[num_single:], layer, step, options)
        return torch.cat((decoded, prefilled))

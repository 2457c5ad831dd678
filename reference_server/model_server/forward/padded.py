"""The padded forward: the model's own attention over [rows, longest], for decoders that cannot call the paged one.

K/V are in the same paged cache as elsewhere; one forward takes rows of any length, prompts and decodes.
"""

import inspect
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicCache

from reference_server.model_server.forward.inputs import RaggedInputs
from reference_server.model_server.forward.paged_cache import PaddedStep, PagedKeys, shapes_of
from reference_server.model_server.memory.kv_cache import LayerShape
from reference_server.model_server.step_state import StepState


class PaddedForward:
    """Logits of a packed batch, which is passed to the model padded on the left."""

    def __init__(self, model: Any, state: StepState, device: torch.device) -> None:
        self._model = model
        self._state = state
        self._device = device
        accepted = inspect.signature(model.forward).parameters
        self._takes_positions = "position_ids" in accepted
        self._takes_last = "logits_to_keep" in accepted

    @torch.no_grad()
    def probe(self) -> tuple[LayerShape, ...]:
        """Run two tokens; returns the K/V geometry of every layer. Raises ValueError for a model without K/V."""
        cache = DynamicCache()
        tokens = torch.tensor([[1, 2]], device=self._device)
        self._model(input_ids=tokens, past_key_values=cache, use_cache=True)
        return shapes_of([cache])

    def __call__(self, inputs: RaggedInputs) -> Tensor:
        """[logit rows, vocab_size], in the model's dtype."""
        assert self._state.cache is not None, "a forward before the cache is allocated"
        step = PaddedStep(inputs.metadata, self._state.cache.block_size, self._device)
        layers = [PagedKeys(self._state, index, step) for index in range(len(self._state.cache.layers))]
        index = slice(None) if inputs.logits_index is None else inputs.logits_index
        rows, columns = step.rows[index], step.columns[index]
        wants_last = bool(np.all(columns == step.query_len - 1))
        options: dict[str, Any] = {}
        if self._takes_positions:
            options["position_ids"] = step.pad(torch.as_tensor(inputs.positions, device=self._device))
        if self._takes_last and wants_last:
            options["logits_to_keep"] = 1
        output = self._model(
            input_ids=step.pad(torch.as_tensor(inputs.input_ids, device=self._device)),
            attention_mask=step.keys.is_real.long(),
            past_key_values=Cache(layers=layers),
            use_cache=True,
            **options,
        )
        logits: Tensor = output.logits
        row_index = torch.from_numpy(rows).to(self._device)
        if wants_last:
            return logits[row_index, -1]
        return logits[row_index, torch.from_numpy(columns).to(self._device)]

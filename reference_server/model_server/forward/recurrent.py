"""The recurrent forward: state-space models, which keep one state per sequence instead of K/V.

The states of rows that were stepped together are one tensor; other combinations of rows are copied into a new one.
"""

import inspect
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicCache, LinearAttentionLayer

from reference_server.model_server.forward.inputs import RaggedInputs
from reference_server.model_server.sequence import Sequence


@dataclass(frozen=True, slots=True)
class RecurrentState:
    """One sequence's state: a row of the states of `num_rows` sequences; the next step may overwrite it in place."""

    states: Cache
    row: int
    num_rows: int


class RecurrentForward:
    """Logits of a batch. Prompts run one by one, so no state depends on padding; decodes run together."""

    def __init__(self, model: Any, device: torch.device) -> None:
        self._model = model
        self._device = device
        accepted = inspect.signature(model.forward).parameters
        self._cache_name = "cache_params" if "cache_params" in accepted else "past_key_values"

    @torch.no_grad()
    def probe(self) -> None:
        """Run two tokens; raises ValueError for a model that keeps more than a recurrent state."""
        _, states = self._run(torch.tensor([[1, 2]], device=self._device), self._new_states())
        kinds = {type(layer) for layer in states.layers}
        if kinds != {LinearAttentionLayer}:
            raise ValueError(f"its layers keep {', '.join(sorted(kind.__name__ for kind in kinds)) or 'nothing'}")

    def __call__(self, inputs: RaggedInputs) -> Tensor:
        """[logit rows, vocab_size], in the model's dtype."""
        sequences = inputs.sampled
        if all(sequence.cache_len > 0 for sequence in sequences):
            return self._decode(sequences, torch.as_tensor(inputs.input_ids, device=self._device))
        # By sequence and not by id: all prompts of the warm-up have the same id.
        prompts = {sequence: self._prefill(sequence) for sequence in sequences}
        return torch.cat([prompts[span.sequence][-span.count :] for span in inputs.spans])

    def _prefill(self, sequence: Sequence) -> Tensor:
        """[prompt, vocab_size]"""
        assert not sequence.cache_len, "a recurrent model's prompt is computed whole"
        ids = torch.tensor([sequence.ids], device=self._device)
        logits, states = self._run(ids, self._new_states())
        sequence.state = RecurrentState(states, row=0, num_rows=1)
        return logits[0]

    def _decode(self, sequences: tuple[Sequence, ...], ids: Tensor) -> Tensor:
        held = [sequence.state for sequence in sequences]
        states = self._together([state for state in held if isinstance(state, RecurrentState)])
        logits, states = self._run(ids[:, None], states)
        for row, sequence in enumerate(sequences):
            sequence.state = RecurrentState(states, row, len(sequences))
        return logits[:, -1]

    def _together(self, held: SequenceOf[RecurrentState]) -> Cache:
        """The states of these rows in this order; copied unless they are exactly those of the last step."""
        first = held[0]
        if first.num_rows == len(held) and all(
            state.states is first.states and state.row == row for row, state in enumerate(held)
        ):
            return first.states
        states = self._new_states()
        for index, layer in enumerate(states.layers):
            for slot in layer.conv_states:
                parts = [state.states.layers[index] for state in held]
                rows = list(zip(parts, (state.row for state in held), strict=True))
                conv = torch.stack([part.conv_states[slot][row] for part, row in rows])
                recurrent = torch.stack([part.recurrent_states[slot][row] for part, row in rows])
                layer.lazy_initialization(conv_states=conv, recurrent_states=recurrent, state_idx=slot)
                layer.conv_states[slot].copy_(conv)
                layer.recurrent_states[slot].copy_(recurrent)
                layer.has_previous_state[slot] = True
        return states

    def _new_states(self) -> Cache:
        return DynamicCache(config=self._model.config)

    def _run(self, ids: Tensor, states: Cache) -> tuple[Tensor, Cache]:
        """ids: [rows, tokens]. The logits [rows, tokens, vocab_size], and the states after them."""
        output = self._model(input_ids=ids, use_cache=True, **{self._cache_name: states})
        return output.logits, states

"""The packed forward: all sequences' new tokens as one row through the model and its registered attention."""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from reference_server.model_server.attention.state import AttentionState
from reference_server.model_server.forward.inputs import RaggedInputs
from reference_server.model_server.models.fuse import Decoder


class RaggedForward:
    """Logits of a packed batch.

    `decoder` is the model's layers in fused form where its structure allows, else None: the model's own modules.
    """

    def __init__(self, model: nn.Module, state: AttentionState, device: torch.device, decoder: Decoder | None) -> None:
        self._device = device
        self._state = state
        self._run: Decoder
        self._run = decoder if decoder is not None else _ModelCall(model)

    def __call__(self, inputs: RaggedInputs) -> Tensor:
        """[logit rows, vocab_size], in the model's dtype."""
        index = None if inputs.logits_index is None else self._tensor(inputs.logits_index)
        with self._state.use(inputs.attention):
            ids, positions = self._tensor(inputs.input_ids), self._tensor(inputs.positions)
            return self._run(ids, positions, index, inputs.attention.max_k - 1)

    def _tensor(self, array: NDArray[np.int64] | Tensor) -> Tensor:
        if isinstance(array, Tensor):
            return array
        return torch.from_numpy(array).to(self._device, non_blocking=True)


class _ModelCall:
    """Transformers' own forward over a packed row."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model

    def __call__(self, input_ids: Tensor, positions: Tensor, logits_index: Tensor | None, _: int) -> Tensor:
        output = self._model(
            input_ids=input_ids[None],
            position_ids=positions[None],
            use_cache=False,
            logits_to_keep=0 if logits_index is None else logits_index,
        )
        logits: Tensor = output.logits[0]
        return logits

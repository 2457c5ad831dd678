"""The packed forward: all sequences' new tokens as one row through the model and its registered attention."""

import functools
from typing import Any

import torch
from torch import Tensor, nn

from reference_server.model_server.attention.staging import host_arrays, stage
from reference_server.model_server.forward.inputs import ImageRows, RaggedInputs
from reference_server.model_server.models.fused.fuse import Decoder
from reference_server.model_server.speculation.hidden_states import HiddenStates
from reference_server.model_server.step_state import AdapterSegments, IntArray, Step, StepState, StepTensors


class RaggedForward:
    """Logits of a packed batch.

    `decoder` is the model's layers in fused form where its structure allows, else None: the model's own modules.
    """

    def __init__(self, model: nn.Module, state: StepState, device: torch.device, decoder: Decoder | None) -> None:
        self.device = device
        self.hidden = state.hidden
        self._state = state
        self._decoder: Decoder = decoder if decoder is not None else _ModelCall(model, state.hidden)

    def __call__(self, inputs: RaggedInputs) -> Tensor:
        """[logit rows, vocab_size], in the model's dtype."""
        input_ids, positions, index, tensors = _cpu(inputs) if self.device.type == "cpu" else _cuda(inputs, self.device)
        metadata = inputs.metadata
        step = Step(metadata, tensors) if metadata.adapters is None else self._adapted(inputs, tensors)
        if inputs.images:
            return self._run_with_images(inputs.images, input_ids, positions, index, step)
        return self.run(input_ids, positions, index, step, metadata.max_k - 1)

    def _adapted(self, inputs: RaggedInputs, tensors: StepTensors) -> Step:
        """The step with the adapters of its tokens."""
        adapters, index = inputs.metadata.adapters, inputs.logits_index
        every = AdapterSegments.on(self.device, adapters)
        if adapters is None or index is None:
            return Step(inputs.metadata, tensors, every, every)
        return Step(inputs.metadata, tensors, every, AdapterSegments.on(self.device, adapters.select(index)))

    def run(
        self, input_ids: Tensor, positions: Tensor, logits_index: Tensor | None, step: Step, max_position: int
    ) -> Tensor:
        """The same from tensors of the device: [tokens] int64 each, and [logit rows]."""
        with self._state.use(step):
            return self._decoder(input_ids, positions, logits_index, max_position)

    def _run_with_images(
        self,
        images: tuple[ImageRows, ...],
        input_ids: Tensor,
        positions: Tensor,
        logits_index: Tensor | None,
        step: Step,
    ) -> Tensor:
        """The same, with images in place of the embeddings of their tokens."""
        embeddings = self._decoder.embed(input_ids)
        for each in images:
            rows = torch.from_numpy(each.rows).to(embeddings.device)
            embeddings.index_copy_(0, rows, each.images.embeddings[each.part].to(embeddings.dtype))
        with self._state.use(step):
            return self._decoder.logits(embeddings, positions, logits_index, step.metadata.max_k - 1)


Placed = tuple[Tensor, Tensor, Tensor | None, StepTensors]
"""Ids, positions, logits index and the step's tensors, on the device."""


def _cpu(inputs: RaggedInputs) -> Placed:
    """Views of the plan's own arrays."""
    ids = inputs.input_ids if isinstance(inputs.input_ids, Tensor) else torch.from_numpy(inputs.input_ids)
    index = None if inputs.logits_index is None else torch.from_numpy(inputs.logits_index)
    return ids, torch.from_numpy(_rotary_positions(inputs)), index, StepTensors.of_host(inputs.metadata)


def _rotary_positions(inputs: RaggedInputs) -> IntArray:
    """[tokens], or [3, tokens] if a prompt has an image whose tokens lie on a grid."""
    return inputs.positions if inputs.rotary is None else inputs.rotary


def _cuda(inputs: RaggedInputs, device: torch.device) -> Placed:
    """The whole plan in one copy."""
    arrays = [_rotary_positions(inputs)]
    if not isinstance(inputs.input_ids, Tensor):
        arrays.append(inputs.input_ids)
    if inputs.logits_index is not None:
        arrays.append(inputs.logits_index)
    staged = stage([*arrays, *host_arrays(inputs.metadata)], device)
    own, tensors = staged[: len(arrays)], StepTensors(*staged[len(arrays) :])
    index = own.pop() if inputs.logits_index is not None else None
    ids = inputs.input_ids if isinstance(inputs.input_ids, Tensor) else own.pop()
    return ids, own[0], index, tensors


class _ModelCall:
    """Transformers' own forward over a packed row."""

    def __init__(self, model: Any, hidden: HiddenStates | None) -> None:
        self._model = model
        if hidden is not None:
            model.get_output_embeddings().register_forward_pre_hook(functools.partial(_keep, hidden))

    def __call__(self, input_ids: Tensor, positions: Tensor, logits_index: Tensor | None, _: int) -> Tensor:
        return self._call(positions, logits_index, input_ids=input_ids[None])

    def embed(self, input_ids: Tensor) -> Tensor:
        """[tokens, hidden]."""
        embeddings: Tensor = self._model.get_input_embeddings()(input_ids)
        return embeddings

    def logits(self, inputs_embeds: Tensor, positions: Tensor, index: Tensor | None, _: int) -> Tensor:
        """The logits of the tokens `index`, all if None, from embeddings."""
        return self._call(positions, index, inputs_embeds=inputs_embeds[None])

    def _call(self, positions: Tensor, logits_index: Tensor | None, **inputs: Tensor) -> Tensor:
        output = self._model(
            position_ids=positions[None] if positions.dim() == 1 else positions[:, None],
            use_cache=False,
            logits_to_keep=0 if logits_index is None else logits_index,
            **inputs,
        )
        logits: Tensor = output.logits[0]
        return logits


def _keep(hidden: HiddenStates, _head: nn.Module, inputs: tuple[Tensor]) -> None:
    """A hook of the output head. Draft heads call it with other rows, [rows, hidden], which are not kept."""
    if inputs[0].dim() == 3:
        hidden.rows = inputs[0][0]

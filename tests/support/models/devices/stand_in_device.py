"""A step launched on a stand-in device: tensors without data, on a device that is not the host.

An operation that mixes tensors of host and device raises. So does one that would wait for the device: reading a number,
finding nonzero elements, building a tensor there from a list. Run it in a process of its own, because the device stays.
"""

import itertools
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from reference_server.messages import ChooserParameters, Request, StoppingParameters
from reference_server.model_server import stepper as steppers
from reference_server.model_server.attention.kernel import AttentionOptions
from reference_server.model_server.attention.varlen_backend import gathered, token_index
from reference_server.model_server.batch import SequenceBatch
from reference_server.model_server.decoding.detokenize import IncrementalDetokenizer
from reference_server.model_server.decoding.stopping import StoppingCriteria
from reference_server.model_server.decoding.watermark import Watermark
from reference_server.model_server.distributed import RankGroup
from reference_server.model_server.forward.cuda_graph import CapturedStep, GraphedForward
from reference_server.model_server.forward.ragged import RaggedForward
from reference_server.model_server.memory.kv_cache import LayerCache
from reference_server.model_server.sequence import Sequence as Row
from reference_server.model_server.step_state import StepState
from reference_server.model_server.stepper import RunAhead, Stepper
from reference_server.model_server.token_choice import ChoosingOptions
from reference_server.presets import catalog
from reference_server.tokenizer import load_tokenizer
from tests.support.models.devices.table_attention import TABLES

VOCAB = 64
ROWS = 6
HEADS, KV_HEADS, HEAD_DIM, PAGE = 4, 2, 16, 16
KINDS = {
    "greedy": [ChooserParameters()],
    "sampled": [ChooserParameters(temperature=0.7, top_k=5, top_p=0.9, typical_p=0.8, seed=3)],
    "penalised": [ChooserParameters(repetition_penalty=1.2, frequency_penalty=0.4, presence_penalty=0.5)],
    "mixed": [
        ChooserParameters(),
        ChooserParameters(do_sample=True, seed=4),
        ChooserParameters(temperature=0.5, repetition_penalty=1.1),
    ],
}


class Graphs:
    """Captures by keeping the step."""

    def capture(self, step: CapturedStep) -> CapturedStep:
        step()
        return step


def main() -> None:
    _setup_privateuseone_for_python_backend("stand_in")
    # It would compute with the values of the smallest tensors, which takes kernels of the device.
    fake_tensor.CONSTANT_NUMEL_LIMIT = -1  # type: ignore[misc]
    # The engine logs an exception of one request's sampler and fails that request; here it fails the test.
    steppers.logger.exception = _fail  # type: ignore[method-assign]
    tokenizer = load_tokenizer(catalog.PRESETS[0].tokenizer_directory, VOCAB)
    with FakeTensorMode(allow_non_fake_inputs=True):
        device = torch.device("stand_in", 0)
        _control(device)
        for (name, kinds), graphed in itertools.product(KINDS.items(), (False, True)):
            forward, state = _forward(device)
            graphs = GraphedForward(forward, Graphs, PAGE)
            if graphed:
                graphs.capture([8], 128)
            choosing = ChoosingOptions(frozenset({1, 2}), Watermark(0.5, 2.0), prompt_logprobs=True)
            stepper = Stepper(graphs if graphed else forward, state, tokenizer, RankGroup(), choosing, RunAhead.OFF)
            batch = SequenceBatch(1, tuple(_row(number, kinds, tokenizer) for number in range(ROWS)), PAGE)
            launched = stepper.launch(batch, batch.live)
            for _ in range(3):
                assert launched.choice is not None
                for sequence in batch.live:
                    sequence.input_len = 1
                launched = stepper.launch(batch, batch.live, launched.choice.ids)
            assert state.step is None
            print(f"{name}, {'graphed' if graphed else 'launched'}", flush=True)


def _control(device: torch.device) -> None:
    """Operations that a step must not use raise."""
    there = torch.empty(3, device=device)
    for forbidden in (there.tolist, (there > 0).nonzero, lambda: there + torch.empty(3), lambda: there[there > 0]):
        try:
            forbidden()
        except Exception:  # each its own
            continue
        raise AssertionError("the pretended device lets everything pass")


def _fail(message: str, *values: object) -> None:
    raise AssertionError(message % values) from sys.exception()


def _forward(device: torch.device) -> tuple[RaggedForward, StepState]:
    """Embedding, one layer of attention, head."""
    state = StepState()
    cache = LayerCache(torch.empty((64, 2, KV_HEADS, PAGE, HEAD_DIM), device=device))
    embedding = torch.empty((VOCAB, (HEADS + 2 * KV_HEADS) * HEAD_DIM), device=device)
    head = torch.empty((HEADS * HEAD_DIM, VOCAB), device=device)
    assert TABLES.decode is not None
    decode, store, options = TABLES.decode(), TABLES.store(), AttentionOptions(1.0)

    def decoder(ids: Tensor, positions: Tensor, index: Tensor | None, _: int) -> Tensor:
        step = state.step
        assert step is not None
        packed = embedding[ids + 0 * positions].view(len(ids), HEADS + 2 * KV_HEADS, HEAD_DIM)
        store(packed[:, HEADS:].view(len(ids), 2, KV_HEADS, HEAD_DIM), cache, step)
        if step.metadata.num_single_rows < step.metadata.num_rows:
            gathered(cache, token_index(step.metadata, PAGE, device))
            attended = packed[:, :HEADS]
        else:
            attended = decode(packed[:, :HEADS], cache, step, options)
        hidden = attended.reshape(len(ids), -1)
        return (hidden if index is None else hidden[index]) @ head

    return RaggedForward(torch.nn.Identity(), state, device, decoder), state


def _row(number: int, kinds: Sequence[ChooserParameters], tokenizer: Any) -> Row:
    stopping = StoppingParameters(20, ignore_eos_token=True, min_new_tokens=2)
    parameters = kinds[number % len(kinds)]
    request = Request(number, ("",), 5, parameters, stopping, top_n_tokens=number % 2, prefill_logprobs=True)
    ids = list(range(3, 8 + number))
    return Row(
        request=request,
        ids=ids,
        prompt_len=len(ids),
        cache_len=0,
        input_len=len(ids),
        blocks=np.array([2 * number + 1, 2 * number + 2], dtype=np.int64),
        stopping=StoppingCriteria(stopping, frozenset()),
        detokenizer=IncrementalDetokenizer(tokenizer, ids),
    )


if __name__ == "__main__":
    main()

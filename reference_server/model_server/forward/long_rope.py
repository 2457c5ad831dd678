"""Recomputes the K/V of a request that grows past the original maximum of its long rope, as Transformers does."""

from torch import Tensor

from reference_server.model_server.batch import SequenceBatch
from reference_server.model_server.forward.inputs import Forward, RaggedInputs, build_inputs
from reference_server.model_server.sequence import Sequence

CHUNK = 512
"""Tokens of one recomputing forward: their activations are small compared with those of a prefill."""


class RecomputingForward:
    """A forward whose keys depend on whether a request is longer than `original` tokens."""

    def __init__(self, forward: Forward, original: int, block_size: int) -> None:
        self.forward = forward
        self._original = original
        self._block_size = block_size

    def __call__(self, inputs: RaggedInputs) -> Tensor:
        """[logit rows, vocab_size], in the model's dtype."""
        for sequence in inputs.sampled:
            if sequence.prompt_len <= self._original == sequence.cache_len:
                self._recompute(sequence)
        return self.forward(inputs)

    def _recompute(self, sequence: Sequence) -> None:
        """Store the K/V of its first `original` tokens again, in the same blocks."""
        batch = SequenceBatch(0, (sequence,), self._block_size)
        cache_len, input_len = sequence.cache_len, sequence.input_len
        for first in range(0, cache_len, CHUNK):
            sequence.cache_len, sequence.input_len = first, min(CHUNK, cache_len - first)
            self.forward(build_inputs(batch, prompt_logprobs=False))
        sequence.cache_len, sequence.input_len = cache_len, input_len

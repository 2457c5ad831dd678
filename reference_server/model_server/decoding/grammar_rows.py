"""The rows of a batch that have a grammar, and the scores of their tokens."""

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from reference_server.model_server.decoding.grammar import GrammarState


class GrammarRows:
    """The rows of a batch that have a grammar.

    states: by row. vocab_size: of the model's logits; the tokenizer's may be larger.
    """

    def __init__(
        self, states: Mapping[int, GrammarState], num_rows: int, vocab_size: int, device: torch.device
    ) -> None:
        self._states = states
        self._in_every_row = len(states) == num_rows
        self._vocab_size = vocab_size
        self._device = device

    @classmethod
    def of(cls, states: Sequence[GrammarState | None], vocab_size: int, device: torch.device) -> "GrammarRows | None":
        """None if no row has a grammar."""
        found = {row: state for row, state in enumerate(states) if state is not None}
        return cls(found, len(states), vocab_size, device) if found else None

    def allowed(self) -> NDArray[np.int32]:
        """A bit for each token that may come next: [rows with a grammar, words of 32]."""
        words = np.zeros((len(self._states), max(state.num_words for state in self._states.values())), dtype=np.int32)
        for row, state in zip(words, self._states.values(), strict=True):
            state.fill(row)
        return words

    def ending(self) -> set[int]:
        """Rows in which only an end-of-sequence token may come next."""
        return {row for row, state in self._states.items() if state.must_end}

    def apply_(self, scores: Tensor, allowed: NDArray[np.int32]) -> None:
        """Set the scores of tokens that are not allowed to -inf. scores: [rows, vocab_size]."""
        forbidden = ~_bits(allowed, self._vocab_size, self._device)
        if self._in_every_row:
            scores.masked_fill_(forbidden, -torch.inf)
            return
        for row, each in zip(self._states, forbidden, strict=True):
            scores[row].masked_fill_(each, -torch.inf)


def _bits(words: NDArray[np.int32], count: int, device: torch.device) -> Tensor:
    """[rows, count] bool of [rows, words]."""
    if device.type == "cpu":
        bits = np.unpackbits(words.view(np.uint8), axis=1, count=count, bitorder="little")
        return torch.from_numpy(bits.view(np.bool_))
    # Copying the packed words moves a thirty-second of the bytes.
    packed = torch.from_numpy(words).to(device, non_blocking=True)
    shifts = torch.arange(32, dtype=torch.int32, device=device)
    return ((packed[:, :, None] >> shifts) & 1).bool().flatten(1)[:, :count]

"""EXL2's integer weights: each group of inputs has 2, 3, 4, 5, 6 or 8 bits.

`w = (code - 2^(bits - 1)) * scale` with `scale = step^2 * largest / 256`. A group has one `largest`, and one four-bit
`step` per output. Inputs are stored permuted. The weight is dequantized for each product: it saves memory, not time.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from reference_server.errors import UnsupportedError
from reference_server.model_server.quantization.int4 import WORD_BITS, unpack


def unpack_stream(words: Tensor, bits: int) -> Tensor:
    """Unpack consecutive integers from 32-bit words along the first dimension; an integer may span two words.

    words: [n * bits / 32, outputs], int32; returns [n, outputs], int64, n a multiple of 32.
    """
    stream = words.view(-1, bits, words.shape[1]).long() & 0xFFFFFFFF
    starts = torch.arange(0, WORD_BITS * bits, bits, device=words.device)
    word, shift = starts // WORD_BITS, (starts % WORD_BITS)[:, None]
    next_word = (word + 1).clamp(max=bits - 1)
    codes = stream[:, word] >> shift | stream[:, next_word] << WORD_BITS - shift
    return (codes & ((1 << bits) - 1)).flatten(0, 1)


@dataclass(frozen=True, slots=True)
class BitRun:
    """Adjacent groups with equal bits. `rows`: inputs of each group. `first_word`: of the first group."""

    bits: int
    first_word: int
    rows: tuple[int, ...]

    @property
    def words(self) -> slice:
        return slice(self.first_word, self.first_word + sum(self.rows) * self.bits // WORD_BITS)


def runs_of(groups: Sequence[int], num_words: int, prefix: str) -> tuple[BitRun, ...]:
    """Runs of `groups`, which lists the bits and the first word of each group.

    Raises UnsupportedError, with the linear `prefix`, if a run does not fill whole words.

    >>> runs_of([4, 0, 4, 4, 2, 8], 10, "up")
    (BitRun(bits=4, first_word=0, rows=(32, 32)), BitRun(bits=2, first_word=8, rows=(32,)))
    """
    starts = [*groups[1::2], num_words]
    sizes = [
        (bits, start, (end - start) * WORD_BITS // bits)
        for bits, (start, end) in zip(groups[::2], itertools.pairwise(starts), strict=True)
    ]
    runs = []
    for bits, same in itertools.groupby(sizes, key=lambda group: group[0]):
        members = list(same)
        runs.append(BitRun(bits, members[0][1], tuple(rows for _, _, rows in members)))
        if sum(runs[-1].rows) % WORD_BITS:
            raise UnsupportedError(
                f"{prefix}: {sum(runs[-1].rows)} adjacent inputs of {bits} bits are not supported: must be a multiple "
                f"of {WORD_BITS}"
            )
    return tuple(runs)


@dataclass(frozen=True, slots=True)
class MixedBits:
    """One weight as stored in the checkpoint.

    words: [words, outputs], int32. steps: [groups, outputs / 8], int32 of eight `step - 1`.
    largest: [groups], floating point. order: [inputs], int64: the input at each stored place.
    """

    words: Tensor
    steps: Tensor
    largest: Tensor
    order: Tensor
    runs: tuple[BitRun, ...]

    @property
    def shape(self) -> tuple[int, int]:
        return self.words.shape[1], len(self.order)

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """[outputs, inputs]"""
        stored = self.in_stored_order(torch.float32).to(dtype)
        return torch.empty_like(stored).index_copy_(1, self.order, stored)

    def product(self, dtype: torch.dtype, device: torch.device) -> "DequantizingProduct":
        """The weight in the fastest form for this device."""
        moved = replace(
            self,
            words=self.words.to(device),
            steps=self.steps.to(device),
            largest=self.largest.to(device),
            order=self.order.to(device),
        )
        return DequantizingProduct(moved, dtype)

    def in_stored_order(self, dtype: torch.dtype) -> Tensor:
        """[outputs, inputs], with inputs in stored order."""
        steps = unpack(self.steps, 4, 1).to(torch.float32) + 1
        scales = (steps * steps * (self.largest[:, None].float() / 256)).to(dtype)
        parts, first_group = [], 0
        for run in self.runs:
            words = self.words[run.words]
            codes = unpack_stream(words, run.bits) if WORD_BITS % run.bits else unpack(words, run.bits, 0)
            sizes = torch.tensor(run.rows, device=codes.device)
            run_scales = scales[first_group : first_group + len(run.rows)].repeat_interleave(sizes, 0)
            parts.append(codes.to(dtype).sub_(1 << run.bits - 1).mul_(run_scales))
            first_group += len(run.rows)
        return torch.cat(parts).t()


class DequantizingProduct:
    """Dequantizes the weight for each product."""

    kernel = "dequantize"

    def __init__(self, weight: MixedBits, dtype: torch.dtype) -> None:
        self._weight = weight
        self._dtype = dtype

    @property
    def nbytes(self) -> int:
        parts = (self._weight.words, self._weight.steps, self._weight.largest, self._weight.order)
        return sum(part.nbytes for part in parts)

    def __call__(self, rows: Tensor) -> Tensor:
        """rows: [rows, inputs]; returns [rows, outputs]."""
        return F.linear(rows[:, self._weight.order], self._weight.in_stored_order(self._dtype))

    def dequantize(self) -> Tensor:
        """[outputs, inputs]"""
        return self._weight.dequantize(self._dtype)

"""One forward as modules and kernels read it: geometry on the host, tensors on the device, the cache."""

from collections.abc import Iterator
from collections.abc import Sequence as SequenceOf
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from reference_server.model_server.adapter_rows import AdapterRows
from reference_server.model_server.memory.kv_cache import KVCache
from reference_server.model_server.sequence import Sequence
from reference_server.model_server.speculation.hidden_states import HiddenStates

IntArray = NDArray[np.int64]

Draft = tuple[int, ...]
"""Ids that may follow a sequence's last one; a step verifies them."""

NO_LONG_ROWS = torch.zeros(1, dtype=torch.int32)
"""Cumulative lengths of no rows."""


@dataclass(frozen=True, slots=True)
class StepMetadata:
    """Geometry of one packed forward, on the host. Rows of one token come first, longer rows after them.

    slots: [tokens] int64, where each token's K/V is stored. block_table: [rows, blocks] int64, padded with block 0.
    seqlen_q, seqlen_k: [rows] int64: new tokens, and tokens whose K/V exist after the store.
    num_single_rows: rows of one token, which the decode kernel attends; the prefill kernel attends the others.
    known_len: [rows] int64, each request's tokens so far; a prompt counts as a whole from its first chunk on. None if
    every row computes the last token of its request. bidirectional: [2, tokens] int64, first and end of the keys that
    each token attends to in both directions, outside of any window; None if all tokens are causal. adapters: of the
    tokens; None if none uses an adapter.
    """

    slots: IntArray
    block_table: IntArray
    seqlen_q: IntArray
    seqlen_k: IntArray
    num_single_rows: int
    known_len: IntArray | None = None
    bidirectional: IntArray | None = None
    adapters: AdapterRows | None = None

    @property
    def num_rows(self) -> int:
        return len(self.seqlen_q)

    @property
    def max_k(self) -> int:
        return int(self.seqlen_k.max())


@dataclass(frozen=True, slots=True)
class StepTensors:
    """The same geometry as tensors of the model's device, made once per step for all layers.

    slots: [tokens] int64. block_table: [rows, blocks]; seqlen_k: [rows]; both int32 on an accelerator, int64 on a CPU.
    cu_seqlen_q, cu_seqlen_k: [long rows + 1] int32, of the rows with several tokens only.
    """

    slots: Tensor
    block_table: Tensor
    seqlen_k: Tensor
    cu_seqlen_q: Tensor
    cu_seqlen_k: Tensor

    @classmethod
    def of_host(cls, metadata: StepMetadata) -> "StepTensors":
        """Views of the host arrays, for a model on the CPU."""
        cu_seqlen_q = cu_seqlen_k = NO_LONG_ROWS
        if metadata.num_single_rows < metadata.num_rows:
            long_rows = slice(metadata.num_single_rows, None)
            cu_seqlen_q = torch.from_numpy(cumulative(metadata.seqlen_q[long_rows]))
            cu_seqlen_k = torch.from_numpy(cumulative(metadata.seqlen_k[long_rows]))
        return cls(
            torch.from_numpy(metadata.slots),
            torch.from_numpy(metadata.block_table),
            torch.from_numpy(metadata.seqlen_k),
            cu_seqlen_q,
            cu_seqlen_k,
        )


@dataclass(frozen=True, slots=True, eq=False)
class AdapterSegments:
    """`AdapterRows` as tensors of the model's device: order, starts and groups, int64. rows: the same on the host."""

    rows: AdapterRows
    order: Tensor
    starts: Tensor
    groups: Tensor

    @classmethod
    def on(cls, device: torch.device, rows: AdapterRows | None) -> "AdapterSegments | None":
        """Views of the host arrays on a CPU, copies on any other device."""
        if rows is None:
            return None
        arrays = (torch.from_numpy(array) for array in (rows.order, rows.starts, rows.groups))
        return cls(rows, *(array.to(device, non_blocking=True) for array in arrays))


@dataclass(frozen=True, slots=True, eq=False)
class Step:
    """The forward in progress.

    adapters: of its tokens. kept_adapters: of the tokens that the head needs, which a fused decoder's last layer
    selects after its attention. None where no token uses an adapter.
    """

    metadata: StepMetadata
    tensors: StepTensors
    adapters: AdapterSegments | None = None
    kept_adapters: AdapterSegments | None = None


class StepState:
    """Holds the cache and the step in progress; the attention modules keep a reference to it.

    The step is held and not passed down, because several model families drop unknown keywords on the way to attention.
    """

    def __init__(self) -> None:
        self.cache: KVCache | None = None
        self.step: Step | None = None
        self.hidden: HiddenStates | None = None
        """Written by the forward if it is set, for draft heads."""

    @contextmanager
    def use(self, step: Step) -> Iterator[None]:
        """Make `step` the one that attention reads inside the block."""
        self.step = step
        try:
            yield
        finally:
            self.step = None


@dataclass(frozen=True, slots=True)
class LogitSpan:
    """Rows of the logits that belong to a sequence: those of the last `count` tokens that the forward computes.

    A row predicts the token after its own: a prompt token, whose logprob is requested, a token to choose, or the token
    that follows if a draft up to here is accepted.
    """

    sequence: Sequence
    first_row: int
    count: int

    @property
    def end_row(self) -> int:
        return self.first_row + self.count

    @property
    def next_prompt_ids(self) -> list[int]:
        """The prompt tokens that the rows predict; a row past them predicts a token to choose."""
        sequence = self.sequence
        end = sequence.cache_len + sequence.input_len
        return sequence.ids[end - self.count + 1 : min(end + 1, sequence.prompt_len)]


@dataclass(frozen=True, slots=True, eq=False)
class DecodePlan:
    """Host arrays that stay valid while the same rows decode, one token each.

    spans: one row of the logits each. block_table: [rows, most blocks of a row] int64. row_numbers: [rows], 0, 1, ...
    seqlen_q: [rows], all 1. adapters: of the rows.
    """

    rows: tuple[Sequence, ...]
    spans: tuple[LogitSpan, ...]
    block_table: IntArray
    row_numbers: IntArray
    seqlen_q: IntArray
    adapters: AdapterRows | None = None

    @classmethod
    def of(cls, rows: tuple[Sequence, ...]) -> "DecodePlan":
        spans = tuple(LogitSpan(sequence, number, 1) for number, sequence in enumerate(rows))
        ones = np.ones(len(rows), dtype=np.int64)
        return cls(rows, spans, block_table(rows), np.arange(len(rows)), ones, adapters_of(rows, ones))


def block_table(sequences: SequenceOf[Sequence]) -> IntArray:
    """[rows, most blocks of a row] int64, padded with block 0."""
    table = np.zeros((len(sequences), max(len(sequence.blocks) for sequence in sequences)), dtype=np.int64)
    for row, sequence in zip(table, sequences, strict=True):
        row[: len(sequence.blocks)] = sequence.blocks
    return table


def adapters_of(sequences: SequenceOf[Sequence], counts: IntArray) -> AdapterRows | None:
    """The adapters of `counts` tokens of each sequence; None if no sequence uses one."""
    if not any(sequence.adapter for sequence in sequences):
        return None
    return AdapterRows.of(np.repeat([sequence.adapter for sequence in sequences], counts))


def cumulative(lengths: IntArray) -> NDArray[np.int32]:
    """[rows + 1]: 0, then the running sum."""
    ends = np.zeros(len(lengths) + 1, dtype=np.int32)
    np.cumsum(lengths, out=ends[1:])
    return ends

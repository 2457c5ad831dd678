"""Planning of one packed forward: which tokens, where their K/V go, which rows give logits. Host arrays, no model."""

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from reference_server.model_server.attention.state import AttentionMetadata
from reference_server.model_server.batch import SequenceBatch
from reference_server.model_server.sequence import Sequence

IntArray = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class PromptSpan:
    """Rows of the logits that hold a sequence's prompt logprobs: its chunk's tokens that predict prompt tokens."""

    sequence: Sequence
    first_row: int
    target_ids: IntArray


@dataclass(frozen=True, slots=True)
class RaggedInputs:
    """Everything one packed forward needs.

    input_ids, positions: [tokens]; the ids are a tensor where they have not left the device.
    logits_index: [logit rows], None when every token gives logits in order.
    sampled: the sequences whose next token is chosen, in batch order; they own the first logit rows.
    prompt_spans: where prompt logprobs were asked for, after those.
    """

    input_ids: IntArray | Tensor
    positions: IntArray
    logits_index: IntArray | None
    sampled: tuple[Sequence, ...]
    prompt_spans: tuple[PromptSpan, ...]
    attention: AttentionMetadata


class Forward(Protocol):
    """Logits of what was planned."""

    def __call__(self, inputs: RaggedInputs) -> Tensor:
        """[logit rows, vocab_size], in the model's dtype."""
        ...


def build_inputs(
    batch: SequenceBatch,
    prompt_logprobs: bool,
    rows: tuple[Sequence, ...] | None = None,
    newest: Tensor | None = None,
) -> RaggedInputs:
    """Plan the next forward of `rows`, by default all live sequences of the batch.

    newest: [rows] int64, each row's last id where the host has not read it; every row takes one token then.
    """
    sequences = batch.live if rows is None else rows
    if all(sequence.input_len == 1 and sequence.finishes_prefill for sequence in sequences):
        return _decode_inputs(batch, sequences, newest)
    assert newest is None, "a prompt is known to the host"
    return _mixed_inputs(batch, sequences, prompt_logprobs)


def _decode_inputs(batch: SequenceBatch, sequences: tuple[Sequence, ...], newest: Tensor | None) -> RaggedInputs:
    """One token a row, in batch order. Tables and indices are kept while the rows are the same."""
    if batch.memo.get("decode rows") != sequences:
        batch.memo["decode rows"] = sequences
        batch.memo["tables"] = _block_table(sequences)
        batch.memo["row numbers"] = np.arange(len(sequences))
        batch.memo["ones"] = np.ones(len(sequences), dtype=np.int64)
        batch.memo["attention"] = {}
    table: IntArray = batch.memo["tables"]
    positions = np.array([sequence.cache_len for sequence in sequences], dtype=np.int64)
    block, offset = np.divmod(positions, batch.block_size)
    return RaggedInputs(
        input_ids=np.array([sequence.ids[-1] for sequence in sequences], dtype=np.int64) if newest is None else newest,
        positions=positions,
        logits_index=None,
        sampled=sequences,
        prompt_spans=(),
        attention=AttentionMetadata(
            slots=table[batch.memo["row numbers"], block] * batch.block_size + offset,
            block_table=table,
            seqlen_q=batch.memo["ones"],
            seqlen_k=positions + 1,
            num_decode_rows=len(sequences),
            batch_memo=batch.memo["attention"],
        ),
    )


def _mixed_inputs(batch: SequenceBatch, sequences: tuple[Sequence, ...], prompt_logprobs: bool) -> RaggedInputs:
    """Prompt chunks and decodes together. Rows of one token are packed first, whatever they are."""
    ordered = sorted(sequences, key=lambda sequence: sequence.input_len > 1)
    table = _block_table(ordered)
    seqlen_q = np.array([sequence.input_len for sequence in ordered], dtype=np.int64)
    cache_len = np.array([sequence.cache_len for sequence in ordered], dtype=np.int64)
    ends = np.cumsum(seqlen_q)
    row = np.repeat(np.arange(len(ordered)), seqlen_q)
    positions = np.arange(ends[-1]) - np.repeat(ends - seqlen_q, seqlen_q) + np.repeat(cache_len, seqlen_q)
    block, offset = np.divmod(positions, batch.block_size)
    input_ids = [
        token
        for sequence in ordered
        for token in sequence.ids[sequence.cache_len : sequence.cache_len + sequence.input_len]
    ]
    last_token = {id(sequence): int(end) - 1 for sequence, end in zip(ordered, ends, strict=True)}
    sampled = tuple(sequence for sequence in sequences if sequence.finishes_prefill)
    index = [last_token[id(sequence)] for sequence in sampled]
    spans = []
    for sequence in sequences:
        if not (prompt_logprobs and sequence.request.prefill_logprobs and sequence.is_prefill):
            continue
        # The last prompt token predicts the first generated one, which is not a prompt logprob.
        target = sequence.ids[sequence.cache_len + 1 : sequence.cache_len + sequence.input_len + 1]
        first_token = last_token[id(sequence)] - sequence.input_len + 1
        spans.append(PromptSpan(sequence, len(index), np.array(target, dtype=np.int64)))
        index.extend(range(first_token, first_token + len(target)))
    return RaggedInputs(
        input_ids=np.array(input_ids, dtype=np.int64),
        positions=positions,
        logits_index=np.array(index, dtype=np.int64),
        sampled=sampled,
        prompt_spans=tuple(spans),
        attention=AttentionMetadata(
            slots=table[row, block] * batch.block_size + offset,
            block_table=table,
            seqlen_q=seqlen_q,
            seqlen_k=cache_len + seqlen_q,
            num_decode_rows=int((seqlen_q == 1).sum()),
            prompt_len=np.array([sequence.prompt_len for sequence in ordered], dtype=np.int64),
        ),
    )


def _block_table(sequences: SequenceOf[Sequence]) -> IntArray:
    """[rows, most blocks of a row], padded with block 0."""
    table = np.zeros((len(sequences), max(len(sequence.blocks) for sequence in sequences)), dtype=np.int64)
    for row, sequence in zip(table, sequences, strict=True):
        row[: len(sequence.blocks)] = sequence.blocks
    return table

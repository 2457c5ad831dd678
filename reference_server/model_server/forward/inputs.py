"""Plans one packed forward: its tokens, the slots of their K/V, the rows of its logits. Host arrays, no model."""

from collections.abc import Iterator
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from torch import Tensor

from reference_server.model_server.batch import SequenceBatch
from reference_server.model_server.prompt_images import PromptImages
from reference_server.model_server.sequence import Sequence
from reference_server.model_server.step_state import (
    DecodePlan,
    Draft,
    IntArray,
    LogitSpan,
    StepMetadata,
    adapters_of,
    block_table,
)


@dataclass(frozen=True, slots=True)
class ImageRows:
    """Packed tokens that are image tokens of one prompt: those of `images` in `part`, in order.

    rows: [tokens] int64.
    """

    rows: IntArray
    images: PromptImages
    part: slice


@dataclass(frozen=True, slots=True)
class RaggedInputs:
    """Everything that one packed forward needs.

    input_ids, positions: [tokens]; the ids are a tensor if they were chosen on the device and not read yet.
    logits_index: [logit rows], None if every token gives logits, in order.
    spans: the sequences that have rows of the logits, in batch order.
    sampled: the sequences whose next token is chosen, in batch order: those of `spans` whose last row predicts it.
    plan: what stays valid while the same rows decode; None if a sequence computes several tokens.
    drafts: one for each of `sampled`; empty without drafts. Each token of a draft is a row of its own.
    images: the tokens whose embeddings are an image's.
    rotary: [3, tokens], positions on three axes for rotary embeddings; None if they are `positions`.
    """

    input_ids: IntArray | Tensor
    positions: IntArray
    logits_index: IntArray | None
    spans: tuple[LogitSpan, ...]
    sampled: tuple[Sequence, ...]
    metadata: StepMetadata
    plan: DecodePlan | None = None
    drafts: tuple[Draft, ...] = ()
    images: tuple[ImageRows, ...] = ()
    rotary: IntArray | None = None

    @property
    def sampled_rows(self) -> IntArray | None:
        """[sampled] int64: rows of the logits; None if they are all rows, in order."""
        if self.logits_index is None or len(self.logits_index) == len(self.sampled):
            return None
        assert not self.drafts, "every row of a step with drafts gives logits"
        rows = [span.end_row - 1 for span in self.spans if span.sequence.is_sampled]
        return np.array(rows, dtype=np.int64)


class Forward(Protocol):
    """Computes the logits of a planned forward."""

    def __call__(self, inputs: RaggedInputs) -> Tensor:
        """[logit rows, vocab_size], in the model's dtype."""
        ...


def build_inputs(
    batch: SequenceBatch,
    prompt_logprobs: bool,
    rows: tuple[Sequence, ...] | None = None,
    newest: Tensor | None = None,
    drafts: tuple[Draft, ...] = (),
) -> RaggedInputs:
    """Plan the next forward of `rows`, by default all live sequences of the batch.

    newest: [rows] int64, each row's last id if the host has not read it; every row computes one token then.
    drafts: one for each of `rows` of a decode step, whose ids are on the host; empty without drafts.
    """
    sequences = batch.live if rows is None else rows
    if drafts:
        return _with_drafts(batch, sequences, drafts)
    if is_decode(sequences):
        return _one_token_each(batch, sequences, newest)
    assert newest is None, "the ids of a prompt are on the host"
    return _mixed_inputs(batch, sequences, prompt_logprobs)


def is_decode(sequences: tuple[Sequence, ...]) -> bool:
    """Whether every sequence computes only its last token, and none of these is an image token."""
    return all(sequence.input_len == 1 and sequence.is_sampled and sequence.images is None for sequence in sequences)


def _one_token_each(batch: SequenceBatch, sequences: tuple[Sequence, ...], newest: Tensor | None) -> RaggedInputs:
    """One token a row and a choice for each, in batch order; the batch's plan is reused while its rows are the same."""
    plan = batch.plan if batch.plan is not None and batch.plan.rows == sequences else DecodePlan.of(sequences)
    positions = np.array([sequence.cache_len for sequence in sequences], dtype=np.int64)
    block, offset = np.divmod(positions, batch.block_size)
    return RaggedInputs(
        input_ids=np.array([sequence.ids[-1] for sequence in sequences], dtype=np.int64) if newest is None else newest,
        positions=positions,
        logits_index=None,
        spans=plan.spans,
        sampled=sequences,
        metadata=StepMetadata(
            slots=plan.block_table[plan.row_numbers, block] * batch.block_size + offset,
            block_table=plan.block_table,
            seqlen_q=plan.seqlen_q,
            seqlen_k=positions + 1,
            num_single_rows=len(sequences),
            adapters=plan.adapters,
        ),
        plan=plan,
        rotary=_rotary(sequences, positions, plan.row_numbers),
    )


def _rotary(sequences: SequenceOf[Sequence], positions: IntArray, owner: IntArray) -> IntArray | None:
    """Rotary positions of tokens behind their prompts. owner: [tokens], the number of each token's sequence."""
    if not any(sequence.grid is not None for sequence in sequences):
        return None
    shifts = np.array([0 if sequence.grid is None else sequence.grid.shift for sequence in sequences], dtype=np.int64)
    return np.broadcast_to(positions + shifts[owner], (3, len(positions))).copy()


def _with_drafts(batch: SequenceBatch, sequences: tuple[Sequence, ...], drafts: tuple[Draft, ...]) -> RaggedInputs:
    """One token a row, as in a decode step: each sequence's last token, then those of its draft.

    The rows of a sequence have one block table and growing lengths. All K/V of a layer are stored before a row attends,
    so a row reads those of the draft's tokens before it, and computes exactly the result of a separate step.
    """
    counts = np.array([1 + len(draft) for draft in drafts], dtype=np.int64)
    owner = np.repeat(np.arange(len(sequences)), counts)
    first_rows = np.cumsum(counts) - counts
    cache_len = np.array([sequence.cache_len for sequence in sequences], dtype=np.int64)
    positions = (cache_len - first_rows)[owner] + np.arange(len(owner))
    block, offset = np.divmod(positions, batch.block_size)
    known = batch.plan is not None and batch.plan.rows == sequences
    table = (batch.plan.block_table if batch.plan is not None and known else block_table(sequences))[owner]
    ids = [id_ for sequence, draft in zip(sequences, drafts, strict=True) for id_ in (sequence.ids[-1], *draft)]
    return RaggedInputs(
        input_ids=np.array(ids, dtype=np.int64),
        positions=positions,
        logits_index=None,
        spans=tuple(map(LogitSpan, sequences, first_rows.tolist(), counts.tolist())),
        sampled=sequences,
        metadata=StepMetadata(
            slots=table[np.arange(len(owner)), block] * batch.block_size + offset,
            block_table=table,
            seqlen_q=np.ones(len(owner), dtype=np.int64),
            seqlen_k=positions + 1,
            num_single_rows=len(owner),
            adapters=adapters_of(sequences, counts),
        ),
        drafts=drafts,
        rotary=_rotary(sequences, positions, owner),
    )


def _mixed_inputs(batch: SequenceBatch, sequences: tuple[Sequence, ...], prompt_logprobs: bool) -> RaggedInputs:
    """Rows of any length. Rows of one token are packed first, whether they are prompts or decodes."""
    ordered = sorted(sequences, key=lambda sequence: sequence.input_len > 1)
    table = block_table(ordered)
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
    end_of = {id(sequence): int(end) for sequence, end in zip(ordered, ends, strict=True)}
    spans: list[LogitSpan] = []
    index: list[int] = []
    for sequence in sequences:
        count = _num_logits(sequence, prompt_logprobs)
        if count:
            spans.append(LogitSpan(sequence, len(index), count))
            index.extend(range(end_of[id(sequence)] - count, end_of[id(sequence)]))
    return RaggedInputs(
        input_ids=np.array(input_ids, dtype=np.int64),
        positions=positions,
        logits_index=np.array(index, dtype=np.int64),
        spans=tuple(spans),
        sampled=tuple(span.sequence for span in spans if span.sequence.is_sampled),
        metadata=StepMetadata(
            slots=table[row, block] * batch.block_size + offset,
            block_table=table,
            seqlen_q=seqlen_q,
            seqlen_k=cache_len + seqlen_q,
            num_single_rows=int((seqlen_q == 1).sum()),
            known_len=np.array([sequence.known_len for sequence in ordered], dtype=np.int64),
            adapters=adapters_of(ordered, seqlen_q),
            bidirectional=_bidirectional(ordered, positions, ends),
        ),
        images=tuple(_image_rows(ordered, ends)),
        rotary=_mixed_rotary(ordered),
    )


def _bidirectional(ordered: list[Sequence], positions: IntArray, ends: IntArray) -> IntArray | None:
    """[2, tokens]: first and end of the keys that each token attends to in both directions; None if all are causal."""
    if all(sequence.bidirectional is None for sequence in ordered):
        return None
    spans: IntArray = np.stack((positions, positions + 1))
    for sequence, end in zip(ordered, ends, strict=True):
        if sequence.bidirectional is not None:
            computed_len = sequence.cache_len + sequence.input_len
            own = slice(int(end) - sequence.input_len, int(end))
            spans[:, own] = sequence.bidirectional[:, sequence.cache_len : computed_len]
    return spans


def _mixed_rotary(ordered: list[Sequence]) -> IntArray | None:
    if not any(sequence.grid is not None for sequence in ordered):
        return None
    parts = []
    for sequence in ordered:
        start, end = sequence.cache_len, sequence.cache_len + sequence.input_len
        own = np.broadcast_to(np.arange(start, end), (3, end - start))
        parts.append(own if sequence.grid is None else sequence.grid.between(start, end))
    return np.concatenate(parts, axis=1)


def _image_rows(ordered: list[Sequence], ends: IntArray) -> Iterator[ImageRows]:
    """ends: [sequences], the row after each one's last."""
    for sequence, end in zip(ordered, ends, strict=True):
        if sequence.images is None:
            continue
        images, computed_len = sequence.images, sequence.cache_len + sequence.input_len
        part = images.between(sequence.cache_len, computed_len)
        if part.start < part.stop:
            yield ImageRows(images.positions[part] + (int(end) - computed_len), images, part)


def _num_logits(sequence: Sequence, prompt_logprobs: bool) -> int:
    """Rows of the logits that the sequence needs: all of a chunk for prompt logprobs, else one if it is sampled."""
    if prompt_logprobs and sequence.request.prefill_logprobs and sequence.is_prefill:
        return sequence.input_len
    return int(sequence.is_sampled)

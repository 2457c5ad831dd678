"""A cached batch: an ordered list of sequences and its receipt. Joining and filtering are list work."""

from collections.abc import Hashable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from reference_server.errors import ShardError
from reference_server.messages import CachedBatch
from reference_server.model_server.sequence import Sequence


class PendingStep(Protocol):
    """A step that was launched and not read."""

    @property
    def rows(self) -> tuple[Sequence, ...]:
        """The sequences that it processes."""
        ...


@dataclass(frozen=True, slots=True)
class SequenceBatch:
    """Sequences that are stepped together. A change of membership makes a new batch.

    `pending` are the steps whose tokens nobody has asked for yet; what they hold of other sequences counts for nothing.
    `memo` keeps what is derived from the rows of a forward alone, beside those rows: block tables, the sampler's
    tensors, gather indices.
    """

    id: int
    sequences: tuple[Sequence, ...]
    block_size: int
    pending: tuple["PendingStep", ...] = ()
    memo: dict[Hashable, Any] = field(default_factory=dict)

    @classmethod
    def concatenate(cls, batches: SequenceOf["SequenceBatch"]) -> "SequenceBatch":
        """All sequences in order, under the first batch's id."""
        first = batches[0]
        merged = tuple(sequence for batch in batches for sequence in batch.sequences)
        return cls(first.id, merged, first.block_size, tuple(step for batch in batches for step in batch.pending))

    def filter(self, request_ids: SequenceOf[int]) -> "SequenceBatch":
        """Only these requests, in the given order."""
        if not request_ids:
            raise ShardError("Batch must have at least one request")
        if len(request_ids) == len(self.sequences):
            return self
        by_id = {sequence.id: sequence for sequence in self.sequences}
        unknown = [request_id for request_id in request_ids if request_id not in by_id]
        if unknown:
            raise ShardError(f"Batch ID {self.id} has no request {unknown[0]}")
        kept = tuple(by_id[request_id] for request_id in request_ids)
        return SequenceBatch(self.id, kept, self.block_size, self.pending, self.memo)

    def without(self, dropped: set[int]) -> "SequenceBatch":
        """The batch after some requests failed on their own."""
        kept = tuple(sequence for sequence in self.sequences if sequence.id not in dropped)
        return SequenceBatch(self.id, kept, self.block_size, self.pending, self.memo)

    def waiting_for(self, *steps: PendingStep) -> "SequenceBatch":
        """The same batch with these steps pending, in the place of those before."""
        return replace(self, pending=steps)

    @property
    def is_prefill(self) -> bool:
        return any(sequence.is_prefill for sequence in self.sequences)

    @property
    def live(self) -> tuple[Sequence, ...]:
        """The sequences that the next forward processes."""
        return tuple(sequence for sequence in self.sequences if not sequence.stopped)

    def receipt(self) -> CachedBatch:
        """What the router is told: the capacity reserved, and the tokens of the next forward."""
        return CachedBatch(
            id=self.id,
            request_ids=tuple(sequence.id for sequence in self.sequences),
            max_tokens=sum(len(sequence.blocks) for sequence in self.sequences) * self.block_size,
            current_tokens=sum(sequence.input_len for sequence in self.sequences),
        )


def plan_chunks(sequences: SequenceOf[Sequence], max_prefill_tokens: int) -> None:
    """Give every sequence its part of the next forward, after one in which something was in prefill.

    `max_prefill_tokens` is already a multiple of the block size. Walks from last to first, as the router does
    (grpc.md section 6.2); a sequence that has its whole prompt takes one token.
    """
    budget = max_prefill_tokens - (len(sequences) - 1)
    for sequence in reversed(sequences):
        if sequence.is_prefill:
            remaining = sequence.prompt_len - sequence.cache_len
            sequence.input_len = max(1, min(remaining, budget))
            budget -= sequence.input_len
        else:
            sequence.input_len = 1

"""A cached batch: an ordered list of sequences and its receipt. Concatenating and filtering are list work."""

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import Protocol

from reference_server.errors import ShardError
from reference_server.images.chunks import uncut
from reference_server.messages import CachedBatch
from reference_server.model_server.decoding.sampling import TokenChooser
from reference_server.model_server.sequence import Sequence
from reference_server.model_server.step_state import DecodePlan


@dataclass(frozen=True, slots=True, eq=False)
class RowChooser:
    """The token chooser of these sequences, in this order."""

    rows: tuple[Sequence, ...]
    chooser: TokenChooser


class PendingStep(Protocol):
    """A step that was launched and not read."""

    @property
    def rows(self) -> tuple[Sequence, ...]:
        """The sequences that it computes."""
        ...

    @property
    def plan(self) -> DecodePlan | None:
        """Its plan, which the next step may reuse."""
        ...

    @property
    def chooser(self) -> RowChooser | None:
        """Its chooser, which the next step may reuse."""
        ...

    @property
    def forward_ns(self) -> int:
        """The time of its launch, before the call that reads it."""
        ...


@dataclass(frozen=True, slots=True)
class SequenceBatch:
    """Sequences that are stepped together. A change of membership makes a new batch.

    `pending` are the launched steps whose tokens no call has returned yet; tokens of sequences that have left the batch
    are ignored. `plan` and `chooser` are those of the latest step, reused as long as the same rows are stepped.
    """

    id: int
    sequences: tuple[Sequence, ...]
    block_size: int
    pending: tuple[PendingStep, ...] = ()
    plan: DecodePlan | None = None
    chooser: RowChooser | None = None

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
        return self._of(tuple(by_id[request_id] for request_id in request_ids))

    def without(self, dropped: set[int]) -> "SequenceBatch":
        """The batch without requests that failed by themselves."""
        return self._of(tuple(sequence for sequence in self.sequences if sequence.id not in dropped))

    def _of(self, sequences: tuple[Sequence, ...]) -> "SequenceBatch":
        return SequenceBatch(self.id, sequences, self.block_size, self.pending, self.plan, self.chooser)

    def with_pending(self, *steps: PendingStep) -> "SequenceBatch":
        """The same batch with these pending steps instead of its own."""
        plan, chooser = self.plan, self.chooser
        for step in steps:
            plan, chooser = step.plan or plan, step.chooser or chooser
        return SequenceBatch(self.id, self.sequences, self.block_size, steps, plan, chooser)

    @property
    def live(self) -> tuple[Sequence, ...]:
        """The sequences that the next forward computes."""
        return tuple(sequence for sequence in self.sequences if not sequence.stopped)

    def receipt(self) -> CachedBatch:
        """The batch as the router sees it: the reserved capacity, and the tokens of the next forward."""
        return CachedBatch(
            id=self.id,
            request_ids=tuple(sequence.id for sequence in self.sequences),
            max_tokens=sum(len(sequence.blocks) for sequence in self.sequences) * self.block_size,
            current_tokens=sum(sequence.input_len for sequence in self.sequences),
        )


def plan_chunks(sequences: SequenceOf[Sequence], max_prefill_tokens: int) -> None:
    """Set the tokens of every sequence in the next forward, after a forward with prompts.

    `max_prefill_tokens` is a multiple of the block size. Walks from last to first, as the router does when it checks
    `current_tokens`; a sequence that has its whole prompt takes one token.
    """
    budget = max_prefill_tokens - (len(sequences) - 1)
    for sequence in reversed(sequences):
        if sequence.is_prefill:
            remaining = sequence.prompt_len - sequence.cache_len
            sequence.input_len = uncut(sequence.cache_len, max(1, min(remaining, budget)), sequence.uncut_spans)
            budget -= sequence.input_len
        else:
            sequence.input_len = 1

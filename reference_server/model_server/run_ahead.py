"""Run-ahead: step n+1 of a batch is computed while step n's reply is on its way (architecture.md, *Run-ahead*).

What is launched, and for which rows, follows from the calls and the batch alone, never from timing, so that all ranks
do the same. No token of a live sequence is lost: it stays pending under its batch until a call names that batch.
"""

from collections.abc import Sequence as SequenceOf
from collections.abc import Set
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from reference_server.messages import GrammarType
from reference_server.model_server.batch import PendingStep, SequenceBatch
from reference_server.model_server.decoding.host_copy import to_device
from reference_server.model_server.generate import Generator, Launched, StepOutput
from reference_server.model_server.sequence import Sequence


@dataclass(frozen=True, slots=True)
class FailedStep:
    """A step ahead whose forward raised. The error belongs to the call that would have returned its tokens."""

    rows: tuple[Sequence, ...]
    error: Exception


class RunAhead:
    """Steps batches, one step ahead of the calls where that is `enabled` and the batch allows it.

    launches_first: start n+1 before the ids of n are read, so that a device that computes by itself never waits. Where
    the host computes, n is read and answered first, and `launch` follows when the reply has left.
    """

    def __init__(self, generator: Generator, enabled: bool, launches_first: bool) -> None:
        self.launches_first = launches_first
        self._generator = generator
        self._enabled = enabled

    def step(self, batch: SequenceBatch) -> StepOutput:
        """The next token of every live sequence: the pending one, or else that of a forward now."""
        if not batch.live:
            return StepOutput((), None, (), 0, 0)
        steps = [_without_error(step) for step in batch.pending]
        computed = {sequence for step in steps for sequence in step.rows}
        rows = tuple(sequence for sequence in batch.live if sequence not in computed)
        if rows:
            steps.append(self._generator.launch(batch, rows))
        ahead = self._launch_unread(batch, steps) if self.launches_first else ()
        batch = batch.waiting_for(*ahead)
        output = self._generator.read(batch, steps)
        if output.batch is None:
            # Every row has ended with n, so nobody will ask for n+1.
            output = replace(output, dropped=(*output.dropped, *self.failed(batch, set(batch.sequences))))
        return output

    def launch(self, batch: SequenceBatch) -> SequenceBatch:
        """The batch with its next step pending, if it may run ahead and nothing is pending yet."""
        if batch.pending or not self._may_run_ahead(batch):
            return batch
        rows = batch.live
        return batch.waiting_for(self._launch(batch, rows)) if rows else batch

    def failed(self, batch: SequenceBatch, gone: Set[Sequence]) -> tuple[Sequence, ...]:
        """Of the sequences that leave the batch, those whose pending step went wrong. Waits for that step."""
        return tuple(
            sequence
            for step in batch.pending
            if isinstance(step, Launched)
            for sequence, failed in zip(step.sampled, step.read().failed, strict=True)
            if failed and sequence in gone
        )

    def _may_run_ahead(self, batch: SequenceBatch) -> bool:
        return self._enabled and not batch.is_prefill and not any(map(_has_grammar, batch.sequences))

    def _launch_unread(self, batch: SequenceBatch, steps: SequenceOf[Launched]) -> tuple[PendingStep, ...]:
        """Launch n+1 from ids that are on the device only; a row whose token n is its last by length is left out."""
        if not self._may_run_ahead(batch) or any(_needs_host_ids(sequence) for sequence in batch.live):
            return ()
        rows = tuple(sequence for sequence in batch.live if sequence.stopping.remaining_tokens > sequence.unread)
        if not rows:
            return ()
        for sequence in rows:
            sequence.input_len = 1
        return (self._launch(batch, rows, _newest_ids(rows, steps)),)

    def _launch(self, batch: SequenceBatch, rows: tuple[Sequence, ...], newest: Tensor | None = None) -> PendingStep:
        try:
            return self._generator.launch(batch, rows, newest)
        except Exception as error:
            return FailedStep(rows, error)


def _without_error(step: PendingStep) -> Launched:
    if isinstance(step, FailedStep):
        raise step.error
    assert isinstance(step, Launched)
    return step


def _has_grammar(sequence: Sequence) -> bool:
    parameters = sequence.request.parameters
    return parameters.grammar_type is not GrammarType.NONE and bool(parameters.grammar)


def _needs_host_ids(sequence: Sequence) -> bool:
    return sequence.request.parameters.watermark


def _newest_ids(rows: tuple[Sequence, ...], steps: SequenceOf[Launched]) -> Tensor:
    """[rows] int64 on the device: what the steps, which cover every row, chose for each."""
    choices = [step.choice.ids for step in steps if step.choice is not None]
    sampled = tuple(sequence for step in steps for sequence in step.sampled)
    ids = choices[0] if len(choices) == 1 else torch.cat(choices)
    if sampled == rows:
        return ids
    place = {sequence: number for number, sequence in enumerate(sampled)}
    index = np.array([place[sequence] for sequence in rows], dtype=np.int64)
    return ids[to_device(index, ids.device)]

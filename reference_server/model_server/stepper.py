"""One step of a batch in two halves: launch (forward and a choice per sequence) and read (tokens into sequences).

Run-ahead: step n+1 of a batch is computed while step n's reply travels to the router. The rows of n+1 depend on the
calls and the batch only, never on timing, so all ranks launch the same. No token of a live sequence is lost: it stays
pending under its batch until a call names that batch. Errors of one request's own work (its sampler, its text, logits
that are not finite) drop that request only; an error of the forward is the shard's.
"""

import enum
import logging
import math
import time
from collections.abc import Iterable, Mapping, Set
from collections.abc import Sequence as SequenceOf
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from reference_server.messages import Generation
from reference_server.model_server.batch import PendingStep, RowChooser, SequenceBatch, plan_chunks
from reference_server.model_server.decoding.host_copy import to_device
from reference_server.model_server.decoding.logits import RowParameters
from reference_server.model_server.decoding.sampling import Choice, HostChoice, PendingChoice, TokenChooser
from reference_server.model_server.decoding.watermark import Watermark
from reference_server.model_server.device import is_of_device
from reference_server.model_server.distributed import RankGroup
from reference_server.model_server.forward.inputs import Forward, build_inputs
from reference_server.model_server.generations import Generations
from reference_server.model_server.sequence import Sequence
from reference_server.model_server.step_state import DecodePlan, LogitSpan, StepState
from reference_server.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

NOTHING = nullcontext()
NO_CHUNK_LIMIT = 1 << 30
"""The chunk budget until warm-up sets it."""


class RunAhead(enum.Enum):
    """When step n+1 is launched: before the ids of n are read (an accelerator never waits), after n's reply, never."""

    BEFORE_READ = enum.auto()
    AFTER_REPLY = enum.auto()
    OFF = enum.auto()


@dataclass(frozen=True, slots=True)
class ChoosingOptions:
    """The parameters of token choice that are not a request's."""

    eos_ids: frozenset[int]
    watermark: Watermark
    prompt_logprobs: bool


@dataclass(frozen=True, slots=True)
class StepOutput:
    """The result of one step: this rank's generations, and the batch to keep; None if every request has ended.

    dropped: sequences that failed; their blocks are clean.
    """

    generations: tuple[Generation, ...]
    batch: SequenceBatch | None
    dropped: tuple[Sequence, ...]
    forward_ns: int
    decode_ns: int


@dataclass(slots=True)
class Launched:
    """A forward and its choices, which the device may still be computing.

    rows: the sequences that it computes; sampled: those of them that get a token, in the order of `choice`. forward_ns:
    the time of the launch.
    """

    rows: tuple[Sequence, ...]
    sampled: tuple[Sequence, ...]
    plan: DecodePlan | None
    choice: Choice | None
    chooser: RowChooser | None
    prompt_logprobs: tuple[tuple[Sequence, Tensor], ...]
    forward_ns: int
    _pending: PendingChoice | None = None
    _host: HostChoice | None = None

    def __post_init__(self) -> None:
        if self.choice is None:
            self._host = HostChoice([], [], [], [])
        else:
            self._pending = self.choice.send()

    def read(self) -> HostChoice:
        """Wait for the choices; later calls return the same."""
        if self._host is None:
            assert self._pending is not None
            self._host = self._pending.read()
        return self._host


@dataclass(frozen=True, slots=True)
class FailedStep:
    """A step ahead whose forward raised. The error belongs to the call that would have returned its tokens."""

    rows: tuple[Sequence, ...]
    error: Exception
    plan: None = None
    chooser: None = None
    forward_ns: int = 0


class Stepper:
    """Steps batches through a forward. `max_prefill_tokens` is the chunk budget of a step, a multiple of the block."""

    def __init__(
        self,
        forward: Forward,
        state: StepState,
        tokenizer: Tokenizer,
        group: RankGroup,
        choosing: ChoosingOptions,
        run_ahead: RunAhead,
    ) -> None:
        self.max_prefill_tokens = NO_CHUNK_LIMIT
        self.forward = forward
        self.run_ahead = run_ahead
        self._state = state
        self._group = group
        self._choosing = choosing
        self._generations = Generations(tokenizer, choosing.prompt_logprobs)

    def step(self, batch: SequenceBatch) -> StepOutput:
        """The next token of every live sequence: the pending one, or that of a forward now."""
        live = batch.live
        if not live:
            return StepOutput((), None, (), 0, 0)
        with self.no_gradients():
            steps = [_without_error(step) for step in batch.pending]
            computed = {sequence for step in steps for sequence in step.rows}
            rows = tuple(sequence for sequence in live if sequence not in computed)
            if rows:
                steps.append(self.launch(batch, rows))
            batch = batch.with_pending(*steps)
            batch = batch.with_pending(*self._launch_unread(batch, live, steps))
            output = self.read(batch, steps)
            if output.batch is None:
                # Every row has ended with n, so no call will ask for n+1.
                failed = _failed(batch, set(batch.sequences))
                output = replace(output, dropped=(*output.dropped, *failed))
            self._zero_nonfinite(output.dropped)
        return output

    def launch_ahead(self, batch: SequenceBatch) -> SequenceBatch:
        """The batch with its next step pending, if it may run ahead and nothing is pending yet.

        An error of the step is kept for the call that it belongs to.
        """
        if batch.pending or not self._may_run_ahead(batch):
            return batch
        rows = batch.live
        with self.no_gradients():
            return batch.with_pending(self._try_launch(batch, rows)) if rows else batch

    def drop(self, batch: SequenceBatch, sequences: Iterable[Sequence]) -> None:
        """Zero the non-finite K/V that a failed pending step left in the blocks of sequences that leave the batch."""
        if batch.pending:
            with self.no_gradients():
                self._zero_nonfinite(_failed(batch, set(sequences)))

    def launch(self, batch: SequenceBatch, rows: tuple[Sequence, ...], newest: Tensor | None = None) -> Launched:
        """The next forward of some of the batch's sequences and a choice for each; nothing waits for the device.

        newest: [rows] int64, each row's last id if the host has not read it.
        """
        started = time.perf_counter_ns()
        inputs = build_inputs(batch, self._choosing.prompt_logprobs, rows, newest)
        logits = self.forward(inputs)
        choice = chooser = None
        if inputs.sampled:
            sampled_rows = inputs.sampled_rows
            sampled_logits = logits if sampled_rows is None else logits[to_device(sampled_rows, logits.device)]
            choice, chooser = self._choose(batch.chooser, inputs.sampled, sampled_logits, newest)
        # A step with a plan has no prompt tokens to predict.
        spans = [span for span in inputs.spans if span.next_prompt_ids] if inputs.plan is None else []
        prompt_logprobs = tuple((span.sequence, _prompt_logprobs(span, logits)) for span in spans)
        for sequence in rows:
            sequence.cache_len += sequence.input_len
        for sequence in inputs.sampled:
            sequence.unread += 1
        launched_ns = time.perf_counter_ns() - started
        return Launched(rows, inputs.sampled, inputs.plan, choice, chooser, prompt_logprobs, launched_ns)

    def read(self, batch: SequenceBatch, steps: SequenceOf[Launched]) -> StepOutput:
        """Append the tokens of launched steps to the batch's sequences; tokens of other sequences are ignored."""
        forward_ns = sum(step.forward_ns for step in steps)
        waiting = time.perf_counter_ns()
        choices = [step.read() for step in steps]
        started = time.perf_counter_ns()
        members = {sequence for sequence in batch.sequences if not sequence.stopped}
        generations: dict[int, Generation] = {}
        dropped: list[Sequence] = []
        for step, chosen in zip(steps, choices, strict=True):
            for sequence, logprobs in step.prompt_logprobs:
                sequence.prompt_logprobs.extend(logprobs.tolist())
            self._append(step.sampled, chosen, members, generations, dropped)
        kept = batch.without({sequence.id for sequence in dropped}) if dropped else batch
        if any(step.plan is None for step in steps):
            plan_chunks(kept.sequences, self.max_prefill_tokens)
        is_over = all(sequence.stopped for sequence in kept.sequences)
        return StepOutput(
            generations=_in_order(batch, generations),
            batch=None if is_over else kept,
            dropped=tuple(dropped),
            forward_ns=forward_ns + started - waiting,
            decode_ns=time.perf_counter_ns() - started,
        )

    def no_gradients(self) -> AbstractContextManager[object]:
        """Inference mode; with several ranks only no gradients, because inference mode breaks gloo's collectives.

        Nothing to enter in a thread that computes none anyway: a context of torch costs 3 us.
        """
        if not torch.is_grad_enabled():
            return NOTHING
        return torch.inference_mode() if self._group.world_size == 1 else torch.no_grad()

    def _may_run_ahead(self, batch: SequenceBatch) -> bool:
        if self.run_ahead is RunAhead.OFF:
            return False
        return not any(sequence.grammar is not None or sequence.is_prefill for sequence in batch.sequences)

    def _launch_unread(
        self, batch: SequenceBatch, live: tuple[Sequence, ...], steps: SequenceOf[Launched]
    ) -> tuple[PendingStep, ...]:
        """Launch n+1 from ids on the device, without the rows whose token n is their last by length."""
        if self.run_ahead is not RunAhead.BEFORE_READ or not self._may_run_ahead(batch):
            return ()
        if any(sequence.request.parameters.watermark for sequence in live):
            # A watermark needs the newest id on the host.
            return ()
        rows = tuple(sequence for sequence in live if sequence.stopping.remaining_tokens > sequence.unread)
        if not rows:
            return ()
        for sequence in rows:
            sequence.input_len = 1
        return (self._try_launch(batch, rows, _newest_ids(rows, steps)),)

    def _try_launch(
        self, batch: SequenceBatch, rows: tuple[Sequence, ...], newest: Tensor | None = None
    ) -> PendingStep:
        try:
            return self.launch(batch, rows, newest)
        except Exception as error:
            return FailedStep(rows, error)

    def _choose(
        self, known: RowChooser | None, sampled: tuple[Sequence, ...], logits: Tensor, newest: Tensor | None
    ) -> tuple[Choice, RowChooser | None]:
        """One token per sampled sequence, the same on every rank, and the chooser: `known` for the same rows."""
        chooser = known
        try:
            if chooser is None or chooser.rows != sampled:
                chooser = RowChooser(sampled, self._make_chooser(sampled, logits))
            choice = chooser.chooser.choose(logits, [sequence.ids for sequence in sampled], newest)
        except Exception as error:
            if is_of_device(error):
                raise
            logger.exception("choosing tokens failed for a batch of %d; each row is tried alone", len(sampled))
            choice, chooser = self._choose_alone(sampled, logits, newest), None
        return self._agree(choice) if self._group.world_size > 1 else choice, chooser

    def _choose_alone(self, sampled: tuple[Sequence, ...], logits: Tensor, newest: Tensor | None) -> Choice:
        """Row by row, so that only the requests whose own sampler fails are lost."""
        choices = []
        for row, sequence in enumerate(sampled):
            own = None if newest is None else newest[row : row + 1]
            try:
                chooser = self._make_chooser((sequence,), logits)
                choice = chooser.choose(logits[row : row + 1], [sequence.ids], own)
            except Exception as error:
                if is_of_device(error):
                    raise
                logger.exception("request %d: its sampler failed", sequence.id)
                nothing = torch.zeros(1, dtype=torch.int64, device=logits.device)
                choice = Choice(nothing, torch.full((1,), math.nan, device=logits.device))
            choices.append(choice)
        return Choice.of_rows(choices)

    def _make_chooser(self, sampled: tuple[Sequence, ...], logits: Tensor) -> TokenChooser:
        rows = [RowParameters.of(sequence.request, sequence.prompt_len, sequence.grammar) for sequence in sampled]
        return TokenChooser(rows, logits.shape[1], self._choosing.eos_ids, logits.device, self._choosing.watermark)

    def _agree(self, choice: Choice) -> Choice:
        """Rank 0's choices and failures on every rank; the logits of two ranks may differ in the last bit."""
        failed_as_negative = torch.where(choice.logprobs.isfinite(), choice.ids, -1)
        ids = self._group.broadcast(failed_as_negative)
        logprobs = torch.where(ids < 0, math.nan, choice.logprobs.nan_to_num())
        return replace(choice, ids=ids.clamp(min=0), logprobs=logprobs)

    def _append(
        self,
        sampled: tuple[Sequence, ...],
        chosen: HostChoice,
        members: Set[Sequence],
        generations: dict[int, Generation],
        dropped: list[Sequence],
    ) -> None:
        """Append each member's token: fills this rank's generations, and the sequences that failed."""
        for row, sequence in enumerate(sampled):
            sequence.unread -= 1
            if sequence not in members:
                continue
            try:
                if chosen.failed[row]:
                    raise ArithmeticError("no token could be chosen: its logits are not finite, or its sampler failed")
                generation = self._generations.append(
                    sequence, chosen.ids[row], chosen.logprobs[row], chosen.top_tokens[row]
                )
            except Exception:
                logger.exception("request %d is dropped: its own work failed", sequence.id)
                dropped.append(sequence)
                continue
            if self._group.owns(sequence.id):
                generations[sequence.id] = generation

    def _zero_nonfinite(self, sequences: SequenceOf[Sequence]) -> None:
        for sequence in sequences:
            assert self._state.cache is not None
            self._state.cache.zero_nonfinite(sequence.blocks)


def _without_error(step: PendingStep) -> Launched:
    if isinstance(step, FailedStep):
        raise step.error
    assert isinstance(step, Launched)
    return step


def _failed(batch: SequenceBatch, sequences: Set[Sequence]) -> tuple[Sequence, ...]:
    """Those of `sequences` whose pending step gave no token. Waits for that step."""
    return tuple(
        sequence
        for step in batch.pending
        if isinstance(step, Launched)
        for sequence, failed in zip(step.sampled, step.read().failed, strict=True)
        if failed and sequence in sequences
    )


def _newest_ids(rows: tuple[Sequence, ...], steps: SequenceOf[Launched]) -> Tensor:
    """[rows] int64 on the device: the choice for each row in `steps`, which cover every row."""
    choices = [step.choice.ids for step in steps if step.choice is not None]
    sampled = tuple(sequence for step in steps for sequence in step.sampled)
    ids = choices[0] if len(choices) == 1 else torch.cat(choices)
    if sampled == rows:
        return ids
    numbers = {sequence: number for number, sequence in enumerate(sampled)}
    index = np.array([numbers[sequence] for sequence in rows], dtype=np.int64)
    return ids[to_device(index, ids.device)]


def _in_order(batch: SequenceBatch, generations: Mapping[int, Generation]) -> tuple[Generation, ...]:
    return tuple(generations[sequence.id] for sequence in batch.sequences if sequence.id in generations)


def _prompt_logprobs(span: LogitSpan, logits: Tensor) -> Tensor:
    """Log-softmax of the raw logits at each next prompt token: [prompt tokens that the span predicts]."""
    targets = to_device(span.next_prompt_ids, logits.device)
    rows = logits[span.first_row : span.first_row + len(targets)].float()
    return rows.gather(1, targets[:, None])[:, 0] - rows.logsumexp(-1)

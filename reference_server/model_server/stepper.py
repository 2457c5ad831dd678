"""One step of a batch in two halves: launch (forward and a choice per sequence) and read (tokens into sequences).

Run-ahead: step n+1 of a batch is computed while step n's reply travels to the router. The rows of n+1 depend on the
calls and the batch only, never on timing, so all ranks launch the same. No token of a live sequence is lost: it stays
pending under its batch until a call names that batch. Errors of one request's own work (its sampler, its text, logits
that are not finite) drop that request only; an error of the forward is the shard's.
"""

import enum
import logging
import time
from collections.abc import Iterable, Iterator, Mapping, Set
from collections.abc import Sequence as SequenceOf
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from itertools import repeat

import numpy as np
import torch
from torch import Tensor

from reference_server.messages import DraftCounts, Generation
from reference_server.model_server.batch import PendingStep, RowChooser, SequenceBatch, plan_chunks
from reference_server.model_server.decoding.host_copy import to_device
from reference_server.model_server.decoding.sampling import Choice, HostChoice, PendingChoice
from reference_server.model_server.distributed import RankGroup
from reference_server.model_server.drafting import Drafter, count_by_place
from reference_server.model_server.forward.inputs import Forward, build_inputs, is_decode
from reference_server.model_server.generations import Generations, joined
from reference_server.model_server.sequence import Sequence
from reference_server.model_server.speculation.hidden_states import HiddenRow, HiddenStates
from reference_server.model_server.step_state import DecodePlan, Draft, LogitSpan, StepState
from reference_server.model_server.token_choice import ChoiceRows, ChoosingOptions, TokenChoice
from reference_server.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

NOTHING = nullcontext()
NO_DRAFTS = DraftCounts()
REPORTED_TOKENS = 256
"""Tokens without a draft after which they are reported."""
NO_CHUNK_LIMIT = 1 << 30
"""The chunk budget until warm-up sets it."""


class RunAhead(enum.Enum):
    """When step n+1 is launched: before the ids of n are read (an accelerator never waits), after n's reply, never."""

    BEFORE_READ = enum.auto()
    AFTER_REPLY = enum.auto()
    OFF = enum.auto()


@dataclass(frozen=True, slots=True)
class StepOutput:
    """The result of one step: this rank's generations, and the batch to keep; None if every request has ended.

    dropped: sequences that failed; their blocks are clean. drafts: verified in this step.
    """

    generations: tuple[Generation, ...]
    batch: SequenceBatch | None
    dropped: tuple[Sequence, ...]
    forward_ns: int
    decode_ns: int
    drafts: DraftCounts = NO_DRAFTS


@dataclass(slots=True)
class Launched:
    """A forward and its choices, which the device may still be computing.

    rows: the sequences that it computes; sampled: those of them that get a token, in the order of `choice`. drafts: of
    `sampled`; `choice` then has a row for each of their tokens too. hidden: what the output head read for each row of
    `choice`, if draft heads may need it. forward_ns: the time of the launch.
    """

    rows: tuple[Sequence, ...]
    sampled: tuple[Sequence, ...]
    drafts: tuple[Draft, ...]
    plan: DecodePlan | None
    choice: Choice | None
    chooser: RowChooser | None
    prompt_logprobs: tuple[tuple[Sequence, Tensor], ...]
    hidden: Tensor | None
    forward_ns: int
    _pending: PendingChoice | None = None
    _host: HostChoice | None = None

    @property
    def has_prompts(self) -> bool:
        """Whether it computes tokens of a prompt."""
        return self.plan is None and not self.drafts

    def first_rows(self) -> Iterator[tuple[Sequence, Draft, int]]:
        """Each sampled sequence with its draft and its first row of the choice."""
        first = 0
        for sequence, draft in zip(self.sampled, self.drafts or repeat(()), strict=False):
            yield sequence, draft, first
            first += 1 + len(draft)

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
class _Reading:
    """The results of the steps that one call reads. members: live sequences of its batch. verified: of each draft, the
    tokens accepted and all."""

    members: Set[Sequence]
    generations: dict[int, Generation] = field(default_factory=dict)
    dropped: list[Sequence] = field(default_factory=list)
    verified: list[tuple[int, int]] = field(default_factory=list)


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
        drafter: Drafter | None = None,
    ) -> None:
        self.max_prefill_tokens = NO_CHUNK_LIMIT
        self.forward = forward
        self.run_ahead = run_ahead
        self.drafter = drafter
        self._state = state
        self._group = group
        self._prompt_logprobs = choosing.prompt_logprobs
        self._choice = TokenChoice(choosing, group)
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
                # Every row has ended with n, so no call will request n+1.
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
        drafts = self._drafts(rows) if newest is None else ()
        inputs = build_inputs(batch, self._prompt_logprobs, rows, newest, drafts)
        kept = self._kept_hidden(inputs.sampled)
        logits = self.forward(inputs)
        choice = chooser = hidden = None
        if inputs.sampled:
            sampled_rows = inputs.sampled_rows
            index = None if sampled_rows is None else to_device(sampled_rows, logits.device)
            sampled_logits = logits if index is None else logits[index]
            if kept is not None:
                hidden = kept.rows if kept.rows is None or index is None else kept.rows[index]
            of_rows = ChoiceRows.with_drafts(inputs.sampled, drafts) if drafts else ChoiceRows.of(inputs.sampled)
            choice, chooser = self._choice.choose(batch.chooser, of_rows, sampled_logits, newest)
        # A decode step has no prompt tokens to predict.
        has_prompts = inputs.plan is None and not drafts
        spans = [span for span in inputs.spans if span.next_prompt_ids] if has_prompts else []
        prompt_logprobs = tuple((span.sequence, _prompt_logprobs(span, logits)) for span in spans)
        for sequence in rows:
            sequence.cache_len += sequence.input_len
            if not sequence.is_prefill:
                sequence.images = sequence.bidirectional = None
        for sequence in inputs.sampled:
            sequence.unread += 1
        launched_ns = time.perf_counter_ns() - started
        return Launched(
            rows, inputs.sampled, drafts, inputs.plan, choice, chooser, prompt_logprobs, hidden, launched_ns
        )

    def read(self, batch: SequenceBatch, steps: SequenceOf[Launched]) -> StepOutput:
        """Append the tokens of launched steps to the batch's sequences; tokens of other sequences are ignored."""
        forward_ns = sum(step.forward_ns for step in steps)
        waiting = time.perf_counter_ns()
        choices = [step.read() for step in steps]
        started = time.perf_counter_ns()
        reading = _Reading({sequence for sequence in batch.sequences if not sequence.stopped})
        for step, chosen in zip(steps, choices, strict=True):
            for sequence, logprobs in step.prompt_logprobs:
                sequence.prompt_logprobs.extend(logprobs.tolist())
            self._append(step, chosen, reading)
        dropped = reading.dropped
        kept = batch.without({sequence.id for sequence in dropped}) if dropped else batch
        if any(step.has_prompts for step in steps):
            plan_chunks(kept.sequences, self.max_prefill_tokens)
        is_over = all(sequence.stopped for sequence in kept.sequences)
        return StepOutput(
            generations=_in_order(batch, reading.generations),
            batch=None if is_over else kept,
            dropped=tuple(dropped),
            forward_ns=forward_ns + started - waiting,
            decode_ns=time.perf_counter_ns() - started,
            drafts=NO_DRAFTS if self.drafter is None else self._draft_counts(self.drafter, reading.verified, is_over),
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
        if self.drafter is not None and not self.drafter.skips_next(live):
            # Drafts follow the newest ids, so the next step is launched after these are read.
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

    def _kept_hidden(self, sampled: tuple[Sequence, ...]) -> HiddenStates | None:
        """The hidden states of the next forward if the step after it may look for drafts of these rows."""
        kept = self._state.hidden
        if kept is None:
            return None
        kept.is_read = bool(sampled) and self.drafter is not None and self.drafter.may_look(sampled)
        return kept if kept.is_read else None

    def _drafts(self, rows: tuple[Sequence, ...]) -> tuple[Draft, ...]:
        """Drafts for a decode step of these rows; a step with prompts has none."""
        if self.drafter is None:
            return ()
        if is_decode(rows):
            return self.drafter.propose(rows)
        self.drafter.with_prompts(sum(not sequence.is_prefill for sequence in rows))
        return ()

    def _draft_counts(self, drafter: Drafter, verified: SequenceOf[tuple[int, int]], is_over: bool) -> DraftCounts:
        """The drafts of a step. Tokens without one are reported now and then, as each report costs some us."""
        undrafted = drafter.take_undrafted(0 if is_over else REPORTED_TOKENS)
        if verified:
            return replace(count_by_place(verified), undrafted=undrafted)
        return DraftCounts(undrafted=undrafted) if undrafted else NO_DRAFTS

    def _append(self, step: Launched, chosen: HostChoice, reading: "_Reading") -> None:
        """Append each member's tokens."""
        for sequence, draft, first in step.first_rows():
            sequence.unread -= 1
            if sequence not in reading.members:
                continue
            try:
                if chosen.failed[first]:
                    raise ArithmeticError("no token could be chosen: its logits are not finite, or its sampler failed")
                generation = self._generations.append_choice(sequence, chosen, first)
                last = first
                if draft:
                    accepted = self._append_accepted(sequence, draft, chosen, first)
                    reading.verified.append((len(accepted), len(draft)))
                    generation = joined([generation, *accepted])
                    last += len(accepted)
                if step.hidden is not None:
                    sequence.hidden = HiddenRow(step.hidden, last, len(sequence.ids))
            except Exception:
                logger.exception("request %d is dropped: its own work failed", sequence.id)
                reading.dropped.append(sequence)
                continue
            if self._group.owns(sequence.id):
                reading.generations[sequence.id] = generation

    def _append_accepted(self, sequence: Sequence, draft: Draft, chosen: HostChoice, first: int) -> list[Generation]:
        """Append the token after each token of the draft, as long as it is the one that was chosen."""
        generations: list[Generation] = []
        for row, drafted in enumerate(draft, first):
            if sequence.stopped or chosen.ids[row] != drafted or chosen.failed[row + 1]:
                break
            sequence.cache_len += 1
            generations.append(self._generations.append_choice(sequence, chosen, row + 1))
        if self.drafter is not None:
            self.drafter.verified(sequence, len(generations), len(draft))
        if any(chosen.failed[first : first + 1 + len(draft)]):
            # The K/V of a refused token stay until they are overwritten.
            self._zero_nonfinite((sequence,))
        return generations

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
        for sequence, draft, first in step.first_rows()
        if sequence in sequences and any(step.read().failed[first : first + 1 + len(draft)])
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

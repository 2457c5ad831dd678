"""One step of a batch in two halves: launch (forward, a choice per sequence) and read (text and stopping work).

Errors of one request's own work (its sampler, its text, logits that are not finite) drop that request alone; what
escapes the forward is the shard's.
"""

import logging
import math
import time
from collections.abc import Mapping, Set
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from reference_server.messages import GeneratedText, Generation, Tokens
from reference_server.model_server.batch import SequenceBatch, plan_chunks
from reference_server.model_server.decoding.detokenize import final_text
from reference_server.model_server.decoding.host_copy import to_device
from reference_server.model_server.decoding.logits import RowParameters
from reference_server.model_server.decoding.sampling import (
    Choice,
    ChoiceOnItsWay,
    HostChoice,
    TokenChooser,
    TopTokens,
)
from reference_server.model_server.decoding.watermark import Watermark
from reference_server.model_server.device import is_of_device
from reference_server.model_server.distributed import RankGroup
from reference_server.model_server.forward.inputs import Forward, PromptSpan, build_inputs
from reference_server.model_server.sequence import Sequence
from reference_server.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

NO_CHUNK_LIMIT = 1 << 30
"""The chunk budget until warm-up sets it."""


@dataclass(frozen=True, slots=True)
class StepOutput:
    """What one step gave: this rank's generations, and the batch to keep; None when every request has ended."""

    generations: tuple[Generation, ...]
    batch: SequenceBatch | None
    dropped: tuple[Sequence, ...]
    forward_ns: int
    decode_ns: int


@dataclass(frozen=True, slots=True)
class ChoosingOptions:
    """What choosing tokens needs beside the requests' own parameters."""

    eos_ids: frozenset[int]
    watermark: Watermark
    prompt_logprobs: bool


@dataclass(slots=True)
class Launched:
    """A forward and its choices, which may still be under way on the device.

    rows: the sequences that it processes; sampled: those of them that get a token, in the order of `choice`.
    is_mixed: whether prompts were among them. `forward_ns` is what launching took.
    """

    rows: tuple[Sequence, ...]
    sampled: tuple[Sequence, ...]
    is_mixed: bool
    choice: Choice | None
    prompt_logprobs: tuple[tuple[Sequence, Tensor], ...]
    forward_ns: int
    _copy: ChoiceOnItsWay | None = None
    _host: HostChoice | None = None

    def __post_init__(self) -> None:
        if self.choice is None:
            self._host = HostChoice([], [], [], [])
        else:
            self._copy = self.choice.send()

    def read(self) -> HostChoice:
        """Wait for the choices; later calls give the same."""
        if self._host is None:
            assert self._copy is not None
            self._host = self._copy.read()
        return self._host


class Generator:
    """Steps batches through a forward. `max_prefill_tokens` is the chunk budget of a step, a block multiple."""

    def __init__(self, forward: Forward, tokenizer: Tokenizer, group: RankGroup, choosing: ChoosingOptions) -> None:
        self.max_prefill_tokens = NO_CHUNK_LIMIT
        self._forward = forward
        self._tokenizer = tokenizer
        self._group = group
        self._choosing = choosing

    def launch(self, batch: SequenceBatch, rows: tuple[Sequence, ...], newest: Tensor | None = None) -> Launched:
        """The next forward of some of the batch's sequences and a choice for each; nothing waits for the device.

        newest: [rows] int64, each row's last id where the host has not read it.
        """
        started = time.perf_counter_ns()
        inputs = build_inputs(batch, self._choosing.prompt_logprobs, rows, newest)
        logits = self._forward(inputs)
        choice = self._choose(batch, inputs.sampled, logits[: len(inputs.sampled)], newest) if inputs.sampled else None
        prompt_logprobs = tuple((span.sequence, _prompt_logprobs(span, logits)) for span in inputs.prompt_spans)
        for sequence in rows:
            sequence.cache_len += sequence.input_len
        for sequence in inputs.sampled:
            sequence.unread += 1
        launched_ns = time.perf_counter_ns() - started
        return Launched(rows, inputs.sampled, inputs.logits_index is not None, choice, prompt_logprobs, launched_ns)

    def read(self, batch: SequenceBatch, steps: SequenceOf[Launched]) -> StepOutput:
        """Take the tokens of launched steps into the batch's sequences; those of others are dropped."""
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
        if any(step.is_mixed for step in steps):
            plan_chunks(kept.sequences, self.max_prefill_tokens)
        over = all(sequence.stopped for sequence in kept.sequences)
        return StepOutput(
            generations=tuple(generations.values()) if len(steps) == 1 else _in_order(batch, generations),
            batch=None if over else kept,
            dropped=tuple(dropped),
            forward_ns=forward_ns + started - waiting,
            decode_ns=time.perf_counter_ns() - started,
        )

    def _choose(
        self, batch: SequenceBatch, sampled: tuple[Sequence, ...], logits: Tensor, newest: Tensor | None
    ) -> Choice:
        """One token per sampled sequence, the same on every rank."""
        try:
            choice = self._chooser(batch, sampled, logits).choose(
                logits, [sequence.ids for sequence in sampled], newest
            )
        except Exception as error:
            if is_of_device(error):
                raise
            logger.exception("choosing tokens failed for a batch of %d; each row is tried alone", len(sampled))
            choice = self._choose_alone(sampled, logits, newest)
        return self._agree(choice) if self._group.world_size > 1 else choice

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

    def _agree(self, choice: Choice) -> Choice:
        """Rank 0's choices and failures on every rank, whose own logits may differ in the last bit."""
        failed_as_negative = torch.where(choice.logprobs.isfinite(), choice.ids, -1)
        ids = self._group.broadcast(failed_as_negative)
        logprobs = torch.where(ids < 0, math.nan, choice.logprobs.nan_to_num())
        return replace(choice, ids=ids.clamp(min=0), logprobs=logprobs)

    def _chooser(self, batch: SequenceBatch, sampled: tuple[Sequence, ...], logits: Tensor) -> TokenChooser:
        """The batch's chooser, made anew when other sequences are sampled than in the step before."""
        known, chooser = batch.memo.get("chooser", (None, None))
        if known != sampled:
            chooser = self._make_chooser(sampled, logits)
            batch.memo["chooser"] = sampled, chooser
        assert isinstance(chooser, TokenChooser)
        return chooser

    def _make_chooser(self, sampled: tuple[Sequence, ...], logits: Tensor) -> TokenChooser:
        rows = [RowParameters.of(sequence.request, sequence.prompt_len, sequence.grammar) for sequence in sampled]
        return TokenChooser(rows, logits.shape[1], self._choosing.eos_ids, logits.device, self._choosing.watermark)

    def _append(
        self,
        sampled: tuple[Sequence, ...],
        chosen: HostChoice,
        members: Set[Sequence],
        generations: dict[int, Generation],
        dropped: list[Sequence],
    ) -> None:
        """Add each member's token to its sequence: this rank's generations, and the sequences that failed."""
        for row, sequence in enumerate(sampled):
            sequence.unread -= 1
            if sequence not in members:
                continue
            try:
                if chosen.failed[row]:
                    raise ArithmeticError("no token could be chosen: its logits are not finite, or its sampler failed")
                generation = self._advance(sequence, chosen.ids[row], chosen.logprobs[row], chosen.top_tokens[row])
            except Exception:
                logger.exception("request %d is dropped: its own work failed", sequence.id)
                dropped.append(sequence)
                continue
            if self._group.owns(sequence.id):
                generations[sequence.id] = generation

    def _advance(self, sequence: Sequence, token_id: int, logprob: float, top: TopTokens) -> Generation:
        """Append one token. Every rank does the text work of every request, so that all ranks stop alike."""
        was_prefill = len(sequence.ids) == sequence.prompt_len
        text = sequence.detokenizer.append(token_id)
        reason = sequence.stopping.finish_reason(token_id, text)
        sequence.ids.append(token_id)
        if sequence.grammar is not None:
            sequence.grammar.accept(token_id)
        generated_text = None
        if reason is not None:
            sequence.stopped = True
            parameters = sequence.request.parameters
            generated_text = GeneratedText(
                text=final_text(self._tokenizer, sequence.ids, sequence.prompt_len),
                generated_tokens=sequence.stopping.num_tokens,
                finish_reason=reason,
                seed=parameters.seed if parameters.samples else None,
            )
        return Generation(
            request_id=sequence.id,
            tokens=Tokens((token_id,), (logprob,), (text,), (token_id in self._tokenizer.special_ids,)),
            prefill_tokens=self._prefill_tokens(sequence) if was_prefill else None,
            generated_text=generated_text,
            top_tokens=(self._tokens_of(top),) if sequence.request.top_n_tokens else (),
        )

    def _prefill_tokens(self, sequence: Sequence) -> Tokens | None:
        """The prompt's tokens; those before the first computed one, and that one itself, have no logprob."""
        if not (self._choosing.prompt_logprobs and sequence.request.prefill_logprobs):
            return None
        ids = tuple(sequence.ids[: sequence.prompt_len])
        unknown = (math.nan,) * (len(ids) - len(sequence.prompt_logprobs))
        texts = tuple(self._tokenizer.text_of(id_) for id_ in ids)
        return Tokens(ids, unknown + tuple(sequence.prompt_logprobs), texts)

    def _tokens_of(self, top: TopTokens) -> Tokens:
        ids, logprobs = top
        texts = tuple(self._tokenizer.text_of(id_) for id_ in ids)
        return Tokens(tuple(ids), tuple(logprobs), texts, tuple(id_ in self._tokenizer.special_ids for id_ in ids))


def _in_order(batch: SequenceBatch, generations: Mapping[int, Generation]) -> tuple[Generation, ...]:
    return tuple(generations[sequence.id] for sequence in batch.sequences if sequence.id in generations)


def _prompt_logprobs(span: PromptSpan, logits: Tensor) -> Tensor:
    """Log-softmax of the raw logits at each next prompt token: [rows of the span]."""
    rows = logits[span.first_row : span.first_row + len(span.target_ids)].float()
    targets = to_device(span.target_ids, rows.device)
    return rows.gather(1, targets[:, None])[:, 0] - rows.logsumexp(-1)

"""One step of a batch: forward, choose a token per sequence, then the text and stopping work of each request.

Errors of one request's own work (its sampler, its text, logits that are not finite) drop that request alone; what
escapes the forward is the shard's.
"""

import logging
import math
import time
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from reference_server.messages import GeneratedText, Generation, Tokens
from reference_server.model_server.batch import SequenceBatch, plan_chunks
from reference_server.model_server.decoding.detokenize import final_text
from reference_server.model_server.decoding.logits import RowParameters
from reference_server.model_server.decoding.sampling import HostChoice, TokenChooser, TopTokens
from reference_server.model_server.decoding.watermark import Watermark
from reference_server.model_server.distributed import RankGroup
from reference_server.model_server.forward.inputs import PromptSpan, build_inputs
from reference_server.model_server.forward.ragged import RaggedForward
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


class Generator:
    """Steps batches through a forward. `max_prefill_tokens` is the chunk budget of a step, a block multiple."""

    def __init__(
        self, forward: RaggedForward, tokenizer: Tokenizer, group: RankGroup, choosing: ChoosingOptions
    ) -> None:
        self.max_prefill_tokens = NO_CHUNK_LIMIT
        self._forward = forward
        self._tokenizer = tokenizer
        self._group = group
        self._choosing = choosing

    def step(self, batch: SequenceBatch) -> StepOutput:
        """Run the next forward of the batch and move every sequence on."""
        started = time.perf_counter_ns()
        if not batch.live:
            return StepOutput((), None, (), 0, 0)
        was_prefill = batch.is_prefill
        inputs = build_inputs(batch, self._choosing.prompt_logprobs)
        logits = self._forward(inputs)
        chosen = self._choose(batch, inputs.sampled, logits[: len(inputs.sampled)])
        prompt_logprobs = [_prompt_logprobs(span, logits) for span in inputs.prompt_spans]
        forwarded = time.perf_counter_ns()
        for sequence in batch.live:
            sequence.cache_len += sequence.input_len
        for span, logprobs in zip(inputs.prompt_spans, prompt_logprobs, strict=True):
            span.sequence.prompt_logprobs.extend(logprobs)
        generations, dropped = self._append(inputs.sampled, chosen)
        kept = batch.without({sequence.id for sequence in dropped}) if dropped else batch
        if was_prefill:
            plan_chunks(kept.sequences, self.max_prefill_tokens)
        over = all(sequence.stopped for sequence in kept.sequences)
        return StepOutput(
            generations=tuple(generations),
            batch=None if over else kept,
            dropped=tuple(dropped),
            forward_ns=forwarded - started,
            decode_ns=time.perf_counter_ns() - forwarded,
        )

    def _choose(self, batch: SequenceBatch, sampled: tuple[Sequence, ...], logits: Tensor) -> HostChoice:
        """One token per sampled sequence; the step's one wait for the device."""
        if not sampled:
            return HostChoice([], [], [], [])
        try:
            choice = self._chooser(batch, sampled, logits).choose(logits, [sequence.ids for sequence in sampled])
            host = choice.to_host()
        except Exception:
            logger.exception("choosing tokens failed for a batch of %d; each row is tried alone", len(sampled))
            host = self._choose_alone(sampled, logits)
        return self._agree(host) if self._group.world_size > 1 else host

    def _choose_alone(self, sampled: tuple[Sequence, ...], logits: Tensor) -> HostChoice:
        """Row by row, so that only the requests whose own sampler fails are lost."""
        together = HostChoice([], [], [], [])
        for row, sequence in enumerate(sampled):
            try:
                alone = self._make_chooser((sequence,), logits).choose(logits[row : row + 1], [sequence.ids]).to_host()
            except Exception:
                logger.exception("request %d: its sampler failed", sequence.id)
                alone = HostChoice([0], [math.nan], [True], [([], [])])
            together.ids.extend(alone.ids)
            together.logprobs.extend(alone.logprobs)
            together.failed.extend(alone.failed)
            together.top_tokens.extend(alone.top_tokens)
        return together

    def _agree(self, host: HostChoice) -> HostChoice:
        """Rank 0's choices and failures on every rank, whose own logits may differ in the last bit."""
        failed_as_negative = [-1 if failed else id_ for id_, failed in zip(host.ids, host.failed, strict=True)]
        ids = self._group.broadcast(torch.tensor(failed_as_negative)).tolist()
        return replace(host, ids=ids, failed=[id_ < 0 for id_ in ids])

    def _chooser(self, batch: SequenceBatch, sampled: tuple[Sequence, ...], logits: Tensor) -> TokenChooser:
        """The batch's chooser, made anew when other sequences are sampled than in the step before."""
        members = tuple(sequence.id for sequence in sampled)
        known, chooser = batch.memo.get("chooser", (None, None))
        if known != members:
            chooser = self._make_chooser(sampled, logits)
            batch.memo["chooser"] = members, chooser
        assert isinstance(chooser, TokenChooser)
        return chooser

    def _make_chooser(self, sampled: tuple[Sequence, ...], logits: Tensor) -> TokenChooser:
        rows = [RowParameters.of(sequence.request, sequence.prompt_len) for sequence in sampled]
        return TokenChooser(rows, logits.shape[1], self._choosing.eos_ids, logits.device, self._choosing.watermark)

    def _append(self, sampled: tuple[Sequence, ...], chosen: HostChoice) -> tuple[list[Generation], list[Sequence]]:
        """Add each chosen token to its sequence: this rank's generations, and the sequences that failed."""
        generations, dropped = [], []
        for row, sequence in enumerate(sampled):
            try:
                if chosen.failed[row]:
                    raise ArithmeticError("no token could be chosen: its logits are not finite, or its sampler failed")
                generation = self._advance(sequence, chosen.ids[row], chosen.logprobs[row], chosen.top_tokens[row])
            except Exception:
                logger.exception("request %d is dropped: its own work failed", sequence.id)
                dropped.append(sequence)
                continue
            if self._group.owns(sequence.id):
                generations.append(generation)
        return generations, dropped

    def _advance(self, sequence: Sequence, token_id: int, logprob: float, top: TopTokens) -> Generation:
        """Append one token. Every rank does the text work of every request, so that all ranks stop alike."""
        was_prefill = len(sequence.ids) == sequence.prompt_len
        text = sequence.detokenizer.append(token_id)
        reason = sequence.stopping.finish_reason(token_id, text)
        sequence.ids.append(token_id)
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


def _prompt_logprobs(span: PromptSpan, logits: Tensor) -> list[float]:
    """Log-softmax of the raw logits at each next prompt token."""
    rows = logits[span.first_row : span.first_row + len(span.target_ids)].float()
    targets = torch.from_numpy(span.target_ids).to(rows.device)
    picked = rows.gather(1, targets[:, None])[:, 0] - rows.logsumexp(-1)
    logprobs: list[float] = picked.tolist()
    return logprobs

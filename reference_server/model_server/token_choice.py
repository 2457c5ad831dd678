"""Chooses a token for each row of a step's logits, the same on every rank."""

import logging
import math
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, replace
from itertools import accumulate

import torch
from torch import Tensor

from reference_server.model_server.batch import RowChooser
from reference_server.model_server.cpu_kernels import build
from reference_server.model_server.decoding.grammar import GrammarState
from reference_server.model_server.decoding.logits import RowParameters
from reference_server.model_server.decoding.sampling import Choice, GreedyOperator, TokenChooser
from reference_server.model_server.decoding.watermark import Watermark
from reference_server.model_server.device import is_of_device
from reference_server.model_server.distributed import RankGroup
from reference_server.model_server.sequence import Sequence
from reference_server.model_server.speculation.drafted_ids import DraftedIds
from reference_server.model_server.step_state import Draft

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ChoosingOptions:
    """The parameters of token choice that are not a request's."""

    eos_ids: frozenset[int]
    watermark: Watermark
    prompt_logprobs: bool


@dataclass(frozen=True, slots=True)
class ChoiceRows:
    """The rows of a step's logits, one token each: the sequence, its ids before the token, and its grammar's state.

    counts: the rows of each sequence; empty without drafts.
    """

    sequences: tuple[Sequence, ...]
    ids: list[SequenceOf[int]]
    grammars: list[GrammarState | None]
    counts: tuple[int, ...] = ()

    @classmethod
    def of(cls, sequences: tuple[Sequence, ...]) -> "ChoiceRows":
        """The next token of each sequence."""
        return cls(sequences, [each.ids for each in sequences], [each.grammar for each in sequences])

    @classmethod
    def with_drafts(cls, sequences: tuple[Sequence, ...], drafts: tuple[Draft, ...]) -> "ChoiceRows":
        """The next token of each sequence, and then the token after each token of its draft."""
        owners: list[Sequence] = []
        ids: list[SequenceOf[int]] = []
        grammars: list[GrammarState | None] = []
        for sequence, draft in zip(sequences, drafts, strict=True):
            owners.extend([sequence] * (1 + len(draft)))
            ids.append(sequence.ids)
            ids.extend(DraftedIds(sequence.ids, draft, 1 + place) for place in range(len(draft)))
            grammar = sequence.grammar
            grammars.append(grammar)
            grammars.extend(
                None if grammar is None else grammar.after(draft[: 1 + place]) for place in range(len(draft))
            )
        return cls(tuple(owners), ids, grammars, tuple(1 + len(draft) for draft in drafts))

    @property
    def without_drafts(self) -> "ChoiceRows":
        """The first row of each sequence."""
        firsts = [end - count for end, count in zip(accumulate(self.counts), self.counts, strict=True)]
        return ChoiceRows(
            tuple(self.sequences[row] for row in firsts),
            [self.ids[row] for row in firsts],
            [self.grammars[row] for row in firsts],
        )

    def row(self, number: int) -> "ChoiceRows":
        return ChoiceRows((self.sequences[number],), [self.ids[number]], [self.grammars[number]])


class TokenChoice:
    """Chooses tokens for the rows of a step."""

    def __init__(self, options: ChoosingOptions, group: RankGroup) -> None:
        self._options = options
        self._group = group

    def choose(
        self, known: RowChooser | None, rows: ChoiceRows, logits: Tensor, newest: Tensor | None
    ) -> tuple[Choice, RowChooser | None]:
        """One token per row, the same on every rank, and the chooser of the sequences: `known` for the same ones."""
        chooser = known
        try:
            if rows.counts:
                choice, chooser = self._choose_with_drafts(known, rows, logits)
            else:
                chooser = self._chooser(known, rows, logits)
                choice = chooser.chooser.choose(logits, rows.ids, newest)
        except Exception as error:
            if is_of_device(error):
                raise
            logger.exception("choosing tokens failed for a batch of %d; each row is tried alone", len(rows.ids))
            choice, chooser = self._choose_alone(rows, logits, newest), None
        return self._agree(choice) if self._group.world_size > 1 else choice, chooser

    def _choose_with_drafts(
        self, known: RowChooser | None, rows: ChoiceRows, logits: Tensor
    ) -> tuple[Choice, RowChooser]:
        """The choices, and the chooser of the sequences, which has seen no draft.

        The rows differ in each step, so a chooser of them all is built only if that of the sequences does not do.
        """
        chooser = self._chooser(known, rows.without_drafts, logits)
        own = chooser.chooser.repeated(rows.counts) or self._make_chooser(rows, logits)
        choice = own.choose(logits, rows.ids)
        return choice, chooser

    def _chooser(self, known: RowChooser | None, rows: ChoiceRows, logits: Tensor) -> RowChooser:
        """`known` if it is of the same sequences, else a new one."""
        if known is not None and known.rows == rows.sequences:
            return known
        return RowChooser(rows.sequences, self._make_chooser(rows, logits))

    def _choose_alone(self, rows: ChoiceRows, logits: Tensor, newest: Tensor | None) -> Choice:
        """Row by row, so that only the requests whose own sampler fails are lost."""
        choices = []
        for number, sequence in enumerate(rows.sequences):
            own = None if newest is None else newest[number : number + 1]
            row = rows.row(number)
            try:
                choice = self._make_chooser(row, logits).choose(logits[number : number + 1], row.ids, own)
            except Exception as error:
                if is_of_device(error):
                    raise
                logger.exception("request %d: its sampler failed", sequence.id)
                nothing = torch.zeros(1, dtype=torch.int64, device=logits.device)
                choice = Choice(nothing, torch.full((1,), math.nan, device=logits.device))
            choices.append(choice)
        return Choice.of_rows(choices)

    def _make_chooser(self, rows: ChoiceRows, logits: Tensor) -> TokenChooser:
        parameters = [
            RowParameters.of(sequence.request, sequence.prompt_len, grammar)
            for sequence, grammar in zip(rows.sequences, rows.grammars, strict=True)
        ]
        return TokenChooser(
            *(parameters, logits.shape[1], self._options.eos_ids, logits.device, self._options.watermark),
            _greedy_operator(logits),
        )

    def _agree(self, choice: Choice) -> Choice:
        """Rank 0's choices and failures on every rank; the logits of two ranks may differ in the last bit."""
        failed_as_negative = torch.where(choice.logprobs.isfinite(), choice.ids, -1)
        ids = self._group.broadcast(failed_as_negative)
        logprobs = torch.where(ids < 0, math.nan, choice.logprobs.nan_to_num())
        return replace(choice, ids=ids.clamp(min=0), logprobs=logprobs)


def _greedy_operator(logits: Tensor) -> GreedyOperator | None:
    """The compiled one for these logits, if there is one."""
    kernels = build.kernels() if logits.is_cpu and logits.dtype in (torch.float32, torch.bfloat16) else None
    operator: GreedyOperator | None = None if kernels is None else kernels.greedy.default
    return operator

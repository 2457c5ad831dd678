"""Sources of drafts: their protocol, and n-grams. draft_heads/source.py has those of draft heads."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from typing import TYPE_CHECKING, Protocol

from reference_server.model_server.speculation.ngram import (
    NGRAM_PRIORS,
    FirstMatch,
    NgramRule,
    SuffixIndex,
)
from reference_server.model_server.speculation.proposed_draft import ProposedDraft

if TYPE_CHECKING:
    from reference_server.model_server.sequence import Sequence


class DraftSource(Protocol):
    """Proposes the next tokens of sequences."""

    @property
    def priors(self) -> SequenceOf[float]:
        """Assumed acceptance of a token of each level, before outcomes are known."""
        ...

    def propose(self, sequences: SequenceOf[Sequence], counts: SequenceOf[int], /) -> list[ProposedDraft]:
        """For each sequence at most `counts` ids that may follow, or none. The result is the same on every rank."""
        ...


class NgramSource:
    """Drafts from the request's own prompt and output. The level of a token is the length of the match."""

    def __init__(self, rule: NgramRule) -> None:
        self._ngrams = FirstMatch if rule is NgramRule.TGI else SuffixIndex

    @property
    def priors(self) -> SequenceOf[float]:
        return NGRAM_PRIORS

    def propose(self, sequences: SequenceOf[Sequence], counts: SequenceOf[int], /) -> list[ProposedDraft]:
        """The ids after an earlier occurrence of each sequence's last ids."""
        return [self._of(sequence, count) for sequence, count in zip(sequences, counts, strict=True)]

    def _of(self, sequence: Sequence, count: int) -> ProposedDraft:
        if sequence.ngrams is None:
            sequence.ngrams = self._ngrams()
        draft = sequence.ngrams.draft(sequence.ids, count)
        return ProposedDraft(draft.ids, [draft.match_len] * len(draft.ids))

"""Proposes drafts for the next decode step: for which sequences, and how many tokens each."""

from collections.abc import Sequence as SequenceOf
from typing import Protocol

from reference_server.messages import DraftCounts
from reference_server.model_server.sequence import Sequence
from reference_server.model_server.speculation.acceptance import DraftHistory, overall_rates
from reference_server.model_server.speculation.draft_lengths import DraftCandidate, can_pay, draft_lengths
from reference_server.model_server.speculation.ngram import NgramDraft, NgramRule, SuffixIndex, first_match
from reference_server.model_server.speculation.step_cost import StepCost
from reference_server.model_server.step_state import Draft

MOST_VERIFIED_ROWS = 128
"""Rows of a step with drafts, as in TGI: beyond, the logits would need memory that no warm-up has measured."""


NO_CANDIDATE = DraftCandidate(0.0, 0)


class DraftSource(Protocol):
    """Guesses the next tokens of a sequence."""

    def draft(self, sequence: Sequence, count: int, /) -> NgramDraft:
        """At most `count` ids that may follow the sequence's; none without a guess."""
        ...


class Drafter:
    """Drafts of at most `speculate` tokens a sequence.

    A draft never needs K/V past those of a request of full length: its last token could only be verified by a token
    that is not generated any more. kv_border: a request that grows past this length gets its K/V again
    (forward/long_rope.py), so no draft crosses it; None without such a border.

    cost: with it, a draft is only as long as is expected to pay; None verifies every draft. The estimates are counts of
    tokens, and the cost is the same on all ranks, so all ranks propose the same.
    """

    def __init__(self, source: DraftSource, speculate: int, kv_border: int | None = None) -> None:
        self._source = source
        self._speculate = speculate
        self._kv_border = kv_border
        self._cost: StepCost | None = None
        self._can_pay: dict[int, bool] = {}
        self._overall = overall_rates()

    @property
    def cost(self) -> StepCost | None:
        return self._cost

    @cost.setter
    def cost(self, cost: StepCost | None) -> None:
        self._cost = cost
        self._can_pay.clear()

    def can_pay(self, num_rows: int) -> bool:
        """Whether a step of so many sequences may have drafts."""
        if self._cost is None:
            return num_rows < MOST_VERIFIED_ROWS
        known = self._can_pay.get(num_rows)
        if known is None:
            known = self._can_pay[num_rows] = can_pay(num_rows, self._speculate, self._cost)
        return known

    def propose(self, rows: SequenceOf[Sequence]) -> tuple[Draft, ...]:
        """A draft for each sequence, whose ids are all on the host; empty if no sequence has one."""
        if not self.can_pay(len(rows)):
            return ()
        if self._cost is not None:
            return self._paying_drafts(rows, self._cost)
        room = MOST_VERIFIED_ROWS - len(rows)
        drafts: list[Draft] = []
        for sequence in rows:
            draft = tuple(self._draft(sequence).ids[:room])
            room -= len(draft)
            drafts.append(draft)
        return tuple(drafts) if any(drafts) else ()

    def verified(self, sequence: Sequence, num_accepted: int, num_verified: int) -> None:
        """Report the result of a sequence's draft."""
        if sequence.draft_history is not None:
            sequence.draft_history.verified(num_accepted, num_verified)

    def _draft(self, sequence: Sequence) -> NgramDraft:
        draft = self._source.draft(sequence, max(0, self._most(sequence)))
        if sequence.grammar is not None and draft.ids:
            return NgramDraft(draft.ids[: sequence.grammar.count_allowed(draft.ids)], draft.match_len)
        return draft

    def _most(self, sequence: Sequence) -> int:
        """Tokens that can be accepted beside the one that the step chooses anyway."""
        count = min(self._speculate, sequence.stopping.remaining_tokens - 1)
        if self._kv_border is not None and sequence.cache_len < self._kv_border:
            count = min(count, self._kv_border - sequence.cache_len - 1)
        return count

    def _paying_drafts(self, rows: SequenceOf[Sequence], cost: StepCost) -> tuple[Draft, ...]:
        """Drafts of the lengths that pay; the first token of a draft that is left out is compared all the same."""
        looked_at = [row for row, sequence in enumerate(rows) if self._is_due(sequence)]
        if not looked_at:
            return ()
        candidates = [NO_CANDIDATE] * len(rows)
        drafts = {row: self._draft(rows[row]) for row in looked_at}
        for row, draft in drafts.items():
            sequence, history = rows[row], rows[row].draft_history
            assert history is not None
            history.settle(sequence.ids)
            rate, samples = history.rate(draft.match_len), sequence.request.parameters.samples
            candidates[row] = DraftCandidate(rate, len(draft.ids), sequence.cache_len, samples)
        lengths = draft_lengths(candidates, cost)
        for row, draft in drafts.items():
            history, num_ids = rows[row].draft_history, len(rows[row].ids)
            assert history is not None
            if lengths[row]:
                history.drafted(draft.match_len)
                continue
            history.pause(num_ids)
            if draft.ids:
                history.guess(num_ids, draft.ids[0], draft.match_len)
        if not any(lengths):
            return ()
        return tuple([tuple(drafts[row].ids[:length]) if length else () for row, length in enumerate(lengths)])

    def _is_due(self, sequence: Sequence) -> bool:
        history = sequence.draft_history
        if history is None:
            sequence.draft_history = DraftHistory(self._overall)
            return True
        return len(sequence.ids) >= history.look_at


def count_by_place(verified: SequenceOf[tuple[int, int]]) -> DraftCounts:
    """Drafts by the places of their tokens. verified: of each draft, the tokens accepted and all.

    >>> count_by_place([(1, 3), (2, 2)])
    DraftCounts(proposed=(2, 2, 1), accepted=(2, 1, 0))
    """
    places = range(max(length for _, length in verified))
    return DraftCounts(
        proposed=tuple(sum(length > place for _, length in verified) for place in places),
        accepted=tuple(sum(accepted > place for accepted, _ in verified) for place in places),
    )


class NgramSource:
    """Drafts from the request's own prompt and output."""

    def __init__(self, rule: NgramRule) -> None:
        self._rule = rule

    def draft(self, sequence: Sequence, count: int) -> NgramDraft:
        if self._rule is NgramRule.TGI:
            return first_match(sequence.ids, count)
        if sequence.suffixes is None:
            sequence.suffixes = SuffixIndex()
        return sequence.suffixes.draft(sequence.ids, count)

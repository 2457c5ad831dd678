"""Proposes drafts for the next decode step: for which sequences, and how many tokens each.

The tuner's simulator runs the same rule without tensors, so modules with tensors are imported for types only.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from typing import TYPE_CHECKING, Protocol

from reference_server.messages import DraftCounts, NoDraft
from reference_server.model_server.speculation.acceptance import DraftHistory, overall_rates
from reference_server.model_server.speculation.draft_budget import DraftBudget
from reference_server.model_server.speculation.draft_lengths import (
    DraftCandidate,
    can_pay,
    draft_lengths,
    expected_tokens,
)
from reference_server.model_server.speculation.look_times import LONGEST_PAUSE, LookTimes, longest_pause
from reference_server.model_server.speculation.look_value import OVERALL_DECAY, LookValue
from reference_server.model_server.speculation.ngram import (
    NGRAM_PRIORS,
    NgramDraft,
    NgramRule,
    SuffixIndex,
    first_match,
)
from reference_server.model_server.speculation.proposed_draft import ProposedDraft
from reference_server.model_server.speculation.step_cost import StepCost

if TYPE_CHECKING:
    from reference_server.model_server.sequence import Sequence
    from reference_server.model_server.step_state import Draft

MOST_VERIFIED_ROWS = 128
"""Rows of a step with drafts, as in TGI: beyond, the logits would need memory that no warm-up has measured."""


NO_CANDIDATE = DraftCandidate(())


class DraftSource(Protocol):
    """Guesses the next tokens of sequences."""

    @property
    def priors(self) -> SequenceOf[float]:
        """The chance of a token of each level to be accepted, before anything is known."""
        ...

    def propose(self, sequences: SequenceOf[Sequence], counts: SequenceOf[int], /) -> list[ProposedDraft]:
        """For each sequence at most `counts` ids that may follow; none without a guess. The same on every rank."""
        ...


class Drafter:
    """Drafts of at most `speculate` tokens a sequence.

    A draft never needs K/V past those of a request of full length: its last token could only be verified by a token
    that is not generated any more. kv_border: a request that grows past this length gets its K/V again
    (forward/long_rope.py), so no draft crosses it; None without such a border.

    cost: with it, a draft is only as long as is expected to pay, and the time that drafts lose is limited; None
    verifies every draft. The estimates are counts of tokens, and the cost is the same on all ranks, so all ranks
    propose the same.
    """

    def __init__(self, source: DraftSource, speculate: int, kv_border: int | None = None) -> None:
        self.source = source
        self.speculate = speculate
        self._kv_border = kv_border
        self._cost: StepCost | None = None
        self._can_pay: dict[int, bool] = {}
        self._overall = overall_rates(source.priors)
        self._budget = DraftBudget()
        self._looks = LookTimes()
        self._look_value = LookValue(decay=OVERALL_DECAY)
        self._saved_by_token_ns = 0.0
        self._undrafted = dict.fromkeys(NoDraft, 0)

    @property
    def cost(self) -> StepCost | None:
        return self._cost

    @cost.setter
    def cost(self, cost: StepCost | None) -> None:
        self._cost = cost
        self._can_pay.clear()
        self._overall = overall_rates(self.source.priors)
        self._budget = DraftBudget()
        self._looks = LookTimes()
        self._look_value = LookValue(decay=OVERALL_DECAY)

    def pays(self, num_rows: int) -> bool:
        """Whether a step of so many sequences may have drafts."""
        if self._cost is None:
            return num_rows < MOST_VERIFIED_ROWS
        known = self._can_pay.get(num_rows)
        if known is None:
            known = self._can_pay[num_rows] = can_pay(num_rows, self.speculate, self._cost)
        return known

    def may_look(self, rows: SequenceOf[Sequence]) -> bool:
        """Whether the step after those counted so far, of these rows, may look for drafts."""
        return self.pays(len(rows)) and (self._cost is None or not self._looks.rests(rows))

    def skips_next(self, rows: SequenceOf[Sequence]) -> bool:
        """Whether the next step of these sequences has no drafts, whatever their newest ids are; counts that step."""
        if not self.pays(len(rows)):
            self.leave_out(NoDraft.BATCH, len(rows))
            return True
        if self._cost is None:
            return False
        if not self._looks.rests(rows) and self._due(rows, self._cost):
            return False
        self._step_without_look(len(rows), self._cost)
        return True

    def propose(self, rows: SequenceOf[Sequence]) -> tuple[Draft, ...]:
        """A draft for each sequence, whose ids are all on the host; empty if no sequence has one."""
        if not self.pays(len(rows)):
            self.leave_out(NoDraft.BATCH, len(rows))
            return ()
        if self._cost is not None:
            return self._adapted(rows, self._cost)
        room = MOST_VERIFIED_ROWS - len(rows)
        drafts: list[Draft] = []
        for proposal in self._proposals(rows):
            draft = tuple(proposal.ids[:room])
            room -= len(draft)
            if proposal.ids and not draft:
                self.leave_out(NoDraft.BATCH, 1)
            drafts.append(draft)
        return tuple(drafts) if any(drafts) else ()

    def look(self, rows: SequenceOf[Sequence], due: SequenceOf[int], cost: StepCost) -> tuple[Draft, ...]:
        """The drafts of these rows that pay; the first token of a draft that is left out is compared all the same."""
        num_rows = len(rows)
        plain_ns, look_ns = cost.plain_ns(num_rows), cost.proposing_ns(len(due))
        self._budget.decoded(plain_ns)
        self._budget.add(-look_ns)
        self.leave_out(NoDraft.COST, num_rows - len(due))
        found = self._proposals([rows[row] for row in due])
        num_right = sum(self._history(rows[row]).settle(rows[row].ids) for row in due)
        if 2 * num_right >= len(due):
            self._looks.look_again()
        token_ns = self._token_ns(rows, cost)
        lengths, values = self._lengths(rows, due, found, look_ns, token_ns, cost)
        longest = longest_pause(cost.proposing_ns(1), plain_ns)
        pays = False
        drafts: list[Draft] = [()] * num_rows
        for row, length, value, (ids, levels) in zip(due, lengths, values, found, strict=True):
            history, num_ids = self._history(rows[row]), len(rows[row].ids)
            self._look_value.add(value)
            pays |= history.looked(value, num_ids, longest)
            if length:
                history.drafted(levels)
                drafts[row] = tuple(ids[:length])
            elif ids:
                self.leave_out(NoDraft.COST, 1)
                history.guess(num_ids, ids[0], levels[0])
        self._looks.looked(pays, longest_pause(look_ns, plain_ns))
        if not any(lengths):
            return ()
        self._saved_by_token_ns = token_ns
        return tuple(drafts)

    def leave_out(self, reason: NoDraft, num_tokens: int) -> None:
        """Count tokens that are chosen without a draft."""
        self._undrafted[reason] += num_tokens

    def take_undrafted(self, least: int = 0) -> tuple[int, ...]:
        """The tokens chosen without a draft since the last call, if these are at least so many; else nothing."""
        if sum(self._undrafted.values()) < max(1, least):
            return ()
        counts = tuple(self._undrafted.values())
        self._undrafted = dict.fromkeys(NoDraft, 0)
        return counts

    def verified(self, sequence: Sequence, num_accepted: int, num_verified: int) -> None:
        """Report the result of a sequence's draft."""
        self._budget.add(num_accepted * self._saved_by_token_ns)
        if self._cost is not None and sequence.draft_history is not None:
            sequence.draft_history.verified(num_accepted, num_verified)

    def _proposals(self, rows: SequenceOf[Sequence]) -> list[ProposedDraft]:
        """A proposal for each sequence, as far as its grammar allows."""
        counts = [max(0, self._most(sequence)) for sequence in rows]
        proposals = self.source.propose(rows, counts)
        for row, (sequence, (ids, levels)) in enumerate(zip(rows, proposals, strict=True)):
            if not ids:
                self.leave_out(NoDraft.NO_GUESS if counts[row] else NoDraft.END, 1)
            elif sequence.grammar is not None:
                allowed = sequence.grammar.count_allowed(ids)
                proposals[row] = ProposedDraft(ids[:allowed], levels[:allowed])
                if not allowed:
                    self.leave_out(NoDraft.GRAMMAR, 1)
        return proposals

    def _most(self, sequence: Sequence) -> int:
        """Tokens that can be accepted beside the one that the step chooses anyway."""
        count = min(self.speculate, sequence.stopping.remaining_tokens - 1)
        if self._kv_border is not None and sequence.cache_len < self._kv_border:
            count = min(count, self._kv_border - sequence.cache_len - 1)
        return count

    def _adapted(self, rows: SequenceOf[Sequence], cost: StepCost) -> tuple[Draft, ...]:
        """Drafts of the lengths that pay, if any are to be looked for in this step."""
        due = [] if self._looks.rests(rows) else self._due(rows, cost)
        if not due:
            self._step_without_look(len(rows), cost)
            return ()
        drafts = self.look(rows, due, cost)
        self._looks.stepped()
        return drafts

    def _step_without_look(self, num_rows: int, cost: StepCost) -> None:
        self._looks.stepped()
        self._budget.decoded(cost.plain_ns(num_rows))
        self.leave_out(NoDraft.COST, num_rows)

    def _due(self, rows: SequenceOf[Sequence], cost: StepCost) -> list[int]:
        """The rows to look for drafts of, as far as the budget allows."""
        waits = [
            0 if history is None else history.look_at - sequence.known_len
            for sequence, history in ((sequence, sequence.draft_history) for sequence in rows)
        ]
        due = [row for row, wait in enumerate(waits) if wait <= 0]
        if not due:
            self._looks.none_due(rows, min(waits))
            return []
        # A look is of use only if one of its drafts can be verified then.
        needed_ns = cost.proposing_ns(len(due)) + cost.added_ns(len(rows), self.speculate)
        plain_ns = cost.plain_ns(len(rows))
        self._budget.start(plain_ns)
        if self._budget.allows(needed_ns):
            return due
        self._looks.wait(min(LONGEST_PAUSE, self._budget.steps_until(needed_ns, plain_ns)))
        return []

    def _lengths(
        self,
        rows: SequenceOf[Sequence],
        due: SequenceOf[int],
        found: SequenceOf[ProposedDraft],
        look_ns: float,
        token_ns: float,
        cost: StepCost,
    ) -> tuple[list[int], list[float]]:
        """The tokens to verify of each proposal, which the budget pays; and the value of each row's look.

        The time of the look is spent in any case, so it makes no draft worse: a step without one has it too. It lowers
        the value of the look, which is the number of plain tokens that the row is expected to save by it.
        """
        look_tokens = look_ns / len(due) / token_ns
        nothing = [0] * len(due)
        if not any(ids for ids, _ in found):
            return nothing, [-look_tokens] * len(due)
        candidates = [NO_CANDIDATE] * len(rows)
        for row, (_, levels) in zip(due, found, strict=True):
            sequence, history = rows[row], self._history(rows[row])
            rates = [history.rate(level) for level in levels]
            candidates[row] = DraftCandidate(rates, sequence.cache_len, sequence.request.parameters.samples)
        lengths = draft_lengths(candidates, cost, spent_ns=look_ns)
        added_ns = self._added_ns(candidates, lengths, cost)
        added_tokens = added_ns / token_ns / max(1, sum(lengths))
        values = [
            expected_tokens(candidates[row].rates[: lengths[row]]) - lengths[row] * added_tokens - look_tokens
            for row in due
        ]
        if not self._budget.allows(added_ns):
            return nothing, values
        self._budget.add(-added_ns)
        return [lengths[row] for row in due], values

    def _token_ns(self, rows: SequenceOf[Sequence], cost: StepCost) -> float:
        """The time of one token of a step without drafts, with its keys and its sampling."""
        keys = sum(sequence.cache_len for sequence in rows)
        num_sampled = sum(sequence.request.parameters.samples for sequence in rows)
        row_ns = keys * cost.key_ns + num_sampled * cost.sampled_row_ns
        return (cost.plain_ns(len(rows)) + row_ns) / len(rows)

    def _added_ns(self, candidates: SequenceOf[DraftCandidate], lengths: SequenceOf[int], cost: StepCost) -> float:
        """The time of verifying these drafts, beside the step."""
        drafted = list(zip(candidates, lengths, strict=True))
        keys = sum(length * each.num_keys for each, length in drafted)
        num_sampled = sum(length * each.is_sampled for each, length in drafted)
        return cost.added_ns(len(candidates), sum(lengths), keys, num_sampled) if any(lengths) else 0.0

    def _history(self, sequence: Sequence) -> DraftHistory:
        if sequence.draft_history is None:
            sequence.draft_history = DraftHistory(self._overall, self._look_value.mean)
        return sequence.draft_history


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
    """Drafts from the request's own prompt and output. The level of a token is the length of the match."""

    def __init__(self, rule: NgramRule) -> None:
        self._rule = rule

    @property
    def priors(self) -> SequenceOf[float]:
        return NGRAM_PRIORS

    def propose(self, sequences: SequenceOf[Sequence], counts: SequenceOf[int], /) -> list[ProposedDraft]:
        """The ids after an earlier occurrence of each sequence's last ones."""
        return [self._of(sequence, count) for sequence, count in zip(sequences, counts, strict=True)]

    def _of(self, sequence: Sequence, count: int) -> ProposedDraft:
        draft = self._draft(sequence, count)
        return ProposedDraft(draft.ids, [draft.match_len] * len(draft.ids))

    def _draft(self, sequence: Sequence, count: int) -> NgramDraft:
        if self._rule is NgramRule.TGI:
            return first_match(sequence.ids, count)
        if sequence.suffixes is None:
            sequence.suffixes = SuffixIndex()
        return sequence.suffixes.draft(sequence.ids, count)

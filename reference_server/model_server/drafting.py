"""Proposes drafts for the next decode step: selects the sequences and the lengths of their drafts.

The tuner's simulator runs the same rule without tensors, so modules with tensors are imported for types only.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from typing import TYPE_CHECKING

from reference_server.messages import DraftCounts, NoDraft
from reference_server.model_server.draft_sources import DraftSource
from reference_server.model_server.speculation.acceptance import OVERALL_DECAY, DraftHistory, overall_rates
from reference_server.model_server.speculation.decayed_mean import DecayedMean
from reference_server.model_server.speculation.draft_budget import DraftBudget
from reference_server.model_server.speculation.draft_lengths import (
    DraftCandidate,
    added_ns,
    can_pay,
    draft_lengths,
    expected_tokens,
    token_ns,
)
from reference_server.model_server.speculation.look_times import LONGEST_PAUSE, LookTimes, longest_pause
from reference_server.model_server.speculation.proposed_draft import ProposedDraft
from reference_server.model_server.speculation.step_cost import StepCost
from reference_server.model_server.speculation.step_runs import (
    COLD_STEPS,
    FEWEST_PLAIN,
    LEAST_GAIN,
    REFRESH,
    RUN,
    TRIAL,
    DraftRun,
    PlainSpeed,
    Progress,
    Rest,
)

if TYPE_CHECKING:
    from reference_server.model_server.sequence import Sequence
    from reference_server.model_server.step_state import Draft

MOST_VERIFIED_ROWS = 128
"""Largest number of rows of a step with drafts, as in TGI: the warm-up does not measure the memory of more logits."""


class Drafter:
    """Drafts of at most `speculate` tokens a sequence.

    A draft never needs more K/V than a request of full length: the token that would verify its last token is not
    generated any more. kv_border: the K/V of a request that grows past this length are computed again
    (forward/long_rope.py), so no draft crosses it; None without such a border.

    cost: limits the length of a draft to the tokens that are expected to save time, and limits the time that drafts
    lose; None verifies every draft. The estimates are counts of tokens, and the cost is the same on all ranks, so all
    ranks propose the same drafts.

    clock: in ns. With it, a request that is alone has drafts as long as the measured time of its steps shows that they
    save time. None for several ranks, because their times differ, and for a device that computes asynchronously.
    """

    def __init__(
        self,
        source: DraftSource,
        speculate: int,
        kv_border: int | None = None,
        clock: Callable[[], int] | None = None,
    ) -> None:
        self.source = source
        self.speculate = speculate
        self.clock = clock
        self._kv_border = kv_border
        self._num_runs = 0
        self._saved_by_token_ns = 0.0
        self._undrafted = dict.fromkeys(NoDraft, 0)
        self._num_undrafted = 0
        self.cost = None

    @property
    def cost(self) -> StepCost | None:
        return self._cost

    @cost.setter
    def cost(self, cost: StepCost | None) -> None:
        """Resets all estimates, because they depend on the cost."""
        self._cost = cost
        self._can_pay: dict[int, bool] = {}
        self._rest = Rest()
        self._run: DraftRun | None = None
        self._speed = PlainSpeed()
        self._overall = overall_rates(self.source.priors)
        self._budget = DraftBudget()
        self._looks = LookTimes()
        self._look_value = DecayedMean(0.0, OVERALL_DECAY)

    def pays(self, num_rows: int) -> bool:
        """Whether a step of this many sequences may have drafts."""
        if self._cost is None:
            return num_rows < MOST_VERIFIED_ROWS
        if self.clock is not None and num_rows == 1:
            return True
        known = self._can_pay.get(num_rows)
        if known is None:
            known = self._can_pay[num_rows] = can_pay(num_rows, self.speculate, self._cost)
        return known

    def may_look(self, rows: SequenceOf[Sequence]) -> bool:
        """Whether the next step may look for drafts, if it has these rows."""
        if self._rest.left and tuple(rows) == self._rest.rows:
            return False
        self._count_rest()
        return self.pays(len(rows)) and (self._cost is None or not self._looks.rest(rows))

    def skips_next(self, rows: SequenceOf[Sequence]) -> bool:
        """Whether the next step of these sequences has no drafts for any newest ids; counts that step."""
        if self._rests(rows):
            return True
        if self._cost is None:
            if self.pays(len(rows)):
                return False
            self.leave_out(NoDraft.BATCH, len(rows))
            return True
        return not self._due_now(rows, self._cost)

    def propose(self, rows: SequenceOf[Sequence]) -> tuple[Draft, ...]:
        """A draft for each sequence; empty if no sequence has one. All ids of the sequences are on the host."""
        if self._rests(rows):
            return ()
        if self._cost is None:
            return self._all(rows)
        if self.clock is not None and len(rows) == 1:
            return self._timed(rows, self._cost, self.clock)
        self._interrupt_run()
        due = self._due_now(rows, self._cost)
        return self.look(rows, due, self._cost) if due else ()

    def _all(self, rows: SequenceOf[Sequence]) -> tuple[Draft, ...]:
        """Whole drafts; the last ones are cut to the largest number of rows."""
        if not self.pays(len(rows)):
            self.leave_out(NoDraft.BATCH, len(rows))
            return ()
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
        """The drafts of these rows that save time.

        The first token of every other draft is compared with the chosen token later, to estimate its acceptance.
        """
        num_rows = len(rows)
        plain_ns, look_ns = cost.plain_ns(num_rows), cost.proposing_ns(len(due))
        self._budget.decoded(plain_ns)
        self._budget.add(-look_ns)
        if num_rows > len(due):
            self.leave_out(NoDraft.COST, num_rows - len(due))
        found = self._proposals([rows[row] for row in due])
        num_right = sum(self._history(rows[row]).settle(rows[row].ids) for row in due)
        if 2 * num_right >= len(due):
            self._looks.look_again()
        plain_token_ns = token_ns([as_candidate(sequence) for sequence in rows], cost)
        lengths, values = self._lengths(rows, due, found, look_ns, plain_token_ns, cost)
        longest = longest_pause(cost.proposing_ns(1), plain_ns)
        pays = False
        for row, length, value, (ids, levels) in zip(due, lengths, values, found, strict=True):
            history, num_ids = self._history(rows[row]), len(rows[row].ids)
            self._look_value.add(value)
            pays |= history.looked(value, num_ids, longest)
            if length:
                history.drafted(levels)
            elif ids:
                self.leave_out(NoDraft.COST, 1)
                history.guess(num_ids, ids[0], levels[0])
        self._looks.looked(pays, longest_pause(look_ns, plain_ns))
        self._looks.stepped()
        if not any(lengths):
            return ()
        self._saved_by_token_ns = plain_token_ns
        drafts: list[Draft] = [()] * num_rows
        for row, length, (ids, _) in zip(due, lengths, found, strict=True):
            drafts[row] = tuple(ids[:length])
        return tuple(drafts)

    def with_prompts(self, num_decoding: int) -> None:
        """Count a step with prompts. It has no drafts, and its time does not count as that of a decode step."""
        self.leave_out(NoDraft.PROMPTS, num_decoding)
        self._interrupt_run()
        if self._rest.started_ns:
            self._rest.started_ns = self._rest.left = 0

    def leave_out(self, reason: NoDraft, num_tokens: int) -> None:
        """Count tokens that are chosen without a draft."""
        self._undrafted[reason] += num_tokens
        self._num_undrafted += num_tokens

    def take_undrafted(self, least: int = 0) -> tuple[int, ...]:
        """The tokens chosen without a draft since the last call, by reason; empty if they are fewer than `least`."""
        rest = self._rest
        if self._num_undrafted + rest.taken * len(rest.rows) < max(1, least):
            return ()
        self._count_rest()
        counts = tuple(self._undrafted.values())
        self._undrafted = dict.fromkeys(NoDraft, 0)
        self._num_undrafted = 0
        return counts

    def verified(self, sequence: Sequence, num_accepted: int, num_verified: int) -> None:
        """Report the result of a sequence's draft."""
        if self._run is not None and self._run.request is sequence:
            self._run.accepted = num_accepted
            return
        self._budget.add(num_accepted * self._saved_by_token_ns)
        if self._cost is not None and sequence.draft_history is not None:
            sequence.draft_history.verified(num_accepted, num_verified)

    def _proposals(self, rows: SequenceOf[Sequence]) -> list[ProposedDraft]:
        """A proposal for each sequence, cut at the first token that its grammar does not allow."""
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
        """Largest number of tokens that can be accepted, in addition to the token that the step chooses."""
        count = min(self.speculate, sequence.stopping.remaining_tokens - 1)
        if self._kv_border is not None and sequence.cache_len < self._kv_border:
            count = min(count, self._kv_border - sequence.cache_len - 1)
        return count

    def _rests(self, rows: SequenceOf[Sequence]) -> bool:
        """Whether the step is one of a rest; counts it."""
        rest = self._rest
        if not rest.left or tuple(rows) != rest.rows:
            return False
        rest.left -= 1
        rest.taken += 1
        if rest.num_steps == COLD_STEPS and rest.started_ns and self.clock is not None:
            rest.started_ns = self.clock()
        rest.num_steps += 1
        return True

    def _begin_rest(self, rows: SequenceOf[Sequence], reason: NoDraft, num_steps: int, now_ns: int = 0) -> None:
        """Start a rest with this step."""
        self._rest = Rest(tuple(rows), reason, num_steps - 1, 1, 1, now_ns)

    def _count_rest(self) -> None:
        """Count the steps of the rest so far."""
        rest = self._rest
        if rest.taken:
            assert self._cost is not None
            num_rows = len(rest.rows)
            self._looks.stepped(rest.taken)
            self._budget.decoded(self._cost.plain_ns(num_rows), rest.taken)
            self.leave_out(rest.reason, rest.taken * num_rows)
            rest.taken = 0

    def _due_now(self, rows: SequenceOf[Sequence], cost: StepCost, now_ns: int = 0) -> list[int]:
        """The rows for which this step looks for drafts; if there are none, a rest starts with this step."""
        self._count_rest()
        num_rows = len(rows)
        if not self.pays(num_rows):
            self._begin_rest(rows, NoDraft.BATCH, LONGEST_PAUSE, now_ns)
            return []
        rest = self._looks.rest(rows)
        if not rest:
            due = self._due(rows, cost)
            if due:
                self._rest = Rest()
                return due
            rest = max(1, self._looks.rest(rows))
        self._begin_rest(rows, NoDraft.COST, rest, now_ns)
        return []

    def _timed(self, rows: SequenceOf[Sequence], cost: StepCost, clock: Callable[[], int]) -> tuple[Draft, ...]:
        """The drafts of one request. They come in runs, and the time of each run is measured."""
        (sequence,) = rows
        now_ns = clock()
        run = self._run
        if run is None or run.request is not sequence:
            self._interrupt_run()
        else:
            run.stepped(now_ns, len(sequence.ids))
            if run.taken < run.num_steps:
                return self._whole_drafts(rows)
            self._end_run(run)
        plain_token_ns = token_ns([as_candidate(sequence)], cost)
        rest = self._rest
        num_plain = rest.num_steps - COLD_STEPS
        if rest.started_ns and num_plain >= FEWEST_PLAIN and rest.rows == tuple(rows):
            self._speed.add((now_ns - rest.started_ns) / num_plain, plain_token_ns)
        speed = self._speed.ratio
        self._count_rest()
        if speed is None or self._num_runs >= REFRESH:
            self._num_runs = 0
            self._begin_rest(rows, NoDraft.COST, COLD_STEPS + FEWEST_PLAIN, now_ns)
            return ()
        if not self._due_now(rows, cost, now_ns):
            return ()
        history = self._history(sequence)
        num_steps = RUN if history.saves_time else TRIAL
        self._run = DraftRun(sequence, history, num_steps, speed * plain_token_ns, Progress(now_ns, len(sequence.ids)))
        self._num_runs += 1
        return self._whole_drafts(rows)

    def _interrupt_run(self) -> None:
        """End a run at a step of unknown time, because its request has ended or is not alone any more."""
        if self._run is not None:
            assert self._cost is not None
            added_ns = self._cost.proposing_ns(1) + self._cost.added_ns(1, self.speculate)
            self._run.interrupted(self._run.token_ns * (1 + added_ns / self._cost.plain_ns(1)))
            self._end_run(self._run)

    def _end_run(self, run: DraftRun) -> None:
        """Use the time of a run to decide whether another run follows."""
        self._run = None
        self._looks.stepped(run.taken - 1)
        self._budget.decoded(run.token_ns, run.taken)
        self._budget.add(-run.lost_ns)
        self._look_value.add(run.value - LEAST_GAIN)
        longest = longest_pause(max(0.0, run.lost_ns), run.token_ns)
        pays = run.history.measured(run.value - LEAST_GAIN, run.newest.num_ids, longest)
        self._looks.looked(pays, longest)
        self._looks.stepped()

    def _whole_drafts(self, rows: SequenceOf[Sequence]) -> tuple[Draft, ...]:
        drafts = tuple(tuple(proposal.ids) for proposal in self._proposals(rows))
        return drafts if any(drafts) else ()

    def _due(self, rows: SequenceOf[Sequence], cost: StepCost) -> list[int]:
        """The rows for which to look for drafts; empty if the budget does not allow a look."""
        waits = [
            0 if history is None else history.look_at - sequence.known_len
            for sequence, history in ((sequence, sequence.draft_history) for sequence in rows)
        ]
        due = [row for row, wait in enumerate(waits) if wait <= 0]
        if not due:
            self._looks.none_due(rows, min(waits))
            return []
        # A look is useful only if the budget also allows to verify one of its drafts.
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
        plain_token_ns: float,
        cost: StepCost,
    ) -> tuple[list[int], list[float]]:
        """The number of tokens to verify of each proposal, within the budget; and the value of each row's look.

        The value of a look is the number of plain tokens that the row is expected to save. The time of the look lowers
        this value. It does not change the choice of the lengths, because a step without drafts has spent it too.
        """
        look_tokens = look_ns / len(due) / plain_token_ns
        nothing = [0] * len(due)
        if not any(ids for ids, _ in found):
            return nothing, [-look_tokens] * len(due)
        candidates = [DraftCandidate(())] * len(rows)
        for row, (_, levels) in zip(due, found, strict=True):
            history = self._history(rows[row])
            candidates[row] = as_candidate(rows[row], [history.rate(level) for level in levels])
        lengths = draft_lengths(candidates, cost, spent_ns=look_ns)
        drafts_ns = added_ns(candidates, lengths, cost)
        draft_tokens = drafts_ns / plain_token_ns / max(1, sum(lengths))
        values = [
            expected_tokens(candidates[row].rates[: lengths[row]]) - lengths[row] * draft_tokens - look_tokens
            for row in due
        ]
        if not self._budget.allows(drafts_ns):
            return nothing, values
        self._budget.add(-drafts_ns)
        return [lengths[row] for row in due], values

    def _history(self, sequence: Sequence) -> DraftHistory:
        if sequence.draft_history is None:
            sequence.draft_history = DraftHistory(self._overall, self._look_value.value)
        return sequence.draft_history


def as_candidate(sequence: Sequence, rates: SequenceOf[float] = ()) -> DraftCandidate:
    """A sequence's row of a step, with a draft whose tokens are accepted with these probabilities."""
    return DraftCandidate(rates, sequence.cache_len, sequence.request.parameters.samples)


def count_by_place(verified: SequenceOf[tuple[int, int]]) -> DraftCounts:
    """Drafts by the places of their tokens. verified: of each draft, the number of accepted tokens and of all tokens.

    >>> count_by_place([(1, 3), (2, 2)])
    DraftCounts(proposed=(2, 2, 1), accepted=(2, 1, 0), undrafted=())
    """
    places = range(max(length for _, length in verified))
    return DraftCounts(
        proposed=tuple(sum(length > place for _, length in verified) for place in places),
        accepted=tuple(sum(accepted > place for accepted, _ in verified) for place in places),
    )

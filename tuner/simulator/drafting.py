"""Drafts of a simulated server: the rows of a step with a draft, its length, and its number of accepted tokens.

The rule is the server's own `Drafter`. Only the text is replaced: random numbers with the measured acceptance decide. A
random number depends only on the request and its number of tokens, so batches cannot change it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, cast, overload

from reference_server.model_server.drafting import MOST_VERIFIED_ROWS, Drafter
from reference_server.model_server.speculation.acceptance import DraftHistory
from reference_server.model_server.speculation.ngram import NGRAM_PRIORS
from reference_server.model_server.speculation.proposed_draft import NO_PROPOSAL, ProposedDraft
from reference_server.model_server.speculation.step_cost import StepCost
from reference_server.router.scheduling.step_work import StepWork
from tuner.simulator.fitting.draft_acceptance import DraftAcceptance
from tuner.simulator.fitting.linear_law import LinearLaw
from tuner.simulator.step_ranges import StepRanges

if TYPE_CHECKING:
    from reference_server.model_server.sequence import Sequence as ServerSequence

RIGHT, WRONG = 1, 0
ONLY_LEVEL = 0


@dataclass(frozen=True, slots=True)
class SpeculatingLaw:
    """A `StepLaw` of a server with drafts of at most `speculate` tokens.

    is_adaptive: drafts have only tokens that are expected to save time; otherwise every draft has `speculate` tokens.
    is_timed: the server measures the steps of a request that is alone, and drafts if they save time.
    """

    plain: LinearLaw
    speculate: int
    acceptance: DraftAcceptance
    is_adaptive: bool = True
    is_timed: bool = False

    @property
    def kv_ns(self) -> float:
        return self.plain.kv_ns

    @property
    def ranges(self) -> StepRanges | None:
        return self.plain.ranges

    def step_ns(self, work: StepWork) -> float:
        return self.plain.step_ns(work)

    @property
    def has_adapters(self) -> bool:
        return self.plain.has_adapters

    def adapters_ns(self, adapters: int, tokens: int) -> float:
        return self.plain.adapters_ns(adapters, tokens)

    def drafted_step_ns(self, work: StepWork, drafted: int) -> float:
        """The time of a decode step that verifies `drafted` tokens. Each attends to as many keys as the mean row."""
        drafts_ns, drafted_ns = self.plain.draft_ns
        keys_ns = self.plain.kv_ns * work.kv / max(1, work.rows)
        return self.plain.step_ns(work) + drafts_ns + drafted * (drafted_ns + keys_ns)

    @property
    def step_cost(self) -> StepCost:
        """The cost that the server uses to choose draft lengths. It comes from the law, not from a warm-up."""
        rows_ns = tuple(self.plain.step_ns(StepWork(rows=rows)) for rows in range(1, MOST_VERIFIED_ROWS + 1))
        drafts_ns, drafted_ns = self.plain.draft_ns
        row_ns = (rows_ns[-1] - rows_ns[0]) / (len(rows_ns) - 1)
        return StepCost(rows_ns, self.plain.kv_ns, drafts_ns, max(0.0, drafted_ns - row_ns))


@dataclass(frozen=True, slots=True)
class _Parameters:
    samples: bool = False


@dataclass(frozen=True, slots=True)
class _Request:
    parameters: _Parameters = _Parameters()


@dataclass(slots=True)
class _Stopping:
    remaining_tokens: int


@dataclass(slots=True, eq=False)
class DraftingRow:
    """A decoding row, with the parts of the server's `Sequence` that its `Drafter` reads. num_ids: all its tokens.

    rate: probability that the first token of a draft is accepted. is_in_stretch: the last draft was accepted to its
    end.
    """

    key: int
    num_ids: int
    stopping: _Stopping
    rate: float
    request: _Request = _Request()
    grammar: None = None
    is_in_stretch: bool = False
    draft_history: DraftHistory | None = None

    @property
    def ids(self) -> "DrawnIds":
        return DrawnIds(self)

    @property
    def known_len(self) -> int:
        return self.num_ids

    @property
    def cache_len(self) -> int:
        return self.num_ids - 1

    @property
    def as_sequence(self) -> "ServerSequence":
        return cast("ServerSequence", self)


@dataclass(frozen=True, slots=True)
class _DrawnSource:
    """Proposals with the measured coverage. Every token is `RIGHT`; `Drafting.accepted` draws the accepted number."""

    acceptance: DraftAcceptance

    @property
    def priors(self) -> Sequence[float]:
        """The server's prior that is nearest to the measured acceptance."""
        return (min(NGRAM_PRIORS, key=lambda prior: abs(prior - self.acceptance.at(1))),)

    def propose(self, sequences: "Sequence[ServerSequence]", counts: Sequence[int], /) -> list[ProposedDraft]:
        rows = cast("Sequence[DraftingRow]", sequences)
        return [
            ProposedDraft((RIGHT,) * count, (ONLY_LEVEL,) * count)
            if row.is_in_stretch or uniform(row.key, row.num_ids, salt=1) < self.acceptance.coverage
            else NO_PROPOSAL
            for row, count in zip(rows, counts, strict=True)
        ]


@dataclass(slots=True)
class Drafting:
    """The drafts of one server. Its clock is the virtual time at which each step starts."""

    law: SpeculatingLaw
    _drafter: Drafter = field(init=False)
    _now_ns: int = 0

    def __post_init__(self) -> None:
        clock = (lambda: self._now_ns) if self.law.is_timed else None
        self._drafter = Drafter(_DrawnSource(self.law.acceptance), self.law.speculate, clock=clock)
        if self.law.is_adaptive:
            self._drafter.cost = self.law.step_cost

    def row(self, key: int, num_ids: int, left: int) -> DraftingRow:
        """A row that starts to decode, with `left` remaining tokens."""
        return DraftingRow(key, num_ids, _Stopping(left), self.law.acceptance.at(1))

    def may_draft(self, num_rows: int) -> bool:
        """Whether a step with this number of rows may have drafts."""
        return self._drafter.pays(num_rows)

    def with_prompts(self, num_decoding: int) -> None:
        """Count a step with prompts and this many decoding rows. It has no drafts."""
        self._drafter.with_prompts(num_decoding)

    def propose(self, rows: Sequence[DraftingRow], now_ns: int = 0) -> list[int]:
        """The drafted tokens of each row in a step that starts now, as requested by the server's stepper."""
        self._now_ns = now_ns
        sequences = [row.as_sequence for row in rows]
        # A server with a clock never launches a step before the ids of the last step are read.
        if not self.law.is_timed and self._drafter.skips_next(sequences):
            return [0] * len(rows)
        drafts = self._drafter.propose(sequences)
        lengths = [len(draft) for draft in drafts] if drafts else [0] * len(rows)
        for row, length in zip(rows, lengths, strict=True):
            row.is_in_stretch = row.is_in_stretch and length > 0
        return lengths

    def accepted(self, row: DraftingRow, length: int) -> int:
        """The number of accepted tokens of a draft; it is passed to the server's rule."""
        acceptance, count = self.law.acceptance, 0
        chance = acceptance.next if row.is_in_stretch else acceptance.first
        while count < length and uniform(row.key, row.num_ids + count) < chance:
            count += 1
            chance = acceptance.next
        row.is_in_stretch = count == length
        self._drafter.verified(row.as_sequence, count, length)
        return count


class DrawnIds(Sequence[int]):
    """The ids of a row for its history: `RIGHT` if the first token of a draft is right at this position."""

    def __init__(self, row: DraftingRow) -> None:
        self._row = row

    def __len__(self) -> int:
        return self._row.num_ids

    @overload
    def __getitem__(self, index: int) -> int: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[int]: ...

    def __getitem__(self, index: int | slice) -> int | Sequence[int]:
        if isinstance(index, slice):
            return [self[place] for place in range(*index.indices(len(self)))]
        return RIGHT if uniform(self._row.key, index) < self._row.rate else WRONG


_MASK = 2**64 - 1


def uniform(key: int, position: int, salt: int = 0) -> float:
    """A pseudo-random number in [0, 1) from request and position: the finalizer of splitmix64 (Steele et al., 2014)."""
    value = (key * 0x9E3779B97F4A7C15 + position * 0xBF58476D1CE4E5B9 + salt * 0x94D049BB133111EB + 1) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return ((value ^ (value >> 31)) >> 11) / 2**53

"""Adaptive drafts against the better of plain decoding and fixed drafts, on drawn drafts with known acceptance."""

import random
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, replace
from functools import cache, cached_property

import pytest

from reference_server.messages import ChooserParameters
from reference_server.model_server.drafting import Drafter
from reference_server.model_server.sequence import Sequence
from reference_server.model_server.speculation.proposed_draft import NO_PROPOSAL, ProposedDraft
from reference_server.model_server.speculation.step_cost import StepCost, by_rows
from reference_server.tokenizer import Tokenizer
from tests.reference_server.model_server.test_drafting import decoding, tokenizer

WRONG = 0
NUM_DRAFTED = 4
NEW_TOKENS = 96
NUM_REQUESTS = 60
PROMPTS_NS = 20_000.0
# Of a small model on a CPU: a row costs a seventh of a step.
SMALL = {1: 300.0, 2: 335.0, 4: 423.0, 8: 630.0, 16: 1040.0, 32: 1900.0, 128: 7700.0}
# Of a large model on a device: rows cost little.
MEMORY_BOUND = {1: 1000.0, 32: 1050.0, 128: 1500.0}


@dataclass(frozen=True, eq=False)
class Case:
    """Rows of a batch and their drafts. coverage: share of the looks that find a draft. chances: of each level, the
    probability that its token is accepted; a token's level is drawn evenly. sampled_ns: of each row; 0 if greedy."""

    name: str
    rows_ns: dict[int, float]
    look_ns: float
    coverage: float
    chances: tuple[float, ...]
    num_rows: int = 1
    sampled_ns: float = 0.0

    @property
    def plain_ns(self) -> float:
        """The time of a token without drafts."""
        return self.cost.plain_ns(self.num_rows) / self.num_rows + self.sampled_ns

    @cached_property
    def cost(self) -> StepCost:
        return StepCost(
            by_rows(self.rows_ns, 128),
            drafts_ns=60.0,
            sampled_row_ns=self.sampled_ns,
            proposal_ns=tuple(self.look_ns * (1 + 0.15 * row) for row in range(8)),
        )


class DrawnDrafts:
    """Proposals with the next ids of the text, some of them wrong. spent_ns: the price of all looks."""

    priors = (0.2, 0.45, 0.7, 0.87, 0.97)

    def __init__(self, case: Case, text: SequenceOf[int]) -> None:
        self._case = case
        self._text = text
        self.spent_ns = 0.0

    def propose(self, sequences: SequenceOf[Sequence], counts: SequenceOf[int], /) -> list[ProposedDraft]:
        self.spent_ns += self._case.cost.proposing_ns(len(sequences))
        return [self._of(len(each.ids), count) for each, count in zip(sequences, counts, strict=True)]

    def _of(self, known: int, count: int) -> ProposedDraft:
        draw = random.Random(known)
        if draw.random() >= self._case.coverage:
            return NO_PROPOSAL
        levels = [draw.randrange(len(self._case.chances)) for _ in range(count)]
        following = self._text[known : known + count]
        ids = [
            id_ if draw.random() < self._case.chances[level] else WRONG
            for id_, level in zip(following, levels, strict=True)
        ]
        return ProposedDraft(ids, levels)


HIGH, MIXED, LOW = (0.9,) * 5, (0.2, 0.4, 0.6, 0.9, 0.97), (0.1, 0.15, 0.2, 0.3, 0.4)
USEFUL = (0.5, 0.7, 0.8, 0.95, 0.98)
CASES = (
    Case("good heads", SMALL, 230.0, 1.0, HIGH),
    Case("heads of mixed confidence", SMALL, 230.0, 1.0, MIXED),
    Case("useful heads", SMALL, 230.0, 1.0, USEFUL),
    Case("poor heads", SMALL, 230.0, 1.0, LOW),
    Case("heads in a batch", SMALL, 230.0, 1.0, MIXED, num_rows=8),
    Case("useful heads for sampled requests", SMALL, 230.0, 1.0, HIGH, sampled_ns=90.0),
    Case("frequent n-grams", SMALL, 20.0, 0.5, HIGH),
    Case("rare n-grams", SMALL, 20.0, 0.05, HIGH),
    Case("no n-grams", SMALL, 20.0, 0.0, HIGH),
    Case("wrong n-grams", SMALL, 20.0, 0.5, LOW),
    Case("n-grams in a batch", SMALL, 20.0, 0.5, MIXED, num_rows=8),
    Case("good heads of a large model", MEMORY_BOUND, 100.0, 1.0, MIXED),
    Case("poor heads of a large model in a batch", MEMORY_BOUND, 100.0, 1.0, LOW, num_rows=8),
)


class Clock:
    """The time of the simulated steps. noise: of each reading's difference to the one before, as a share, at most."""

    def __init__(self, noise: float) -> None:
        self.now_ns = 0.0
        self._noise = noise
        self._draw = random.Random(2)

    def step(self, spent_ns: float) -> None:
        self.now_ns += spent_ns * (1 + self._noise * self._draw.uniform(-1, 1))

    def __call__(self) -> int:
        return int(self.now_ns)


def ns_per_token(
    case: Case,
    is_adaptive: bool,
    tokens: Tokenizer,
    clock: Clock | None = None,
    known: StepCost | None = None,
    num_steps: SequenceOf[int] = (NEW_TOKENS // 2,) * NUM_REQUESTS,
    steps_between_prompts: int = NEW_TOKENS,
) -> float:
    """The cost of requests one batch after the other.

    known: the cost that the drafter knows; None: the true one. num_steps: of each request. steps_between_prompts: in
    each batch, after which other prompts are computed.
    """
    text, cost = drawn_text(), case.cost
    source = DrawnDrafts(case, text)
    drafter = Drafter(source, NUM_DRAFTED, clock=clock)
    if is_adaptive:
        drafter.cost = known or cost
    spent_ns, num_tokens = 0.0, 0
    for request, steps in enumerate(num_steps):
        prompt = text[: 1 + NEW_TOKENS * (request % NUM_REQUESTS)]
        rows = [decoding(prompt, 10 * NEW_TOKENS, tokens) for _ in range(case.num_rows)]
        for row in rows if case.sampled_ns else ():
            row.request = replace(row.request, parameters=ChooserParameters(do_sample=True))
        for step in range(steps):
            if clock is not None and step % steps_between_prompts == 0:
                drafter.with_prompts(case.num_rows if step else 0)
                clock.step(PROMPTS_NS)
            before_ns = spent_ns + source.spent_ns
            drafts = drafter.propose(tuple(rows)) or ((),) * case.num_rows
            num_drafted = sum(map(len, drafts))
            spent_ns += case.sampled_ns * (case.num_rows + num_drafted)
            spent_ns += cost.plain_ns(case.num_rows + num_drafted) + cost.drafts_ns * bool(num_drafted)
            if clock is not None:
                clock.step(spent_ns + source.spent_ns - before_ns)
            for sequence, draft in zip(rows, drafts, strict=True):
                known, accepted = len(sequence.ids), 0
                while accepted < len(draft) and draft[accepted] == text[known + accepted]:
                    accepted += 1
                sequence.ids.extend(text[known : known + 1 + accepted])
                sequence.cache_len += 1 + accepted
                num_tokens += 1 + accepted
                if draft:
                    drafter.verified(sequence, accepted, len(draft))
    return (spent_ns + source.spent_ns) / num_tokens


@cache
def drawn_text() -> SequenceOf[int]:
    return random.Random(1).choices(range(1, 4000), k=(1 + NUM_REQUESTS) * NEW_TOKENS * 2)


@cache
def fixed_gain(case: Case) -> float:
    """The speed with a draft in every step, divided by that of plain decoding."""
    return case.plain_ns / ns_per_token(case, False, tokenizer())


# `test_drafts_of_one_request_follow_the_measured_time_of_its_steps` has all cases of one row in the short suite.
SHORT = ("heads of mixed confidence", "poor heads", "n-grams in a batch")


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, id=case.name, marks=() if case.name in SHORT else pytest.mark.slow) for case in CASES],
)
def test_adaptive_drafts_are_as_fast_as_the_better_of_fixed_and_none(case: Case) -> None:
    adaptive = case.plain_ns / ns_per_token(case, True, tokenizer())

    assert adaptive >= 0.97
    assert adaptive >= 0.95 * fixed_gain(case)


ALONE = [case for case in CASES if case.num_rows == 1]


PRICES_AND_NOISES = [(price, noise) for price in (0.3, 3.0) for noise in (0.0, 0.5)]
# Each case with both prices, and with both noises; the other pairs run in the long suite.
PAIRS = [(0.3, 0.5), (3.0, 0.0)], [(0.3, 0.0), (3.0, 0.5)]


@pytest.mark.parametrize(
    ("case", "price", "noise"),
    [
        pytest.param(
            case,
            *pair,
            id=f"{case.name}-{pair[0]}-{pair[1]}",
            marks=() if pair in PAIRS[place % 2] else pytest.mark.slow,
        )
        for place, case in enumerate(ALONE)
        for pair in PRICES_AND_NOISES
    ],
)
def test_drafts_of_one_request_follow_the_measured_time_of_its_steps(case: Case, price: float, noise: float) -> None:
    """For any times that the warm-up has measured."""
    tokens, known = tokenizer(), replace(case.cost, proposal_ns=(case.look_ns * price,), drafts_ns=60.0 * price)
    adaptive = case.plain_ns / ns_per_token(case, True, tokens, Clock(noise), known)

    assert adaptive >= 0.97
    assert adaptive >= 0.95 * fixed_gain(case)


# Heads and n-grams, useful and not, of both kinds of models; each with one of the lengths.
SHORT_REQUESTS = {
    "heads of mixed confidence": 3, "poor heads": 1, "good heads of a large model": 1,
    "frequent n-grams": 1, "no n-grams": 1, "wrong n-grams": 3,
}  # fmt: skip


@pytest.mark.parametrize(
    ("case", "num_steps"),
    [
        pytest.param(
            case,
            num_steps,
            id=f"{case.name}-{num_steps}",
            marks=() if SHORT_REQUESTS.get(case.name) == num_steps else pytest.mark.slow,
        )
        for case in ALONE
        for num_steps in (1, 3)
    ],
)
def test_drafts_of_short_requests_lose_a_share_of_the_time_only(case: Case, num_steps: int) -> None:
    """Requests that end in their first run."""
    tokens, lengths = tokenizer(), [NEW_TOKENS // 2, *[num_steps] * 1500]

    adaptive = case.plain_ns / ns_per_token(case, True, tokens, Clock(0.5), num_steps=lengths)

    assert adaptive >= 0.97


@pytest.mark.parametrize("case", ALONE, ids=lambda case: case.name)
def test_the_time_of_other_prompts_does_not_count(case: Case) -> None:
    adaptive = case.plain_ns / ns_per_token(case, True, tokenizer(), Clock(0.0), steps_between_prompts=20)

    assert adaptive >= 0.97
    assert adaptive >= 0.9 * fixed_gain(case)

"""The drafter: drafts within a request's length and a step's rows, and no drafts if they do not save time."""

from collections.abc import Sequence as SequenceOf
from dataclasses import replace
from itertools import pairwise

import numpy as np

from reference_server.messages import ChooserParameters, NoDraft, Request, StoppingParameters
from reference_server.model_server.decoding.detokenize import IncrementalDetokenizer
from reference_server.model_server.decoding.stopping import StoppingCriteria
from reference_server.model_server.draft_sources import NgramSource
from reference_server.model_server.drafting import MOST_VERIFIED_ROWS, Drafter
from reference_server.model_server.sequence import Sequence
from reference_server.model_server.speculation.draft_budget import FIRST_STEPS, LOSS_SHARE
from reference_server.model_server.speculation.ngram import NgramRule
from reference_server.model_server.speculation.proposed_draft import NO_PROPOSAL, ProposedDraft
from reference_server.model_server.speculation.step_cost import StepCost, by_rows
from reference_server.presets.catalog import find
from reference_server.tokenizer import Tokenizer, load_tokenizer

LOOP = [7, 8, 9] * 6
FREE_ROWS = StepCost(by_rows({1: 100.0, 128: 100.0}, 128))
DEAR_ROWS = StepCost(by_rows({1: 10.0, 128: 1280.0}, 128))


def tokenizer() -> Tokenizer:
    preset = find("preset:tiny-llama")
    assert preset is not None
    return load_tokenizer(preset.tokenizer_directory, 4096)


def decoding(ids: list[int], max_new_tokens: int = 100, tokens: Tokenizer | None = None) -> Sequence:
    """A sequence after its prompt and one token."""
    stopping = StoppingParameters(max_new_tokens)
    made = Sequence(
        request=Request(0, (), len(ids), ChooserParameters(), stopping),
        ids=list(ids),
        prompt_len=len(ids) - 1,
        cache_len=len(ids) - 1,
        input_len=1,
        blocks=np.zeros(1, dtype=np.int64),
        stopping=StoppingCriteria(stopping, frozenset()),
        detokenizer=IncrementalDetokenizer(tokens or tokenizer(), ids),
    )
    made.stopping.finish_reason(ids[-1], "")
    return made


def drafter(speculate: int = 4, kv_border: int | None = None) -> Drafter:
    return Drafter(NgramSource(NgramRule.SUFFIX), speculate, kv_border)


def test_a_draft_ends_before_the_last_token_of_the_request() -> None:
    # Two more tokens: that of the step, and one of a draft.
    assert drafter().propose([decoding(LOOP, max_new_tokens=3)]) == ((7,),)
    assert drafter().propose([decoding(LOOP, max_new_tokens=2)]) == ()


def test_no_draft_crosses_the_border_of_long_rope() -> None:
    sequence = decoding(LOOP)

    assert drafter(kv_border=len(LOOP) + 1).propose([sequence]) == ((7,),)
    assert drafter(kv_border=len(LOOP)).propose([sequence]) == ()
    assert drafter(kv_border=len(LOOP) - 1).propose([sequence]) == ((7, 8, 9, 7),)


def test_a_step_with_drafts_has_few_rows() -> None:
    tokens = tokenizer()
    rows = [decoding(LOOP, tokens=tokens) for _ in range(MOST_VERIFIED_ROWS - 6)]

    drafts = drafter().propose(rows)

    assert [len(draft) for draft in drafts[:3]] == [4, 2, 0]
    assert drafter().propose(rows + rows[:6]) == ()


def test_drafts_that_do_not_pay_are_not_looked_for() -> None:
    made = drafter()
    sequence = decoding(LOOP)

    made.cost = DEAR_ROWS
    assert made.propose([sequence]) == ()
    assert sequence.ngrams is None
    made.cost = FREE_ROWS
    assert made.propose([sequence]) == ((7, 8, 9, 7),)


def test_a_request_whose_drafts_fail_stops_drafting_and_starts_again_when_its_text_repeats() -> None:
    made = drafter(2)
    # A draft saves time from about one accepted token in four.
    made.cost = StepCost(by_rows({1: 100.0, 2: 125.0, 3: 150.0, 128: 3300.0}, 128))
    sequence = decoding(LOOP)
    proposed = []

    def step(next_id: int, accepted: int) -> None:
        drafts = made.propose([sequence])
        proposed.append(bool(drafts))
        if drafts:
            made.verified(sequence, accepted, len(drafts[0]))
        sequence.ids.append(next_id)
        sequence.cache_len += 1

    for place in range(12):
        # The draft after 7 8 9 is always 7, and the text has another token.
        for next_id in (7, 8, 9) if place else ():
            sequence.ids.append(next_id)
            sequence.cache_len += 1
        step(100 + place, 0)
    stopped = list(proposed)
    proposed.clear()
    for next_id in LOOP:
        step(next_id, 0)

    assert stopped[0]
    assert not any(stopped[6:])
    assert any(proposed)


def test_tokens_without_a_draft_are_counted_by_reason() -> None:
    made, tokens = drafter(), tokenizer()
    made.propose([decoding(LOOP, tokens=tokens), decoding([1, 2, 3], tokens=tokens), decoding(LOOP, 2, tokens)])
    assert made.take_undrafted() == (0, 0, 0, 1, 0, 1)
    assert made.take_undrafted() == ()

    made.propose([decoding([1, 2, 3], tokens=tokens)] * MOST_VERIFIED_ROWS)
    assert made.take_undrafted(least=MOST_VERIFIED_ROWS + 1) == ()
    assert made.take_undrafted(least=MOST_VERIFIED_ROWS) == (0, MOST_VERIFIED_ROWS, 0, 0, 0, 0)

    made.cost = StepCost(by_rows({1: 100.0, 2: 150.0, 128: 6000.0}, 128))
    sequence = decoding(LOOP, tokens=tokens)
    for _ in range(6):
        if drafts := made.propose([sequence]):
            made.verified(sequence, 0, len(drafts[0]))
    assert dict(zip(NoDraft, made.take_undrafted(), strict=True))[NoDraft.COST] > 0


def test_drafts_that_fail_against_all_estimates_lose_a_share_of_the_time_only() -> None:
    made = drafter(2)
    made.cost = StepCost(by_rows({1: 100.0, 2: 125.0, 3: 150.0, 128: 3300.0}, 128))
    tokens, lost_ns, num_steps = tokenizer(), 0.0, 0

    # Short requests, each of which starts with the estimates of all requests; its drafts are never accepted.
    for _ in range(40):
        sequence = decoding(LOOP, tokens=tokens)
        for next_id in (7, 8, 9, 7, 8, 9):
            drafts = made.propose([sequence])
            num_steps += 1
            if drafts:
                lost_ns += 25.0 * len(drafts[0])
                sequence.draft_history = None
                made.verified(sequence, 0, len(drafts[0]))
            sequence.ids.append(next_id)
            sequence.cache_len += 1

    assert 0 < lost_ns <= (FIRST_STEPS + LOSS_SHARE * num_steps) * 100.0


class CountedLooks:
    """No drafts for anything; counts the calls."""

    priors = (0.5,)

    def __init__(self) -> None:
        self.num_looks = 0

    def propose(self, sequences: SequenceOf[Sequence], _counts: SequenceOf[int], /) -> list[ProposedDraft]:
        self.num_looks += 1
        return [NO_PROPOSAL] * len(sequences)


def test_a_batch_without_drafts_has_looks_ever_more_rarely() -> None:
    tokens, source = tokenizer(), CountedLooks()
    made = Drafter(source, 4)
    made.cost = replace(FREE_ROWS, proposal_ns=(20.0,))
    looks = []
    rows = [decoding(LOOP, tokens=tokens) for _ in range(8)]

    for step in range(400):
        before = source.num_looks
        assert made.propose(tuple(rows)) == ()
        if source.num_looks > before:
            looks.append(step)
        for sequence in rows:
            sequence.ids.append(1)
            sequence.cache_len += 1
        # The batch changes as under a steady load; a new request does not end the pause.
        rows[step % 8] = decoding(LOOP, tokens=tokens)

    pauses = [late - early for early, late in pairwise(looks)]
    assert pauses[:5] == [1, 2, 4, 8, 16]
    # A look costs a fifth of a step.
    assert set(pauses[5:]) == {20}


def test_a_request_that_joins_has_a_look_although_the_others_pause() -> None:
    tokens, source = tokenizer(), CountedLooks()
    made = Drafter(source, 4)
    made.cost = FREE_ROWS
    first = decoding(LOOP, tokens=tokens)

    def step(*rows: Sequence) -> bool:
        before = source.num_looks
        made.propose(rows)
        for sequence in rows:
            sequence.ids.append(1)
            sequence.cache_len += 1
        return source.num_looks > before

    assert [step(first) for _ in range(7)] == [True, True, False, True, False, False, False]
    assert [step(first, decoding(LOOP, tokens=tokens)) for _ in range(2)] == [True, False]


def test_a_draft_is_verified_although_it_saves_less_than_its_look_costs() -> None:
    made = drafter()
    # The match of four tokens has a prior of 0.7; a look costs a step and a half.
    made.cost = StepCost(by_rows({1: 110.0, 128: 1380.0}, 128), proposal_ns=(165.0,))
    sequence, drafted = decoding(LOOP), []

    for step in range(60):
        drafts = made.propose([sequence])
        if drafts:
            drafted.append(step)
            made.verified(sequence, 0, len(drafts[0]))
        sequence.ids.append(7 + (step + 1) % 3)
        sequence.cache_len += 1

    assert drafted[0] == 0
    # The budget has room for a few of them.
    assert len(drafted) < 10


class UncertainHeads:
    """Drafts of four tokens, of which two in five are expected to be accepted."""

    priors = (0.4,)

    def propose(self, sequences: SequenceOf[Sequence], counts: SequenceOf[int], /) -> list[ProposedDraft]:
        return [ProposedDraft([1] * count, [0] * count) for count in counts]


def test_a_draft_is_longer_after_an_expensive_look() -> None:
    made = Drafter(UncertainHeads(), 4)
    rows_ns = by_rows({1: 280.0, 2: 295.0, 4: 330.0, 8: 435.0}, 128)

    made.cost = StepCost(rows_ns, drafts_ns=60.0)
    assert [len(draft) for draft in made.propose([decoding(LOOP)])] == [2]
    made.cost = StepCost(rows_ns, drafts_ns=60.0, proposal_ns=(270.0,))
    assert [len(draft) for draft in made.propose([decoding(LOOP)])] == [3]


def test_a_run_of_timed_drafts_ends_when_another_request_joins() -> None:
    tokens, clock = tokenizer(), iter(range(0, 1 << 20, 100))
    made = Drafter(NgramSource(NgramRule.SUFFIX), 4, clock=lambda: next(clock))
    made.cost = FREE_ROWS
    first, second = (decoding(LOOP, tokens=tokens) for _ in range(2))
    while not made.propose((first,)):
        pass
    made.verified(first, 4, 4)
    first.ids.extend([7, 8, 9, 7, 8])
    assert made.propose((first, second)) == ((9, 7, 8, 9), (7, 8, 9, 7))
    history = first.draft_history
    assert history is not None
    before = history.rate(4)

    made.verified(first, 0, 4)

    assert history.rate(4) < before

"""Lengths of drafts: the choice with the most expected tokens for each ns, and none if no choice pays."""

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reference_server.model_server.speculation.draft_lengths import MIN_GAIN, DraftCandidate, can_pay, draft_lengths
from reference_server.model_server.speculation.step_cost import StepCost, by_rows

MEMORY_BOUND = StepCost(by_rows({1: 100.0, 32: 110.0}, 128))
COMPUTE_BOUND = StepCost(by_rows({1: 10.0, 128: 1280.0}, 128))

candidates_of_few = st.lists(
    st.builds(DraftCandidate, st.lists(st.floats(0, 1), max_size=4), st.integers(0, 100), st.booleans()),
    min_size=1,
    max_size=3,
)
costs = st.builds(
    lambda base, row, key, drafts, draft_row, sampled: StepCost(
        tuple(base + row * count for count in range(1, 17)), key, drafts, draft_row, sampled
    ),
    st.floats(1, 100),
    st.floats(0, 50),
    st.floats(0, 0.1),
    *([st.floats(0, 10)] * 3),
)


def test_a_step_whose_rows_cost_nothing_verifies_whole_drafts() -> None:
    assert draft_lengths([DraftCandidate((0.9,) * 4), DraftCandidate((0.8,) * 2)], MEMORY_BOUND) == [4, 2]


def test_a_step_whose_rows_cost_as_much_as_a_step_verifies_none() -> None:
    assert draft_lengths([DraftCandidate((0.99,) * 8)], COMPUTE_BOUND) == [0]
    assert not can_pay(1, 8, COMPUTE_BOUND)


def test_a_row_whose_drafts_fail_is_left_out() -> None:
    assert draft_lengths([DraftCandidate((0.9,) * 2), DraftCandidate((0.002,) * 2)], MEMORY_BOUND) == [2, 0]


def test_drafts_stop_paying_when_a_step_is_compute_bound() -> None:
    cost = StepCost(by_rows({1: 100.0, 8: 102.0, 16: 200.0, 128: 1600.0}, 128))

    assert [size for size in (1, 2, 4, 8, 16, 32) if can_pay(size, 4, cost)] == [1, 2, 4]


def test_drafts_pay_for_the_time_in_which_they_were_proposed() -> None:
    candidates = [DraftCandidate((0.9, 0.9))]

    assert draft_lengths(candidates, MEMORY_BOUND, proposing_ns=50.0) == [2]
    assert draft_lengths(candidates, MEMORY_BOUND, proposing_ns=150.0) == [0]


def test_a_dear_look_makes_drafts_longer_because_its_time_is_spent_in_any_case() -> None:
    # Of Medusa heads on a CPU in us: the look takes as long as a plain step.
    cost = StepCost(by_rows({1: 280.0, 2: 295.0, 4: 330.0, 8: 435.0}, 128), drafts_ns=60.0)
    candidates = [DraftCandidate((0.4, 0.4, 0.4, 0.4))]

    assert draft_lengths(candidates, cost) == [2]
    assert draft_lengths(candidates, cost, spent_ns=270.0) == [3]


@given(candidates_of_few, costs)
def test_no_other_choice_is_expected_to_be_faster(candidates: list[DraftCandidate], cost: StepCost) -> None:
    def expected_speed(lengths: tuple[int, ...]) -> float:
        tokens = sum(
            sum(math.prod(each.rates[:place]) for place in range(length + 1))
            for each, length in zip(candidates, lengths, strict=True)
        )
        extra_ns = cost.drafts_ns * any(lengths) + cost.draft_row_ns * sum(lengths)
        for each, length in zip(candidates, lengths, strict=True):
            extra_ns += (1 + length) * (each.num_keys * cost.key_ns + each.is_sampled * cost.sampled_row_ns)
        return tokens / (cost.plain_ns(len(candidates) + sum(lengths)) + extra_ns)

    lengths = tuple(draft_lengths(candidates, cost))

    plain = expected_speed((0,) * len(candidates))
    assert expected_speed(lengths) >= plain * (1 if not any(lengths) else MIN_GAIN * 0.999999)
    if len({(each.num_keys, each.is_sampled) for each in candidates}) == 1:
        # Rows that cost the same: the largest gains first is the best order.
        choices = itertools.product(*(range(len(each.rates) + 1) for each in candidates))
        best = max(map(expected_speed, choices))
        assert expected_speed(lengths) == pytest.approx(best, rel=1e-6) or best < plain * MIN_GAIN * 1.000001

"""The budget of drafts: what they may lose is a share of the decoding time, whatever happened before."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reference_server.model_server.speculation.draft_budget import (
    FIRST_STEPS,
    LOSS_SHARE,
    MOST_STEPS,
    DraftBudget,
)

STEP_NS = 1000.0


@given(st.lists(st.floats(0, 3 * STEP_NS), max_size=60), st.lists(st.floats(0, 30 * STEP_NS), max_size=3))
def test_losses_are_a_share_of_the_decoding_time_and_two_steps(costs: list[float], savings: list[float]) -> None:
    budget = DraftBudget()
    budget.decoded(STEP_NS)
    for saved in savings:
        budget.add(saved)
    lost = 0.0

    for cost in costs:
        budget.decoded(STEP_NS)
        if budget.allows(cost):
            budget.add(-cost)
            lost += cost

    share = LOSS_SHARE * (1 + len(costs))
    assert lost - sum(savings) <= (FIRST_STEPS + share) * STEP_NS * 1.000001
    assert lost <= (MOST_STEPS + share) * STEP_NS * 1.000001


def test_a_few_refused_drafts_do_not_end_those_that_pay() -> None:
    budget = DraftBudget()
    for _ in range(20):
        budget.decoded(STEP_NS)
        budget.add(STEP_NS)

    for _ in range(5):
        budget.decoded(STEP_NS)
        assert budget.allows(STEP_NS)
        budget.add(-STEP_NS)


def test_drafts_that_pay_are_always_allowed() -> None:
    budget = DraftBudget()
    for _ in range(1000):
        budget.decoded(STEP_NS)
        assert budget.allows(0.5 * STEP_NS)
        budget.add(-0.5 * STEP_NS)
        budget.add(0.6 * STEP_NS)


def test_after_a_loss_drafts_are_tried_again_at_the_rate_of_the_share() -> None:
    budget = DraftBudget()
    tried = []
    for step in range(1000):
        budget.decoded(STEP_NS)
        if budget.allows(0.5 * STEP_NS):
            budget.add(-0.5 * STEP_NS)
            tried.append(step)

    assert len(tried) == pytest.approx(FIRST_STEPS / 0.5 + 1000 * LOSS_SHARE / 0.5, abs=1)

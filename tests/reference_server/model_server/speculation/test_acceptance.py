"""The acceptance of a request's drafts: estimated by match length, also from drafts that no step verified."""

import pytest

from reference_server.model_server.speculation.acceptance import PRIORS, AcceptanceRate, DraftHistory


def test_the_estimate_follows_the_last_outcomes() -> None:
    rate = AcceptanceRate(0.5)
    for _ in range(20):
        rate.add(4, 4)
    assert rate.value > 0.95

    for _ in range(20):
        rate.add(0, 4)
    assert rate.value < 0.05


def test_tokens_after_the_first_refused_one_do_not_count() -> None:
    one, two = AcceptanceRate(0.5), AcceptanceRate(0.5)
    one.add(1, 2)
    two.add(1, 8)

    assert one.value == two.value


def test_a_guess_is_settled_by_the_token_at_its_place() -> None:
    history = DraftHistory()
    history.guess([1, 2], 3, match_len=2)

    history.settle([1, 2])
    assert history.rate(2) == pytest.approx(PRIORS[2])
    history.settle([1, 2, 3, 4])
    assert history.rate(2) > PRIORS[2]
    assert history.rate(3) == pytest.approx(PRIORS[3])

"""The acceptance of a request's drafts: estimated by match length, also from drafts that no step verified."""

import pytest

from reference_server.model_server.speculation.acceptance import (
    LONGEST_PAUSE,
    PRIORS,
    AcceptanceRate,
    DraftHistory,
    overall_rates,
)


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
    history = DraftHistory(overall_rates())
    history.guess(2, 3, match_len=2)

    history.settle([1, 2])
    assert history.rate(2) == pytest.approx(PRIORS[2])
    history.settle([1, 2, 3, 4])
    assert history.rate(2) > PRIORS[2]
    assert history.rate(3) == pytest.approx(PRIORS[3])


def test_a_new_request_starts_from_the_rates_of_all() -> None:
    overall = overall_rates()
    first = DraftHistory(overall)
    for _ in range(100):
        first.drafted(4)
        first.verified(0, 4)

    assert DraftHistory(overall).rate(4) < 0.1
    assert DraftHistory(overall).rate(3) == pytest.approx(PRIORS[3])


def test_a_request_without_drafts_is_left_alone_for_longer_each_time() -> None:
    history, pauses = DraftHistory(overall_rates()), []
    ids = [0] * 100
    for _ in range(6):
        before = history.look_at
        history.pause(history.look_at)
        pauses.append(history.look_at - before)

    assert pauses == [1, 2, 4, 8, LONGEST_PAUSE, LONGEST_PAUSE]
    history.guess(50, 0, match_len=2)
    history.settle(ids)
    history.pause(60)
    assert history.look_at == 61

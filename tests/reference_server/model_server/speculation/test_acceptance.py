"""The acceptance of a request's drafts: estimated by match length, also from drafts that no step verified."""

import pytest

from reference_server.model_server.speculation.acceptance import (
    DECAY,
    PAUSE_OF_FREE_LOOKS,
    DraftHistory,
    overall_rates,
)
from reference_server.model_server.speculation.decayed_mean import DecayedMean

PRIORS = (0.5, 0.3, 0.3, 0.5, 0.7)


def rates() -> list[DecayedMean]:
    return overall_rates(PRIORS)


def test_the_estimate_follows_the_last_outcomes() -> None:
    rate = DecayedMean(0.5, DECAY)
    for _ in range(30):
        rate.add(True)
    assert rate.value > 0.95

    for _ in range(30):
        rate.add(False)
    assert rate.value < 0.05


def test_tokens_after_the_first_refused_one_do_not_count() -> None:
    short, long = DraftHistory(rates()), DraftHistory(rates())
    short.drafted([2, 2])
    short.verified(1, 2)
    long.drafted([2] * 8)
    long.verified(1, 8)

    assert short.rate(2) == long.rate(2)


def test_each_token_of_a_draft_counts_for_its_own_level() -> None:
    history = DraftHistory(rates())
    history.drafted([4, 1, 1])
    history.verified(1, 3)

    assert history.rate(4) > PRIORS[4]
    assert history.rate(1) < PRIORS[1]
    assert history.rate(0) == pytest.approx(PRIORS[0])


def test_a_guess_is_settled_by_the_token_at_its_place() -> None:
    history = DraftHistory(rates())
    history.guess(2, 3, level=2)

    history.settle([1, 2])
    assert history.rate(2) == pytest.approx(PRIORS[2])
    history.settle([1, 2, 3, 4])
    assert history.rate(2) > PRIORS[2]
    assert history.rate(3) == pytest.approx(PRIORS[3])


def test_a_new_request_starts_from_the_rates_of_all() -> None:
    overall = rates()
    first = DraftHistory(overall)
    for _ in range(100):
        first.drafted([4] * 4)
        first.verified(0, 4)

    assert DraftHistory(overall).rate(4) < 0.1
    assert DraftHistory(overall).rate(3) == pytest.approx(PRIORS[3])


def test_a_request_without_drafts_is_left_alone_for_longer_each_time() -> None:
    history, pauses = DraftHistory(rates()), []
    ids = [0] * 100
    for _ in range(6):
        before = history.look_at
        assert not history.looked(-0.1, history.look_at)
        pauses.append(history.look_at - before)

    assert pauses == [1, 2, 4, 8, PAUSE_OF_FREE_LOOKS, PAUSE_OF_FREE_LOOKS]
    history.guess(50, 0, level=2)
    history.settle(ids)
    history.looked(-0.1, 60)
    assert history.look_at == 61


def test_a_longer_pause_is_allowed_where_looking_is_dear() -> None:
    history = DraftHistory(rates())
    for _ in range(6):
        history.looked(-0.1, history.look_at, longest=30)

    assert history.look_at == 1 + 2 + 4 + 8 + 16 + 30


def test_looks_that_save_time_in_the_mean_are_made_at_every_token() -> None:
    history = DraftHistory(rates())
    # Each second look of draft heads finds a draft that saves more than the looks cost.
    made = [history.looked(value, 10) for value in (1.5, -0.8) * 10]

    assert all(made)
    assert history.look_at == 0


def test_looks_that_lose_time_in_the_mean_become_rare_although_some_find_a_draft() -> None:
    history, num_ids, num_looks = DraftHistory(rates()), 0, 0
    while num_ids < 1000:
        num_looks += 1
        history.looked(0.5 if num_looks % 8 == 0 else -0.8, num_ids, longest=80)
        num_ids = max(num_ids + 1, history.look_at)

    assert num_looks < 150


def test_a_new_request_starts_with_the_mean_value_of_all_looks() -> None:
    assert DraftHistory(rates(), look_value=0.9).looked(-0.8, 5)
    assert not DraftHistory(rates(), look_value=0.7).looked(-0.8, 5)

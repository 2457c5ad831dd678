import pytest

from benchmarks.tuner.search import Card, card_of, one_search


@pytest.fixture(scope="module")
def card() -> Card:
    return card_of("tight")


@pytest.mark.slow
def test_few_configurations_of_the_card_are_good(card):
    _, feasible, near = card.optimum()

    assert feasible == pytest.approx(0.018, abs=0.002)
    assert near < 0.006


def successes(card, strategy, seeds):
    return sum(one_search(card, strategy, seed, 40)[40] == "good" for seed in range(seeds))


@pytest.mark.slow
def test_tuning_1_the_default_beats_random_search(card):
    assert successes(card, "default", 4) > successes(card, "random", 4)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_tuning_1_the_default_reaches_its_share(card):
    assert successes(card, "default", 20) >= 20 * (0.78 - 0.10)

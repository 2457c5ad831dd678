import random

import pytest

from loadgen.datasets.lengths import Lengths


@pytest.mark.parametrize(
    ("text", "mean", "tolerance"),
    [("128", 128, 0), ("uniform:64,256", 160, 3), ("normal:128,32", 128, 2), ("lognormal:128,0.5", 145, 4)],
)
def test_draws_have_the_mean_of_the_distribution(text, mean, tolerance):
    lengths = Lengths.parse(text)
    rng = random.Random(1)

    draws = [lengths.draw(rng) for _ in range(5_000)]

    assert sum(draws) / len(draws) == pytest.approx(mean, abs=tolerance)
    assert min(draws) >= 1
    assert str(lengths) == text


def test_a_normal_is_truncated_not_clipped():
    lengths = Lengths.parse("normal:2,5")
    rng = random.Random(1)

    draws = [lengths.draw(rng) for _ in range(2_000)]

    # Clipping would pile two fifths of the draws up at 1.
    assert draws.count(1) < 500


@pytest.mark.parametrize(
    "text", ["", "abc", "0", "-3", "1.5", "uniform:1", "uniform:9,3", "normal:5,-1", "normal:nan,1", "zipf:2", "1,2"]
)
def test_what_is_no_length_is_refused(text):
    with pytest.raises(ValueError, match="is no length"):
        Lengths.parse(text)

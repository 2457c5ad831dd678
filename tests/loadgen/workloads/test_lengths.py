import random

import pytest

from loadgen.workloads.lengths import Joint, Lengths, read_pairs


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
def test_a_wrong_length_is_refused(text):
    with pytest.raises(ValueError, match="is not a length"):
        Lengths.parse(text)


def test_metrics_9_zipf_lengths_follow_their_weights():
    lengths = Lengths.parse("zipf:1000,1.5")
    rng = random.Random(1)

    draws = [lengths.draw(rng) for _ in range(20_000)]

    total = sum(k**-1.5 for k in range(1, 1001))
    assert draws.count(1) / 20_000 == pytest.approx(1 / total, abs=0.012)
    assert draws.count(2) / 20_000 == pytest.approx(2**-1.5 / total, abs=0.012)
    assert max(draws) <= 1_000
    assert str(lengths) == "zipf:1000,1.5"


def test_metrics_9_empirical_lengths_are_those_of_the_file(tmp_path):
    file = tmp_path / "lengths.csv"
    file.write_text("tokens\n10\n10\n10\n500\n")
    lengths = Lengths.parse(f"empirical:{file}")
    rng = random.Random(1)

    draws = [lengths.draw(rng) for _ in range(4_000)]

    assert set(draws) == {10, 500}
    assert draws.count(500) / 4_000 == pytest.approx(0.25, abs=0.03)
    assert (str(lengths), lengths.longest) == (f"empirical:{file}", 500)


def test_metrics_9_joint_pairs_stay_together(tmp_path):
    file = tmp_path / "pairs.csv"
    file.write_text("input,output\n10,1\n2000,300\n")
    joint = Joint(read_pairs(file))
    rng = random.Random(1)

    assert {joint.draw(rng) for _ in range(100)} == {(10, 1), (2_000, 300)}


@pytest.mark.parametrize("text", ["", "input,output\n", "5\n", "5,x\n", "5,0\n", "5,99999999999\n"])
def test_a_wrong_file_of_pairs_is_refused(tmp_path, text):
    file = tmp_path / "pairs.csv"
    file.write_text(text)

    with pytest.raises(ValueError, match=r"pairs\.csv"):
        read_pairs(file)


@pytest.mark.parametrize("text", ["zipf:0,1", "zipf:9999999,1", "zipf:10,-1", "empirical:/nowhere"])
def test_a_wrong_zipf_or_empirical_length_is_refused(text):
    with pytest.raises(ValueError, match=r"is not a length|not a file of lengths"):
        Lengths.parse(text)

from tuner.study.statistics.drift_check import drift_of
from tuner.study.statistics.noise_floor import NoiseFloor, noise_floor
from tuner.trial.objective import Objective
from tuner.trial.outcome import TrialResult

TOKENS = Objective("output_tokens_per_s")
FLOOR = NoiseFloor(4, {"output_tokens_per_s": 0.02})


def result(number, value):
    return TrialResult(number, {}, "measured", value=value, measured={"output_tokens_per_s": value})


def test_drift_beyond_noise_corrects_the_results_between_checks():
    drift = drift_of([result(10, 100.0), result(20, 80.0)], FLOOR, TOKENS)

    assert drift is not None
    assert drift.is_real
    assert [each.value for each in drift.corrected([result(5, 50.0), result(15, 90.0), result(20, 80.0)])] == [
        50.0,
        100.0,
        100.0,
    ]


def test_drift_within_noise_corrects_nothing():
    drift = drift_of([result(10, 100.0), result(20, 98.0)], FLOOR, TOKENS)

    assert drift is not None
    assert not drift.is_real
    assert drift.corrected([result(15, 90.0)])[0].value == 90.0


def test_one_check_gives_no_drift():
    assert drift_of([result(10, 100.0)], FLOOR, TOKENS) is None


def test_the_noise_floor_is_the_deviation_of_logarithms():
    floor = noise_floor([result(0, 100.0), result(0, 110.0)])

    assert floor is not None
    assert round(floor.deviations["output_tokens_per_s"], 4) == 0.0674
    assert noise_floor([result(0, 100.0)]) is None


def test_more_rounds_show_smaller_gains():
    few, many = FLOOR.smallest_gain("output_tokens_per_s", 3, 3), FLOOR.smallest_gain("output_tokens_per_s", 10, 3)

    assert few is not None
    assert many is not None
    assert many < few
    assert FLOOR.smallest_gain("output_tokens_per_s", 1, 3) is None

import pytest

from tuner.doomed import doom_of, is_tried_anyway
from tuner.outcome import TrialResult


def settings(budget, fraction, quantize="none"):
    return {"max_batch_prefill_tokens": budget, "cuda_memory_fraction": fraction, "quantize": quantize}


def dead(number, cause, budget, fraction, **how):
    return TrialResult(number, settings(budget, fraction), "infeasible", phase="launch", cause=cause, **how)


@pytest.mark.parametrize(
    ("cause", "budget", "fraction", "is_doomed"),
    [
        ("memory", 2048, 0.9, True),
        ("memory", 4096, 0.95, True),
        ("memory", 4096, 0.85, False),
        ("memory", 1024, 0.95, False),
        ("no_cache", 4096, 0.8, True),
        ("no_cache", 4096, 0.95, False),
        ("crash", 4096, 0.95, False),
    ],
)
def test_what_asks_for_more_than_what_died_is_doomed(cause, budget, fraction, is_doomed):
    assert (doom_of(settings(budget, fraction), [dead(1, cause, 2048, 0.9)]) is not None) is is_doomed


def test_another_quantization_is_another_choice():
    assert doom_of(settings(4096, 1.0, "fp8"), [dead(1, "memory", 2048, 0.9)]) is None


def test_a_doomed_configuration_that_survives_ends_the_rule():
    survivor = TrialResult(2, settings(4096, 0.95), "measured", value=1.0, attributes={"doomed_by": 1})

    assert doom_of(settings(4096, 0.95), [dead(1, "memory", 2048, 0.9), survivor]) is None


def test_every_tenth_doomed_configuration_is_launched_all_the_same():
    doomed = [dead(number, "doomed", 1, 1.0) for number in range(9)]

    assert is_tried_anyway(doomed)
    assert not is_tried_anyway(doomed[:8])


def test_a_flag_that_the_launcher_refused_is_not_given_again():
    refused = dead(1, "flag", 2048, 0.9, log_tail="error: invalid value for '--quantize'")

    assert "refuses `quantize` none" in str(doom_of(settings(64, 0.5), [refused]))
    assert doom_of(settings(64, 0.5, "fp8"), [refused]) is None

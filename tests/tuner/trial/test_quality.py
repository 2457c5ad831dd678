"""The quality guard: when answers are compared, and when a finalist is rejected."""

from pathlib import Path

import pytest

from tests.tuner.studies import SETUP
from tuner.config import QualitySection
from tuner.trial.outcome import TrialResult
from tuner.trial.quality import QualityGuard

BASELINE = TrialResult(0, {"model_id": "preset:tiny-llama"}, "measured", 100.0)
TOO_FEW = "88% of the answers' tokens equal those of the defaults, but `min_agreement` is 90%"
OURS = [[1, 2, 3, 4], [5, 6, 7, 8]]


class Answers:
    """Returns fixed answers by `quantize` value and records the calls."""

    def __init__(self, theirs):
        self.theirs = theirs
        self.asked = []

    def __call__(self, settings, _guard, _directory):
        self.asked.append(settings.get("quantize"))
        return self.theirs if settings.get("quantize") else OURS


def guard_with(answers, folder: Path, **section):
    return QualityGuard(QualitySection(**section), SETUP, BASELINE, folder, answers)


def finalist(**settings):
    return TrialResult(4, {"model_id": "preset:tiny-llama", **settings}, "measured", 150.0)


@pytest.mark.parametrize(
    ("theirs", "least", "reason"),
    [
        (OURS, 0.90, None),
        ([[1, 2, 3, 4], [5, 6, 7, 9]], 0.85, None),
        ([[1, 2, 3, 4], [5, 6, 7, 9]], 0.90, TOO_FEW),
        ([[1, 2, 3], [5, 6, 7, 8]], 0.90, TOO_FEW),
    ],
    ids=["equal", "within", "beyond", "shorter"],
)
def test_a_finalist_is_rejected_if_too_few_tokens_agree(tmp_path, theirs, least, reason):
    answers = Answers(theirs)

    assert guard_with(answers, tmp_path, min_agreement=least)(finalist(quantize="fp8")) == reason
    assert answers.asked == ["fp8", None]


@pytest.mark.parametrize("settings", [{}, {"quantize": "none"}, {"max_batch_prefill_tokens": 512}])
def test_the_guard_is_not_used_for_equal_weights(tmp_path, settings):
    answers = Answers([[9]])

    assert guard_with(answers, tmp_path)(finalist(**settings)) is None
    assert answers.asked == []


@pytest.mark.parametrize(("cache", "answered"), [("fp8_e4m3fn", 2), ("auto", 0)])
def test_a_finalist_with_an_eight_bit_cache_is_compared(tmp_path, cache, answered):
    answers = Answers(OURS)

    assert guard_with(answers, tmp_path)(finalist(kv_cache_dtype=cache)) is None
    assert len(answers.asked) == answered


def test_random_weights_turn_the_guard_off_with_a_reason(tmp_path):
    baseline = TrialResult(0, {"model_id": "preset:llama-125m"}, "measured", 100.0)
    answers = Answers([[9]])
    guard = QualityGuard(QualitySection(), SETUP, baseline, tmp_path, answers)

    assert guard(finalist(quantize="fp8")) is None
    assert "random weights" in (guard.why_off or "")
    assert answers.asked == []

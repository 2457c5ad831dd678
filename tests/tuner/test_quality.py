"""The quality guard: whose answers are compared, and what becomes of a finalist whose answers differ."""

from pathlib import Path

import pytest

from tests.tuner.studies import BENCH
from tuner.config import QualitySection
from tuner.outcome import TrialResult
from tuner.quality import QualityGuard

BASELINE = TrialResult(0, {"model_id": "preset:tiny-llama"}, "measured", 100.0)
TOO_FEW = "its answers agree with the defaults' in 88% of the tokens, and 90% are asked for"
OURS = [[1, 2, 3, 4], [5, 6, 7, 8]]


class Answers:
    """Gives each `quantize` value its answers and notes whom it was asked for."""

    def __init__(self, theirs):
        self.theirs = theirs
        self.asked = []

    def __call__(self, settings, _guard, _directory):
        self.asked.append(settings.get("quantize"))
        return self.theirs if settings.get("quantize") else OURS


def guard_with(answers, folder: Path, **section):
    return QualityGuard(QualitySection(**section), BENCH, BASELINE, folder, answers)


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
def test_other_weights_keep_their_place_while_enough_tokens_agree(tmp_path, theirs, least, reason):
    answers = Answers(theirs)

    assert guard_with(answers, tmp_path, min_agreement=least)(finalist(quantize="fp8")) == reason
    assert answers.asked == ["fp8", None]


@pytest.mark.parametrize("settings", [{}, {"quantize": "none"}, {"max_batch_prefill_tokens": 512}])
def test_the_same_weights_are_not_asked_at_all(tmp_path, settings):
    answers = Answers([[9]])

    assert guard_with(answers, tmp_path)(finalist(**settings)) is None
    assert answers.asked == []


def test_random_weights_turn_the_guard_off_and_it_says_so(tmp_path):
    baseline = TrialResult(0, {"model_id": "preset:llama-125m"}, "measured", 100.0)
    answers = Answers([[9]])
    guard = QualityGuard(QualitySection(), BENCH, baseline, tmp_path, answers)

    assert guard(finalist(quantize="fp8")) is None
    assert "random weights" in (guard.off or "")
    assert answers.asked == []

"""The residual model: it corrects predictions, respects limits and memory, and declines if predictions are useless."""

import math
import random

import pytest

from tuner.proposers.proposal import Decline
from tuner.simulator.prediction_accuracy import Grade
from tuner.simulator.residual_candidates import KnobRange, Observation, PredictedCandidate, ScoredCandidate
from tuner.simulator.residual_model import ResidualModel
from tuner.trial.objective import Limit, Objective

KNOBS = (
    KnobRange("max_batch_prefill_tokens", 1024, 16384, log=True),
    KnobRange("cuda_memory_fraction", 0.8, 1.0),
    KnobRange("quantize", choices=("none", "fp8")),
)
SPEED = Objective("output_tokens_per_s", (Limit("ttft_p95_ms", max=1000.0),))


def pool(count: int = 200) -> list[PredictedCandidate]:
    rng = random.Random(1)
    found = []
    for _ in range(count):
        settings = {
            "max_batch_prefill_tokens": round(1024 * 16 ** rng.random()),
            "cuda_memory_fraction": round(rng.uniform(0.8, 1.0), 3),
            "quantize": rng.choice(("none", "fp8")),
        }
        x = math.log(settings["max_batch_prefill_tokens"] / 1024) / math.log(16)
        speed = 1000 * (1 + x) * (1.2 if settings["quantize"] == "fp8" else 1.0)
        found.append(PredictedCandidate(settings, {"output_tokens_per_s": speed, "ttft_p95_ms": 400 + 800 * x}))
    return found


def launched(prediction: PredictedCandidate, factor: float = 1.0) -> Observation:
    return Observation(prediction.settings, {name: value * factor for name, value in prediction.metrics.items()})


def test_the_first_proposal_is_fast_and_within_the_limit():
    proposal = ResidualModel(KNOBS, SPEED, pool()).propose([])

    assert isinstance(proposal, ScoredCandidate)
    assert proposal.settings["quantize"] == "fp8"
    assert proposal.predicted["ttft_p95_ms"] < 1000
    assert 0.3 < proposal.chance < 1


def test_a_quantize_value_slower_than_predicted_is_not_proposed_again():
    predictions = pool()
    slow = [each for each in predictions if each.settings["quantize"] == "fp8"][:4]
    fair = [each for each in predictions if each.settings["quantize"] == "none"][:4]
    launches = [
        Observation(e.settings, {**e.metrics, "output_tokens_per_s": e.metrics["output_tokens_per_s"] * 0.78})
        for e in slow
    ]

    proposal = ResidualModel(KNOBS, SPEED, predictions).propose([*launches, *map(launched, fair)])

    assert isinstance(proposal, ScoredCandidate)
    assert proposal.settings["quantize"] == "none"


def test_measured_and_running_configurations_are_not_proposed():
    predictions = pool(3)
    model = ResidualModel(KNOBS, SPEED, predictions)

    proposal = model.propose([launched(predictions[0])], [predictions[1].settings])

    assert isinstance(proposal, ScoredCandidate)
    assert proposal.settings == predictions[2].settings
    answer = model.propose([launched(each) for each in predictions])
    assert isinstance(answer, Decline)
    assert answer.is_done


def test_dominated_candidates_are_not_proposed():
    predictions = pool()
    model = ResidualModel(KNOBS, SPEED, predictions)
    dead = {"max_batch_prefill_tokens": 1024, "cuda_memory_fraction": 0.8, "quantize": "fp8"}

    proposal = model.propose([Observation(dead, is_out_of_memory=True)])

    assert isinstance(proposal, ScoredCandidate)
    assert proposal.settings["quantize"] == "none"


def test_a_wrong_level_is_accepted_and_a_wrong_shape_is_refused():
    predictions = pool()[:6]
    model = ResidualModel(KNOBS, SPEED, predictions)
    wild = [launched(each, factor) for each, factor in zip(predictions, (1, 2, 0.5, 3, 0.4, 1.5), strict=True)]

    assert model.grade([launched(each, 3.0) for each in predictions]).grade is Grade.GOOD
    answer = model.propose(wild)
    assert isinstance(answer, Decline)
    assert not answer.is_done
    assert "the shape of" in answer.reason


def test_predictions_that_rank_launches_wrongly_are_refused():
    predictions = sorted(pool(60), key=lambda each: each.metrics["output_tokens_per_s"])[::5]
    speeds = [each.metrics["output_tokens_per_s"] for each in predictions][::-1]
    middle = math.sqrt(speeds[0] * speeds[-1])
    launches = [
        Observation(e.settings, {**e.metrics, "output_tokens_per_s": middle * (speed / middle) ** 0.35})
        for e, speed in zip(predictions, speeds, strict=True)
    ]

    graded = ResidualModel(KNOBS, SPEED, predictions, {"output_tokens_per_s": 0.3}).grade(launches)
    strict = ResidualModel(KNOBS, SPEED, predictions, {"output_tokens_per_s": 0.01}).grade(launches)

    assert graded.grade is not Grade.REFUSE
    assert strict.grade is Grade.REFUSE


def test_it_is_done_after_three_launches_without_expected_gain():
    predictions = pool()
    launches = [
        Observation(each.settings, each.metrics, expected_gain=gain)
        for each, gain in zip(predictions, (0.2, 0.004, 0.001, 0.002), strict=False)
    ]

    answer = ResidualModel(KNOBS, SPEED, predictions).propose(launches)
    assert isinstance(answer, Decline)
    assert answer.is_done
    assert isinstance(ResidualModel(KNOBS, SPEED, predictions).propose(launches[:3]), ScoredCandidate)


def test_without_feasible_candidates_the_smallest_violation_is_proposed():
    objective = Objective("output_tokens_per_s", (Limit("ttft_p95_ms", max=1.0),))

    proposal = ResidualModel(KNOBS, objective, pool()).propose([])

    assert isinstance(proposal, ScoredCandidate)
    assert "smallest predicted violation" in proposal.note
    assert proposal.predicted["ttft_p95_ms"] == pytest.approx(400, rel=0.1)


def test_finalists_are_ranked_by_posterior_mean_and_not_by_measured_value():
    predictions = pool()
    good, noisy = (
        next(e for e in predictions if 1300 < e.metrics["output_tokens_per_s"] < 1400),
        next(e for e in predictions if 1200 < e.metrics["output_tokens_per_s"] < 1230),
    )
    others = [launched(each) for each in predictions[:8]]

    first, second = ResidualModel(KNOBS, SPEED, [*predictions]).finalists(
        [
            launched(good),
            launched(noisy, 1.08),
            *[e for e in others if e.measured["output_tokens_per_s"] < 1150],
        ],
        2,
    )

    assert first == good.settings
    assert second == noisy.settings

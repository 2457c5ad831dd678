"""The guide: it finds what a hidden law moves, minds limits and memory, and steps back from a useless simulator."""

import math
import random

import pytest

from tuner.guide import Done, Grade, Guide, Knob, Launch, Prediction, Proposal, StepBack
from tuner.objective import Limit, Objective

KNOBS = (
    Knob("max_batch_prefill_tokens", 1024, 16384, log=True),
    Knob("cuda_memory_fraction", 0.8, 1.0),
    Knob("quantize", choices=("none", "fp8")),
)
SPEED = Objective("output_tokens_per_s", (Limit("ttft_p95_ms", max=1000.0),))


def pool(count: int = 200) -> list[Prediction]:
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
        found.append(Prediction(settings, {"output_tokens_per_s": speed, "ttft_p95_ms": 400 + 800 * x}))
    return found


def launched(prediction: Prediction, factor: float = 1.0) -> Launch:
    return Launch(prediction.settings, {name: value * factor for name, value in prediction.metrics.items()})


def test_the_first_proposal_is_fast_and_within_the_limit():
    proposal = Guide(KNOBS, SPEED, pool()).propose([])

    assert isinstance(proposal, Proposal)
    assert proposal.settings["quantize"] == "fp8"
    assert proposal.predicted["ttft_p95_ms"] < 1000
    assert 0.3 < proposal.chance < 1


def test_a_value_that_is_slower_than_predicted_is_left():
    predictions = pool()
    slow = [each for each in predictions if each.settings["quantize"] == "fp8"][:4]
    fair = [each for each in predictions if each.settings["quantize"] == "none"][:4]
    launches = [
        Launch(e.settings, {**e.metrics, "output_tokens_per_s": e.metrics["output_tokens_per_s"] * 0.78}) for e in slow
    ]

    proposal = Guide(KNOBS, SPEED, predictions).propose([*launches, *map(launched, fair)])

    assert isinstance(proposal, Proposal)
    assert proposal.settings["quantize"] == "none"


def test_nothing_is_launched_twice_nor_what_another_worker_has_in_hand():
    predictions = pool(3)
    guide = Guide(KNOBS, SPEED, predictions)

    proposal = guide.propose([launched(predictions[0])], [predictions[1].settings])

    assert isinstance(proposal, Proposal)
    assert proposal.settings == predictions[2].settings
    assert isinstance(guide.propose([launched(each) for each in predictions]), Done)


def test_what_asks_for_no_less_memory_than_one_that_died_is_not_proposed():
    predictions = pool()
    guide = Guide(KNOBS, SPEED, predictions)
    dead = {"max_batch_prefill_tokens": 1024, "cuda_memory_fraction": 0.8, "quantize": "fp8"}

    proposal = guide.propose([Launch(dead, died=True)])

    assert isinstance(proposal, Proposal)
    assert proposal.settings["quantize"] == "none"


def test_a_level_that_is_wrong_is_no_fault_and_a_shape_that_is_wrong_is():
    predictions = pool()[:6]
    guide = Guide(KNOBS, SPEED, predictions)
    wild = [launched(each, factor) for each, factor in zip(predictions, (1, 2, 0.5, 3, 0.4, 1.5), strict=True)]

    assert guide.grade([launched(each, 3.0) for each in predictions]).grade is Grade.GOOD
    answer = guide.propose(wild)
    assert isinstance(answer, StepBack)
    assert "in shape" in answer.reason


def test_predictions_that_rank_launches_wrongly_are_refused():
    predictions = sorted(pool(60), key=lambda each: each.metrics["output_tokens_per_s"])[::5]
    speeds = [each.metrics["output_tokens_per_s"] for each in predictions][::-1]
    middle = math.sqrt(speeds[0] * speeds[-1])
    launches = [
        Launch(e.settings, {**e.metrics, "output_tokens_per_s": middle * (speed / middle) ** 0.35})
        for e, speed in zip(predictions, speeds, strict=True)
    ]

    graded = Guide(KNOBS, SPEED, predictions, {"output_tokens_per_s": 0.3}).grade(launches)
    strict = Guide(KNOBS, SPEED, predictions, {"output_tokens_per_s": 0.01}).grade(launches)

    assert graded.grade is not Grade.REFUSE
    assert strict.grade is Grade.REFUSE


def test_it_ends_when_three_launches_running_promised_nothing():
    predictions = pool()
    launches = [
        Launch(each.settings, each.metrics, expected_gain=gain)
        for each, gain in zip(predictions, (0.2, 0.004, 0.001, 0.002), strict=False)
    ]

    assert isinstance(Guide(KNOBS, SPEED, predictions).propose(launches), Done)
    assert isinstance(Guide(KNOBS, SPEED, predictions).propose(launches[:3]), Proposal)


def test_where_nothing_can_meet_the_limits_the_least_violating_is_next():
    objective = Objective("output_tokens_per_s", (Limit("ttft_p95_ms", max=1.0),))

    proposal = Guide(KNOBS, objective, pool()).propose([])

    assert isinstance(proposal, Proposal)
    assert "least violating" in proposal.note
    assert proposal.predicted["ttft_p95_ms"] == pytest.approx(400, rel=0.1)


def test_finalists_are_chosen_by_what_the_model_expects_and_not_by_luck():
    predictions = pool()
    good, lucky = (
        next(e for e in predictions if 1300 < e.metrics["output_tokens_per_s"] < 1400),
        next(e for e in predictions if 1200 < e.metrics["output_tokens_per_s"] < 1230),
    )
    others = [launched(each) for each in predictions[:8]]

    first, second = Guide(KNOBS, SPEED, [*predictions]).finalists(
        [launched(good), launched(lucky, 1.08), *[e for e in others if e.measured["output_tokens_per_s"] < 1150]], 2
    )

    assert first == good.settings
    assert second == lucky.settings

import math

import pytest

from reports.stats.estimators import Interval
from tuner.config import LimitSection, ObjectiveSection
from tuner.errors import SpaceError
from tuner.trial.objective import Limit, Objective


def test_a_limit_that_is_met_has_a_violation_below_zero():
    assert Limit("ttft_p95_ms", max=200.0).violation(100.0) == pytest.approx(math.log(0.5))
    assert Limit("requests_per_s", min=4.0).violation(8.0) == pytest.approx(math.log(0.5))


@pytest.mark.parametrize("value", [None, math.inf, math.nan, 1e9])
def test_an_extreme_or_missing_value_has_the_capped_violation(value):
    assert Limit("ttft_p95_ms", max=200.0).violation(value) == 1.0


def test_an_error_rate_of_zero_meets_its_limit():
    assert Limit("error_rate", max=0.01).violation(0.0) == -1.0


def test_without_limits_tokens_are_maximized_and_with_limits_goodput():
    limit = LimitSection(metric="ttft_p95_ms", max=10.0)

    assert Objective.of(ObjectiveSection()).maximize == "output_tokens_per_s"
    assert Objective.of(ObjectiveSection(limit=(limit,))).maximize == "goodput_rps"


@pytest.mark.parametrize("metric", ["ttft_p59_ms", "ttft", "output_tokens"])
def test_pages_2_a_limit_on_an_unknown_metric_is_refused_before_a_launch(metric):
    with pytest.raises(SpaceError, match=f"`{metric}` is not a metric"):
        Objective.of(ObjectiveSection(limit=(LimitSection(metric=metric, max=10.0),)))


def test_a_score_is_feasible_only_within_every_limit():
    objective = Objective("output_tokens_per_s", (Limit("ttft_p95_ms", max=100.0),))
    slow = {"output_tokens_per_s": 900.0, "ttft_p95_ms": 150.0}
    fast = {"output_tokens_per_s": 500.0, "ttft_p95_ms": 50.0}

    assert not objective.score(slow.get).is_feasible
    assert objective.score(fast.get).is_feasible
    assert not objective.score({"ttft_p95_ms": 50.0}.get).is_feasible
    assert list(objective.score(slow.get).violations) == ["ttft_p95_ms <= 100"]


def test_a_gain_of_a_latency_is_shown_as_its_fall():
    change = Objective("ttft_p95_ms").change(Interval(1.25, 1.0, 2.0))

    assert (change.value, change.lo, change.hi) == pytest.approx((-20.0, -50.0, 0.0))


@pytest.mark.parametrize(
    ("objective", "heading"),
    [
        (Objective("output_tokens_per_s"), "Output tokens/s"),
        (Objective("requests_per_s", second="ttft_p95_ms", choose="second"), "TTFT p95"),
        (Objective("requests_per_s", second="ttft_p95_ms"), "Requests/s and TTFT p95, geometric mean"),
    ],
)
def test_an_objective_has_the_titles_of_the_pages(objective, heading):
    assert objective.heading == heading

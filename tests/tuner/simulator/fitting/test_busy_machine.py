"""Fits to steps of a busy machine: the law is found, and judged by sums of steps, in which noise cancels."""

from collections.abc import Callable

import numpy as np
import pytest

from reference_server.router.scheduling.step_work import StepWork
from tuner.simulator.fitting.cost_file import Costs
from tuner.simulator.fitting.cost_model import CostModel, StepErrors
from tuner.simulator.fitting.equal_steps import spread_of_equal_steps
from tuner.simulator.fitting.fit_steps import fit, rescaled
from tuner.simulator.fitting.linear_law import LinearLaw
from tuner.simulator.fitting.traced_steps import TracedSteps

LAW = LinearLaw((9e6, 1e5, 6e4, 2.0, 0.0, 6e6, 2e5, 0.0, 0.0, 80.0))
SHARE_SLOW, MOST_TIMES = 0.3, 8.0
MEAN_TIMES = 1 - SHARE_SLOW + SHARE_SLOW * (1 + MOST_TIMES) / 2
PREFILL, DECODE = StepWork(4, 2048, 4 * 512**2), StepWork(rows=16, kv=16 * 600)
seeds = pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (2, 3, 4))])


def busy_launch(rng: np.random.Generator, true_ns: Callable[[StepWork], float], steps: int = 400) -> TracedSteps:
    """Steps of a server on a busy machine: three of ten take up to eight times as long, the others differ by 15 %."""
    works = []
    for _ in range(steps // 4):
        prompts, length = int(rng.integers(1, 8)), int(rng.integers(64, 1024))
        works.append(StepWork(prompts, prompts * length, prompts * length**2))
        rows = int(rng.choice([1, 4, 8, 16]))
        works += [StepWork(rows=rows, kv=rows * int(rng.integers(200, 1200))) for _ in range(3)]
    slow = np.where(rng.random(len(works)) < SHARE_SLOW, rng.uniform(1, MOST_TIMES, len(works)), 1.0)
    noise = slow * rng.lognormal(0, 0.15, len(works))
    return TracedSteps.of(works, [true_ns(work) for work in works] * noise)


@seeds
def test_pages_4_a_law_is_found_in_steps_of_a_busy_machine_and_is_usable(seed: int) -> None:
    rng = np.random.default_rng(seed)
    launches = [busy_launch(rng, LAW.step_ns) for _ in range(3)]

    model = fit(launches, with_intervals=False)
    costs = Costs({"none": model})

    assert model.errors is not None
    assert model.errors.median["decode"] > 0.08
    assert model.errors.sums["decode"] < 0.2
    assert costs.problem is None
    assert "the machine was busy" in (costs.noise or "")
    for work in (PREFILL, DECODE):
        # The median of a step's noise is about 1.13 times its quiet time.
        assert model.law.step_ns(work) == pytest.approx(1.13 * LAW.step_ns(work), rel=0.12)


@seeds
def test_pages_4_a_rescaled_law_has_the_mean_times_of_the_busy_machine(seed: int) -> None:
    rng = np.random.default_rng(seed)
    launches = [busy_launch(rng, LAW.step_ns) for _ in range(3)]
    [whole] = [TracedSteps.of([*map(tuple, launch.work)], launch.wall_ns) for launch in launches[:1]]

    model = rescaled(fit(launches, with_intervals=False), whole)

    for work in (PREFILL, DECODE):
        assert model.law.step_ns(work) == pytest.approx(MEAN_TIMES * LAW.step_ns(work), rel=0.25)


@seeds
def test_pages_4_a_wrong_law_is_refused_on_a_busy_machine_too(seed: int) -> None:
    """The true time of a decode step has a jump at eight rows, which no coefficient has."""
    rng = np.random.default_rng(seed)

    def true_ns(work: StepWork) -> float:
        return LAW.step_ns(work) * (4.0 if work.rows == 8 else 1.0)

    costs = Costs({"none": fit([busy_launch(rng, true_ns) for _ in range(3)], with_intervals=False)})

    assert "held-out decode" in (costs.problem or "")


@pytest.mark.slow
def test_the_error_of_sums_of_a_true_law_is_that_of_the_noise_of_64_steps() -> None:
    """Independent noise with a deviation of 40 %: the median error of a step is 27 %, that of 64 steps an eighth."""
    rng = np.random.default_rng(0)
    works = [StepWork(rows=int(rng.integers(1, 33)), kv=int(rng.integers(8_000, 10_000))) for _ in range(32_000)]
    law = LinearLaw((0.0, 0.0, 0.0, 0.0, 0.0, 6e6, 1e4, 0.0, 0.0, 10.0))
    wall_ns = [law.step_ns(work) for work in works] * rng.normal(1.0, 0.4, len(works)).clip(0.01)

    errors = fit([TracedSteps.of(works, wall_ns)], with_intervals=False).errors

    assert errors is not None
    assert errors.sums["decode"] == pytest.approx(0.6745 * 0.4 / 8, rel=0.12)
    assert errors.median["decode"] > 7 * errors.sums["decode"]
    assert errors.sizes["decode"] < 0.05


def test_the_spread_of_equal_steps_is_that_of_the_noise() -> None:
    rng = np.random.default_rng(0)
    work = rng.permutation(np.repeat(np.array([[1, 100], [2, 400], [4, 1600]], dtype=np.float64), 200, axis=0))
    predicted = work[:, 1] * 1e3
    deviation = 0.6745 * 0.2  # the median of the absolute value of a normal variable

    # An error of the law that equal steps share is no spread.
    wall = 1.5 * predicted * np.exp(rng.normal(0, 0.2, len(work)))

    assert spread_of_equal_steps(work, wall, predicted) == pytest.approx(deviation, rel=0.15)
    assert spread_of_equal_steps(work[:20], wall[:20], predicted[:20]) == 0.0


def test_steps_that_differ_in_work_have_no_spread() -> None:
    work = np.array([[4.0**power] for power in range(200)])

    assert spread_of_equal_steps(work, np.arange(1.0, 201.0), np.ones(200)) == 0.0


@pytest.mark.parametrize(
    ("median", "sums", "usable", "noted"),
    [(0.3, 0.05, True, False), (0.3, 0.14, True, True), (0.3, 0.25, False, True), (0.15, None, True, False)],
)
def test_pages_4_predictions_are_judged_by_sums_of_held_out_steps(
    median: float, sums: float | None, usable: bool, noted: bool
) -> None:
    found = {} if sums is None else {"prefill": sums}
    errors = StepErrors({"prefill": median}, {"prefill": 2 * median}, {"prefill": 0.0}, found)
    costs = Costs({"none": CostModel.from_json(CostModel({"tokens": 1.0}, errors=errors).to_json())})

    assert (costs.problem is None) == usable
    assert (costs.noise is not None) == noted
    assert costs.error == f"The median error of the cost model on held-out steps: prefill {100 * median:.1f} %."


def test_pages_4_the_error_is_named_with_its_limit() -> None:
    errors = StepErrors({"decode": 0.4}, {"decode": 0.9}, {"decode": 0.3}, {"decode": 0.25})
    costs = Costs({"none": CostModel({"tokens": 1.0}, errors=errors)})

    assert costs.problem == "the median error of held-out decode, in sums of 64 steps, is 25.0%, above 20%"
    assert costs.noise == (
        "the machine was busy during the measurement: equal steps differ by 30% (decode) in the median; sums of "
        "held-out steps are predicted with a median error of 25% (decode): expect this error in predictions"
    )


def test_pages_4_plans_have_steps_that_are_longer_by_the_error() -> None:
    errors = StepErrors({"prefill": 0.1, "decode": 0.2}, {}, {}, {"decode": 0.14})
    costs = Costs({"none": CostModel({"tokens": 100.0, "rows": 100.0}, errors=errors)})

    model = costs.with_errors().models["none"]

    assert model.coefficients == {"tokens": 100.0, "rows": pytest.approx(114.0)}


def test_a_law_without_held_out_steps_has_no_known_error() -> None:
    assert Costs({"none": CostModel({"tokens": 1.0})}).error is None

import numpy as np
import pytest

from reports.gate.change_point import (
    RUNS_AT_ONCE,
    SURE_CHANGE_POINT,
    Bisection,
    BisectionOutcome,
    ChangePoint,
    Conclusion,
    RevisionMeasurement,
    run_noise,
)

COMMITS = 33


def bisect(seed: int, first_changed: int | None, change: float, noise: float, drift: float = 0.0):
    """The conclusion of a simulated bisection, and the numbers of its runs and of its revisions."""
    generator = np.random.default_rng(seed)
    bisection, level, measurements = Bisection(COMMITS), 0.0, []
    while not isinstance(decided := bisection.next(measurements), Conclusion):
        for revision in decided:
            level += generator.normal(0, drift)
            is_changed = first_changed is not None and revision >= first_changed
            value = level + change * is_changed + generator.normal(0, noise)
            measurements.append(RevisionMeasurement(revision, value))
    return decided, len(measurements), len({each.revision for each in measurements})


@pytest.mark.parametrize(
    ("drift", "count"), [(0.003, 20), *(pytest.param(drift, 60, marks=pytest.mark.slow) for drift in (0.0, 0.003))]
)
def test_a_planted_change_of_5_percent_is_found_at_2_percent_noise(drift, count):
    found = []
    for seed in range(count):
        planted = int(np.random.default_rng([seed, 7]).integers(1, COMMITS))
        decided, runs, revisions = bisect(seed, planted, change=0.05, noise=0.02, drift=drift)
        assert runs <= 60
        assert revisions <= 10
        if decided.outcome is BisectionOutcome.FOUND and runs <= 60 - RUNS_AT_ONCE:
            assert decided.posterior.confidence >= SURE_CHANGE_POINT
        found.append(decided.first_changed == planted)

    assert sum(found) >= count - 3


@pytest.mark.parametrize("count", [20, pytest.param(60, marks=pytest.mark.slow)])
def test_without_a_change_there_is_no_difference(count):
    outcomes = [bisect(seed, None, change=0.0, noise=0.02)[0].outcome for seed in range(count)]

    assert outcomes.count(BisectionOutcome.NO_DIFFERENCE) >= count - 3
    assert BisectionOutcome.FOUND not in outcomes


@pytest.mark.slow
def test_two_thousand_bisections_are_right_in_95_percent():
    planted = [int(np.random.default_rng([seed, 8]).integers(1, COMMITS)) for seed in range(1_000)]
    found = [bisect(seed, first, 0.05, 0.02)[0].first_changed == first for seed, first in enumerate(planted)]
    none = [bisect(seed, None, 0.0, 0.02)[0].outcome is BisectionOutcome.NO_DIFFERENCE for seed in range(1_000)]

    assert np.mean(found) >= 0.95
    assert np.mean(none) >= 0.95


def test_a_large_change_between_two_commits_needs_the_ends_only():
    bisection = Bisection(2)
    measurements = [RevisionMeasurement(revision, 0.2 * revision) for _ in range(4) for revision in (0, 1)]

    decided = bisection.next(measurements)

    assert isinstance(decided, Conclusion)
    assert (decided.outcome, decided.first_changed) == (BisectionOutcome.FOUND, 1)


def test_a_change_that_is_too_small_for_the_budget_is_undecided():
    decided, runs, _ = bisect(3, 20, change=0.012, noise=0.02)

    assert decided.outcome in {BisectionOutcome.UNDECIDED, BisectionOutcome.NO_DIFFERENCE}
    assert runs <= 60


def test_the_first_revision_does_not_locate_the_change():
    posterior = ChangePoint(np.array([0.0, 0.5, 0.5]), 0.02)

    assert posterior.split_error(0) == 0.5
    assert posterior.split_error(1) == 0.0


def test_noise_is_estimated_from_repeated_runs():
    runs = [RevisionMeasurement(revision, 0.1 * repeat) for revision in range(20) for repeat in (0, 1)]

    assert run_noise(runs) == pytest.approx(0.0653, abs=1e-3)

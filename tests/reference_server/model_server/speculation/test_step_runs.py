"""What a run of drafts saves by its measured time, and the measured speed of plain steps."""

import pytest

from reference_server.model_server.speculation.step_runs import MOST_LOST, DraftRun, PlainSpeed

TOKEN_NS = 100.0
ONE_REQUEST = object()


def run_of(num_steps: int) -> DraftRun:
    """It starts at 1,000 ns with 50 ids; its first step takes 400 ns and gives one id."""
    return DraftRun(ONE_REQUEST, 0, num_steps, started_ns=1_000, ids=50, warm_ns=1_400, warm_ids=51)


def test_the_value_of_a_run_leaves_out_its_first_step_and_its_cost_does_not() -> None:
    run = run_of(5)

    # Four more steps: ten ids in the time of six plain ones.
    assert run.value(2_000, 61, TOKEN_NS) == pytest.approx((10 - 6) / 4)
    assert run.lost_ns(2_000, 61, TOKEN_NS) == pytest.approx(1_000 - 1_100)


def test_a_run_that_other_work_made_long_is_not_more_than_a_loss() -> None:
    run = run_of(5)

    assert run.value(1_000_000, 55, TOKEN_NS) == -MOST_LOST
    assert run.lost_ns(1_000_000, 55, TOKEN_NS) == 2 * MOST_LOST * 5 * TOKEN_NS


def test_the_speed_follows_the_rests_and_one_long_rest_moves_it_little() -> None:
    speed = PlainSpeed()
    assert speed.ratio is None

    speed.add(150.0, 100.0)
    assert speed.ratio == pytest.approx(1.5)
    for _ in range(20):
        speed.add(80.0, 100.0)
    assert speed.ratio == pytest.approx(0.8, rel=0.02)
    speed.add(100_000.0, 100.0)
    assert speed.ratio < 1.0

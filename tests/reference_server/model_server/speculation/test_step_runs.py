"""The tokens that a run of drafts saves by its measured time, and the measured speed of plain steps."""

import pytest

from reference_server.model_server.speculation.acceptance import DraftHistory
from reference_server.model_server.speculation.step_runs import MOST_LOST, DraftRun, PlainSpeed, Progress

TOKEN_NS = 100.0


def run_of(num_steps: int) -> DraftRun:
    """It starts at 1,000 ns with 50 ids; its first step takes 400 ns and gives one id."""
    run = DraftRun(object(), DraftHistory(()), num_steps, TOKEN_NS, Progress(1_000, 50))
    run.stepped(1_400, 51)
    return run


def test_the_value_of_a_run_leaves_out_its_first_step_and_its_cost_does_not() -> None:
    run = run_of(5)
    for now_ns, num_ids in ((1_550, 54), (1_700, 56), (1_850, 58), (2_000, 61)):
        run.stepped(now_ns, num_ids)

    # Four more steps: ten ids in the time of six plain ones.
    assert run.value == pytest.approx((10 - 6) / 4)
    assert run.lost_ns == pytest.approx(1_000 - 1_100)


def test_a_run_that_other_work_made_long_is_not_more_than_a_loss() -> None:
    run = run_of(2)
    run.stepped(1_000_000, 55)

    assert run.value == -MOST_LOST
    assert run.lost_ns == 2 * MOST_LOST * 2 * TOKEN_NS


def test_an_interrupted_step_has_its_tokens_and_the_mean_time_of_those_before_it() -> None:
    run = run_of(5)
    run.accepted = 3

    run.interrupted(50.0)

    assert run.newest == Progress(1_400 + 400, 51 + 1 + 3)
    assert run.value == pytest.approx(4 - 400 / TOKEN_NS)


def test_an_interrupted_first_step_has_its_expected_time() -> None:
    run = DraftRun(object(), DraftHistory(()), 4, TOKEN_NS, Progress(1_000, 50))

    run.interrupted(250.0)

    assert run.newest == Progress(1_250, 51)
    assert run.lost_ns == pytest.approx(150)


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

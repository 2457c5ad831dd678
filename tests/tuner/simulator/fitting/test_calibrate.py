"""The designed sweep, and calibrating the real server with it."""

import json
from pathlib import Path

import pytest

from tuner.cli import main
from tuner.simulator.fitting.calibrate import DECODED, REPEATS, designed


@pytest.mark.parametrize(("budget", "pool", "longest", "most"), [(4096, 20_000, 1024, 128), (256, 600, 4000, 8)])
def test_every_burst_is_within_the_budget_the_pool_and_the_limits(budget: int, pool: int, longest: int, most: int):
    bursts = designed(budget, pool, longest, most)

    assert bursts
    for burst in bursts:
        assert burst.count <= most
        assert burst.input_tokens <= longest
        is_decode = burst.output_tokens == DECODED
        assert burst.count * (burst.input_tokens + DECODED) <= pool if is_decode else True
        assert is_decode or burst.count * burst.input_tokens <= budget


def test_the_first_repeat_has_every_burst():
    bursts = designed(4096, 20_000, 1024, 128)

    assert {*bursts[: len(bursts) // REPEATS]} == {*bursts}


def test_only_a_server_with_step_traces_is_calibrated(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    space = tmp_path / "space.toml"
    space.write_text('[server]\nkind = "tgi-docker"\n')

    assert main(["simulate", "calibrate", str(space)]) == 2
    assert "only the bundled server writes step traces" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_calibrated_preset_predicts(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    space, cost = tmp_path / "space.toml", tmp_path / "cost.json"
    space.write_text(
        "[server.fixed]\ncpu_memory_gib = 0.05\nmax_input_tokens = 128\nmax_total_tokens = 160\n"
        '[param]\nmax_batch_prefill_tokens = { type = "int", low = 256, high = 1024, log = true }\n'
    )
    words = ["simulate", "calibrate", str(space), "--out", str(tmp_path / "c"), "-o", str(cost), "--json"]

    assert main(words) == 0
    model = json.loads(cost.read_text())["models"]["none"]
    assert model["steps"] > 50
    # A busy machine hides the cost of single tokens.
    assert model["coefficients_ns"]["prefill"] + model["coefficients_ns"]["tokens"] > 0
    capsys.readouterr()
    assert main(["simulate", "run", "--cost", str(cost), "--requests", "40", "--force", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["metrics"]["output_tokens_per_s"] > 0


def test_a_server_with_adapters_gets_bursts_that_use_1_2_4_of_them():
    bursts = [burst for burst in designed(4096, 20_000, 1024, 128, adapters=5) if burst.adapters]

    assert {burst.adapters for burst in bursts} == {1, 2, 4}
    assert all(burst.adapters <= burst.count for burst in bursts)
    assert {burst.output_tokens for burst in bursts} == {1, 8}
    assert len(bursts) == 3 * (1 + 3 + 3 + 3 + 1 + 3)
    assert not any(burst.adapters for burst in designed(4096, 20_000, 1024, 128))

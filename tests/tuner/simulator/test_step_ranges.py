"""Loads outside the measured sizes of steps are refused; a trace with a probe predicts small loads."""

import json
from pathlib import Path

import numpy as np
import pytest

from loadgen.config.bench_config import BenchConfig
from reference_server.router.scheduling.step_work import StepWork
from tuner.cli import main
from tuner.simulator.fitting.cost_file import UNKNOWN_RANGES, fit_costs, read_costs
from tuner.simulator.fitting.cost_model import CostModel
from tuner.simulator.fitting.linear_law import COLUMNS, LinearLaw
from tuner.simulator.fitting.traced_steps import TracedSteps
from tuner.simulator.load import load_of
from tuner.simulator.predict import predict
from tuner.simulator.step_ranges import RangeUse, StepRanges
from tuner.trial.request_bursts import FIRST_TOKEN
from tuner.trial.step_probe import probe_bursts

# ms: prefill 2 and 0.1 per token; decode 2, 0.6 per row, and 0.5 per 1000 keys.
TRUTH = LinearLaw((2e6, 0.0, 1e5, 0.0, 0.0, 2e6, 6e5, 0.0, 0.0, 500.0))
FACTS = {
    "scheduler": {"max_batch_prefill_tokens": 2048, "max_batch_total_tokens": 40_000},
    "settings": {},
    "model_id": "m",
}
LOAD = """
mode = "poisson"
rate = {rate}
input_tokens = "{tokens}"
output_tokens = "60"
warmup = "1s"
duration = "40s"
"""

PLAN = """
[plan]
rates = [1]
policies = ["round_robin"]
[[plan.limit]]
metric = "ttft_p95_ms"
max = 900
"""


def trace(*, with_probe: bool, noise: float = 0.15) -> TracedSteps:
    """Steps of 16 users with 450 to 550 keys per row, and those of a probe."""
    rng = np.random.default_rng(4)
    works = []
    for _ in range(150):
        rows = int(rng.integers(13, 17))
        works += [StepWork(rows=rows, kv=round(rows * rng.uniform(450, 550))) for _ in range(4)]
        tokens = int(rng.integers(400, 500))
        works.append(StepWork(1, tokens, tokens**2))
    if with_probe:
        for burst in probe_bursts(32, 1024):
            tokens = burst.count * burst.input_tokens
            works.append(StepWork(burst.count, tokens, tokens * burst.input_tokens))
            steps = burst.output_tokens - FIRST_TOKEN
            works += [StepWork(rows=burst.count, kv=tokens + burst.count * each) for each in range(1, steps + 1)]
    # The noise of a busy machine slows steps down.
    return TracedSteps.of(works, [TRUTH.step_ns(each) * rng.lognormal(0, noise) for each in works], FACTS)


def cost_file(tmp_path: Path, steps: TracedSteps) -> Path:
    path = tmp_path / "cost.json"
    fit_costs([steps], with_intervals=False).write(path)
    return path


def simulate(tmp_path: Path, cost: Path, *, rate: float, tokens: int = 450, more: tuple[str, ...] = ()) -> int:
    (tmp_path / "load.toml").write_text(LOAD.format(rate=rate, tokens=tokens))
    return main(["simulate", "run", "--cost", str(cost), "--load", str(tmp_path / "load.toml"), "--json", *more])


def test_a_trace_with_a_probe_predicts_a_low_rate(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    cost = cost_file(tmp_path, trace(with_probe=True))

    assert simulate(tmp_path, cost, rate=1) == 0

    predicted = json.loads(capsys.readouterr().out)["metrics"]["tpot_mean_ms"]
    costs = read_costs(cost)
    truth = CostModel(dict(zip(COLUMNS, TRUTH.coefficients, strict=False)))
    config = BenchConfig(mode="poisson", rate=1, seed=0, input_tokens="450", output_tokens="60", warmup=1, duration=40)
    exact = predict(costs.reference, truth, load_of(config), ("tpot_mean_ms",))["tpot_mean_ms"]
    assert predicted == pytest.approx(exact, rel=0.1)


def test_a_trace_of_one_size_refuses_a_low_rate_and_names_the_range(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    cost = cost_file(tmp_path, trace(with_probe=False))

    assert simulate(tmp_path, cost, rate=1) == 3
    told = capsys.readouterr().err
    assert "the load has decode steps of 1" in told
    assert "the trace has 13 to 16 rows" in told
    assert simulate(tmp_path, cost, rate=1, more=("--force",)) == 0
    assert "poor cost model" in json.loads(capsys.readouterr().out)["note"]


def test_a_plan_outside_the_measured_sizes_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    cost = cost_file(tmp_path, trace(with_probe=False))
    (tmp_path / "load.toml").write_text(
        'input_tokens = "450"\noutput_tokens = "60"\nconcurrency = 4\nduration = "5s"\n'
    )
    plan = tmp_path / "plan.toml"
    plan.write_text(PLAN)
    words = ["plan", str(plan), "--cost", str(cost), "--effort", "0.05", "--quiet"]

    assert main(words) == 3
    assert "the trace has 13 to 16 rows" in capsys.readouterr().out
    assert main([*words, "--force"]) == 0


def test_a_load_of_longer_prompts_than_the_probe_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    cost = cost_file(tmp_path, trace(with_probe=True))

    assert simulate(tmp_path, cost, rate=0.5, tokens=2000) == 3
    assert "keys per row" in capsys.readouterr().err


def test_costs_with_unknown_ranges_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    cost = cost_file(tmp_path, trace(with_probe=True))
    content = json.loads(cost.read_text())
    del content["models"]["none"]["ranges"]
    cost.write_text(json.dumps(content))

    assert simulate(tmp_path, cost, rate=1) == 3
    assert UNKNOWN_RANGES in capsys.readouterr().err


def test_rare_steps_do_not_widen_a_range():
    work = np.array([StepWork(rows=16, kv=16 * 500)] * 999 + [StepWork(rows=1, kv=500)], dtype=float)
    ranges = StepRanges.of(work)
    use = RangeUse()

    use.add(ranges, StepWork(rows=16, kv=8000), 9, 96)
    use.add(ranges, StepWork(rows=1, kv=500), 1, 4)
    assert use.problem(ranges) is None
    use.add(ranges, StepWork(rows=2, kv=1000), 1, 2)
    assert "decode steps of 1 to 2 rows, the trace has 16 rows" in (use.problem(ranges) or "")

"""Steps from differences of metrics: a known law simulates a load, and the fit reads only its metrics."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from loadgen.config.bench_config import BenchConfig
from reference_server.router.scheduling.calls import Prefill
from reference_server.router.scheduling.scheduler_options import SchedulerOptions
from reference_server.router.scheduling.step_work import StepWork
from tuner.commands.simulation.simulate_run import write_run
from tuner.errors import TraceError
from tuner.simulator.fitting.cost_file import fit_costs
from tuner.simulator.fitting.cost_model import FROM_METRICS
from tuner.simulator.fitting.linear_law import LinearLaw
from tuner.simulator.fitting.metric_steps import metric_steps, steps_of
from tuner.simulator.fitting.traced_steps import TracedSteps
from tuner.simulator.load import load_of
from tuner.simulator.predict import predict
from tuner.simulator.simulated_server import SimulatedServer
from tuner.simulator.simulation import NS_PER_S, Simulation

LAW = LinearLaw((9e6, 0.0, 6e4, 2.0, 0.0, 6e6, 2e5, 0.0, 0.0, 80.0))
LOAD = BenchConfig(mode="closed", concurrency=12, duration=30.0, input_tokens="uniform:512,1024", output_tokens="24")
SETTINGS = {"max_batch_prefill_tokens": 2048, "max_waiting_tokens": 5, "prefill_chunking": False}
POOL = 20_000
# Fraction of the time inside the server's timers.
SEEN = 0.94


def play(run: Path, settings: dict[str, Any], *, noise: float = 0.03) -> TracedSteps:
    """Simulate the load with the law; write a run directory with server metrics; return the steps."""
    rng = np.random.default_rng(14)
    works: list[StepWork] = []
    walls: list[float] = []
    ends: list[tuple[int, str]] = []

    class Law:
        kv_ns = None

        def step_ns(self, work: StepWork) -> float:
            works.append(work)
            walls.append(LAW.step_ns(work) * rng.lognormal(0, noise))
            return walls[-1]

    options = {name: settings[name] for name in ("max_batch_prefill_tokens", "max_waiting_tokens")}
    options |= {"max_batch_total_tokens": POOL, "supports_chunking": settings["prefill_chunking"]}
    simulation = Simulation(
        load_of(LOAD),
        [(SchedulerOptions(**options), Law())],
        with_gaps=True,
        on_call=lambda call, at_ns: ends.append((at_ns, "prefill" if type(call) is Prefill else "decode")),
    )
    write_run(run, simulation.run(), LOAD, {})
    manifest = json.loads((run / "manifest.json").read_text())
    manifest["target"] = {"info": {"max_total_tokens": 1088, "waiting_served_ratio": 1.2}}
    (run / "manifest.json").write_text(json.dumps(manifest))
    write_metrics(run, [(at_ns + wall, method, wall) for (at_ns, method), wall in zip(ends, walls, strict=True)])
    facts = {"scheduler": options, "settings": {name: {"value": value} for name, value in settings.items()}}
    return TracedSteps.of(works, walls, facts)


def write_metrics(run: Path, steps: list[tuple[float, str, float]]) -> None:
    """A scrape a second; `steps` are (end, method, seconds) in ns."""
    frame = pd.DataFrame(steps, columns=["end_ns", "method", "wall_ns"])
    rows = []
    for at_s in np.arange(0.3, frame["end_ns"].max() / NS_PER_S + 1):
        rows.append({"t_s": at_s, "name": "tgi_batch_max_total_tokens", "labels": "", "value": float(POOL)})
        for method, group in frame[frame["end_ns"] <= at_s * NS_PER_S].groupby("method"):
            values = {"count": float(len(group)), "sum": SEEN * group["wall_ns"].sum() / NS_PER_S}
            rows += [
                {
                    "t_s": at_s,
                    "name": f"tgi_batch_inference_duration_{name}",
                    "labels": f'method="{method}"',
                    "value": v,
                }
                for name, v in values.items()
            ]
    pd.DataFrame(rows).to_parquet(run / "server_metrics.parquet")


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with SETTINGS; no test changes it."""
    run = tmp_path_factory.mktemp("played") / "run"
    play(run, SETTINGS)
    return run


@pytest.mark.parametrize("chunking", [pytest.param(False, marks=pytest.mark.slow), True])
def test_simulation_V14_metrics_and_step_trace_of_one_run_give_the_same_predictions(tmp_path: Path, chunking: bool):
    settings = {**SETTINGS, "prefill_chunking": chunking}
    steps = play(tmp_path / "run", settings)

    sums = metric_steps(tmp_path / "run", settings)

    assert sums.is_from_metrics
    assert len(sums) < len(steps) / 10
    models = [fit_costs([each]).models["none"] for each in (steps, sums)]
    assert [model.source for model in models] == ["step trace", FROM_METRICS]
    # The measured settings, and half the prefill budget with longer waiting.
    for budget, waiting in ((2048, 5), (1024, 20)):
        changed = {"max_batch_prefill_tokens": budget, "max_waiting_tokens": waiting}
        server = SimulatedServer.of(steps.facts).with_settings(changed)
        names = ("output_tokens_per_s",)
        from_trace, from_metrics = (predict(server, model, load_of(LOAD), names)[names[0]] for model in models)
        assert from_metrics == pytest.approx(from_trace, rel=0.10)


def test_the_tokens_of_requests_equal_the_work_of_steps(tmp_path: Path):
    steps = play(tmp_path / "run", SETTINGS, noise=0.0)

    sums = metric_steps(tmp_path / "run", SETTINGS)

    # Without the work before the first scrape.
    assert sums.work[:, [1, 2, 4, 5]].sum(axis=0) == pytest.approx(steps.work[:, [1, 2, 4, 5]].sum(axis=0), rel=0.03)
    assert sums.wall_ns.sum() == pytest.approx(steps.wall_ns.sum(), rel=0.03)


def test_a_server_without_a_trace_is_described_by_settings_info_and_metrics(played: Path):
    server = SimulatedServer.of(metric_steps(played, SETTINGS).facts)

    assert server.options["max_batch_total_tokens"] == POOL
    assert server.options["waiting_served_ratio"] == 1.2
    assert server.settings["max_total_tokens"] == 1088
    assert server.options["supports_chunking"] is False


def test_a_missing_setting_or_metric_is_named(played: Path, tmp_path: Path):
    with pytest.raises(TraceError, match=r"`max_batch_prefill_tokens` is unknown: set it in"):
        metric_steps(played, {"prefill_chunking": False})
    with pytest.raises(TraceError, match="no server metrics"):
        steps_of(tmp_path / "none" / "run", SETTINGS)


def test_metrics_without_batch_inference_duration_are_refused(played: Path, tmp_path: Path):
    shutil.copytree(played, tmp_path / "run")
    row = {"t_s": 0.0, "name": "tgi_batch_inference_duration_sum", "labels": "", "value": 1.0}
    pd.DataFrame([row]).to_parquet(tmp_path / "run" / "server_metrics.parquet")

    with pytest.raises(TraceError, match="have no tgi_batch_inference_duration by method"):
        metric_steps(tmp_path / "run", SETTINGS)

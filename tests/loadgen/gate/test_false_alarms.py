"""C5: comparisons of equal servers whose latencies come from queues, in separate runs and in interleaved slices."""

import numpy as np
import numpy.typing as npt
import pytest
from scipy import special

from benchmarks.reports.gate_power import verdict
from loadgen.selftest.queue_models import MODELS, QueueModel
from reports.gate.comparison import CompareOptions
from reports.gate.decide import GateDecision
from reports.gate.side_run import SideRun, log_degradation

METRICS = ("output_tokens_per_s", "ttft_p50_ms", "tpot_p50_ms")
OPTIONS = CompareOptions(gated=METRICS, shown=())
NOMINAL = 0.05
RUNS, WARMUP, REQUESTS = 2_000, 50, 100


def upper_bound(alarms: int, comparisons: int) -> float:
    """The one-sided upper 95 % bound of a rate (Clopper and Pearson, 1934)."""
    return float(special.betaincinv(alarms + 1, comparisons - alarms, 0.95))


def simulated_runs(model: QueueModel, load: float) -> list[SideRun]:
    """Runs of equal servers; the end-to-end latency stands for TPOT."""
    seed = [31, MODELS.index(model), round(100 * load)]
    runs = model.simulate(np.random.default_rng(seed), RUNS, WARMUP + REQUESTS, load).after(WARMUP)
    completed = np.sort(runs.arrival_s + runs.e2e_s, axis=1)
    rate = (REQUESTS - 1) / (completed[:, -1] - completed[:, 0])
    ttft, e2e = (np.median(values, axis=1) for values in (runs.queue_s, runs.e2e_s))
    return [
        SideRun("x", dict(zip(METRICS, map(float, values), strict=True)))
        for values in zip(rate, ttft, e2e, strict=True)
    ]


def false_alarms(runs: list[SideRun], slices: int, comparisons: int) -> int:
    """Regressions in sequential comparisons of runs drawn from the same server."""
    random, looks = np.random.default_rng(32), OPTIONS.looks
    worse = np.stack([_worse(runs, name) for name in METRICS], axis=1)
    chosen = random.integers(0, len(runs), (comparisons, looks[-1], slices, 2))
    d = (worse[chosen[..., 1]] - worse[chosen[..., 0]]).mean(axis=2)
    return sum(verdict(each, OPTIONS)[0] is GateDecision.REGRESSION for each in d)


def _worse(runs: list[SideRun], name: str) -> npt.NDArray[np.float64]:
    scaled = log_degradation([run.values[name] for run in runs], name)
    assert scaled is not None
    return scaled


def test_trust_C5_gate_few_false_alarms_at_load_085_of_a_single_server_queue() -> None:
    runs = simulated_runs(MODELS[0], 0.85)

    assert false_alarms(runs, slices=2, comparisons=200) <= 10


CELLS = [(model, load, 2) for model in MODELS for load in (0.5, 0.85, 0.95)] + [(model, 0.85, 1) for model in MODELS]


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("model", "load", "slices"), CELLS, ids=lambda value: getattr(value, "name", str(value)))
def test_trust_C5_gate_false_alarms_stay_at_the_promise_in_every_queue(
    model: QueueModel, load: float, slices: int
) -> None:
    alarms = false_alarms(simulated_runs(model, load), slices, 2_000)

    print(
        f"{model.name} {load:g}, {slices} slices: {alarms} false alarms in 2000, bound {upper_bound(alarms, 2_000):.4f}"
    )
    assert upper_bound(alarms, 2_000) <= 1.3 * NOMINAL

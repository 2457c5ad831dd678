"""Intervals of tokens and of good requests per second in queues of known rates: they cover, or they are withheld."""

from collections.abc import Callable, Iterator

import numpy as np
import pytest

from loadgen.selftest.queue_models import MODELS, Runs
from reports.metrics.measured import Measured
from reports.metrics.run_metrics import PER_RUN
from reports.run_schema import RequestRecord
from reports.run_store import RunManifest, RunResult
from reports.stats.estimators import Interval
from tests.support.samples.sample_run import SampleLoad, sample_run
from tests.support.samples.stream_record import stream_record

S = 1_000_000_000
WARMUP_S = 3.0
SLOTS = next(model for model in MODELS if model.name == "M/G/16")
FUNCTIONS: dict[str, Callable[[Measured], Interval]] = {metric.name: metric.function for metric in PER_RUN}


def queue_runs(load: float, count: int, runs: int, limit_ms: float = 200.0) -> Iterator[Measured]:
    """Runs of about `count` requests in the queue of 16 slots, as the load generator records them."""
    rate = SLOTS.arrivals_per_s(load)
    simulated = SLOTS.simulate(np.random.default_rng([4, count]), runs, int(1.2 * count + 80 * load * WARMUP_S), load)
    for number in range(runs):
        yield measured_run(simulated.part(number, slice(None)), WARMUP_S + count / rate, limit_ms)


def measured_run(requests: Runs, end_s: float, limit_ms: float) -> Measured:
    manifest = RunManifest(
        "r",
        mode="poisson",
        warmup_s=WARMUP_S,
        window_end_s=end_s,
        objectives=[{"metric": "ttft_p95_ms", "max": limit_ms}],
    )
    columns = (requests.arrival_s, requests.queue_s, requests.e2e_s, requests.output_tokens)
    return Measured.of(RunResult(manifest, [record(*row) for row in zip(*columns, strict=True) if row[0] <= end_s]))


def record(start_s: float, ttft_s: float, e2e_s: float, tokens: float) -> RequestRecord:
    """A stream whose tokens come at even gaps, sent when it was due."""
    count, start_ns = int(tokens), round(start_s * S)
    sent = {"t_dispatch_ns": start_ns, "t_sent_ns": start_ns, "t_headers_ns": start_ns}
    return stream_record(start_s, start_s + ttft_s, (e2e_s - ttft_s) / (count - 1), count, **sent)


def tokens_per_request() -> float:
    simulated = SLOTS.simulate(np.random.default_rng(9), 4, 20_000, 0.5)
    return float(simulated.output_tokens.mean())


def missed(found: Interval, truth: float) -> bool:
    """Whether a printed interval does not contain the truth."""
    return not np.isnan(found.lo) and not found.lo <= truth <= found.hi


@pytest.mark.slow
@pytest.mark.parametrize(("load", "count"), [(0.85, 300), (0.95, 300)])
def test_trust_C1_tokens_per_second_of_a_busy_queue_are_covered_or_withheld(load: float, count: int) -> None:
    rate = SLOTS.arrivals_per_s(load)
    truth = {"output_tokens_per_s": rate * tokens_per_request(), "input_tokens_per_s": rate * 100}

    found = [
        {name: missed(FUNCTIONS[name](run), each) for name, each in truth.items()}
        for run in queue_runs(load, count, runs=60)
    ]

    for name in truth:
        assert np.mean([each[name] for each in found]) <= 0.07, name


def test_trust_C2_tokens_per_second_of_a_calm_queue_are_printed() -> None:
    found = [FUNCTIONS["output_tokens_per_s"](run) for run in queue_runs(0.5, 1_000, runs=10)]

    assert np.mean([not np.isnan(each.lo) for each in found]) >= 0.9
    assert np.median([(each.hi - each.lo) / each.value for each in found if not np.isnan(each.lo)]) < 0.25


@pytest.mark.slow
def test_trust_C1_goodput_of_a_busy_queue_is_covered_or_withheld() -> None:
    """The share of good requests is that of long runs."""
    long = SLOTS.simulate(np.random.default_rng(5), 8, 60_000, 0.95).after(10_000)
    limit_s = float(np.quantile(long.queue_s, 0.9))
    truth = 0.9 * SLOTS.arrivals_per_s(0.95)

    found = [FUNCTIONS["goodput_rps"](run) for run in queue_runs(0.95, 1_000, 30, 1e3 * limit_s)]

    assert np.mean([missed(each, truth) for each in found]) <= 0.1


def test_tokens_per_second_of_a_closed_loop_have_the_interval_of_batch_means() -> None:
    measured = Measured.of(sample_run(SampleLoad(mode="closed")))

    assert FUNCTIONS["output_tokens_per_s"](measured) == measured.rate(measured.output_batches)


def test_a_withheld_rate_names_the_requests_it_needs() -> None:
    [run] = queue_runs(0.95, 300, runs=1)

    found = FUNCTIONS["output_tokens_per_s"](run)

    assert np.isnan(found.lo)
    assert found.value > 0
    assert found.needed is not None
    assert found.needed > 300

import dataclasses
import heapq
import itertools
import threading

import numpy as np
import pytest

from loadgen.config.bench_config import BenchConfig
from loadgen.errors import UsageError
from loadgen.generator.stop_rules import (
    AttainmentDecided,
    Converged,
    EnoughRequests,
    InterimLooks,
    LimitMissed,
    Overloaded,
    PartialRun,
    stop_rules_of,
)
from loadgen.generator.stop_watcher import GrowingFiles, GrowingRun, StopWatcher
from reports.metrics.measured import Measured
from reports.metrics.named_metrics import metric_interval
from reports.metrics.requests.request_series import run_dependence
from reports.run_schema import Phase, RequestRecord
from reports.run_store import JsonlWriter, RunManifest, RunResult
from reports.stats.fraction_intervals import pooled_fraction
from tests.support.samples.sample_run import SampleLoad, sample_run

SECOND = 1_000_000_000


def requests(ttft_s, every_s=0.1):
    """One request a tenth of a second; each streams two tokens, the second 10 ms after the first."""
    sent = [round(index * every_s * SECOND) for index in range(len(ttft_s))]
    return [
        streamed(number, start, start + round(first_s * SECOND), 10_000_000)
        for number, (start, first_s) in enumerate(zip(sent, ttft_s, strict=True), 1)
    ]


def streamed(number, sent, first, gap, tokens=2, phase=Phase.MEASURE):
    """A request sent at `sent`, with its first token at `first` and the others at equal gaps, in ns."""
    end = first + gap * (tokens - 1)
    return RequestRecord(
        "run",
        f"run-{number}",
        phase=phase,
        t_intended_ns=sent,
        t_dispatch_ns=sent,
        t_sent_ns=sent,
        t_first_ns=first,
        t_last_ns=end,
        t_end_ns=end,
        output_tokens=tokens,
        first_event_tokens=1,
        events=tokens,
        gap_ns=[gap] * (tokens - 1),
    )


def partial_run(records, in_flight=(), **manifest):
    end_s = max(record.t_sent_ns for record in records) / SECOND
    run = RunResult(RunManifest("run", mode="constant", window_end_s=end_s, **manifest), records)
    levels = np.asarray(in_flight, dtype=np.float64)
    measured = Measured.of(run)
    return PartialRun(measured, (np.arange(len(levels), dtype=np.float64), levels), measured)


def closed_loop(answer_s, until_s, users, *, spread_s, tokens=1, warmup_s=0.0):
    """Records that a run has at `until_s`: users start within `spread_s`, and send again when an answer ends."""
    records, free = [], np.random.default_rng(0).uniform(0, spread_s, users).tolist()
    heapq.heapify(free)
    for number in itertools.count(1):
        sent_s = heapq.heappop(free)
        if sent_s > until_s:
            return sorted(records, key=lambda record: record.t_end_ns)
        end_s = sent_s + answer_s()
        heapq.heappush(free, end_s)
        if end_s <= until_s:
            phase = Phase.WARMUP if sent_s < warmup_s else Phase.MEASURE
            records.append(token_record(number, sent_s, end_s, tokens, phase))
    raise AssertionError


def token_record(number, sent_s, end_s, tokens, phase):
    """A request whose tokens arrive at equal intervals."""
    sent, end = round(sent_s * SECOND), round(end_s * SECOND)
    gap = (end - sent) // tokens
    return streamed(number, sent, end - gap * (tokens - 1), gap, tokens, phase)


def written(directory, records):
    with JsonlWriter(directory / "requests-0.jsonl") as writer:
        for record in records:
            writer.write(record.to_json())
    return directory


def test_metrics_10_a_run_converges_when_its_interval_is_narrow_enough():
    ttft_s = 0.1 + 0.01 * np.random.default_rng(1).standard_normal(400)
    seen = partial_run(requests(ttft_s))

    # The mean of 400 values with a deviation of a tenth is known to 1.4 %, and to 2.2 % if the run ends for it.
    assert Converged((("ttft_mean_ms", 0.023),)).reason(seen) == "converged"
    assert Converged((("ttft_mean_ms", 0.02),)).reason(seen) is None
    assert Converged((("ttft_mean_ms", 0.002),)).reason(seen) is None
    assert Converged((("ttft_mean_ms", 0.023), ("ttft_p99_ms", 0.0001))).reason(seen) is None


def test_metrics_10_an_open_loop_is_overloaded_when_ttft_and_requests_in_flight_both_grow():
    rising = [0.1 + 0.02 * index for index in range(200)]
    steady = [0.1 + 0.01 * (index % 7) for index in range(200)]
    noise = np.random.default_rng(1).standard_normal(20)

    assert Overloaded().reason(partial_run(requests(rising), in_flight=5 * np.arange(20) + noise)) == "overload"
    assert Overloaded().reason(partial_run(requests(rising), in_flight=40 + noise)) is None
    assert Overloaded().reason(partial_run(requests(steady), in_flight=5 * np.arange(20) + noise)) is None


@pytest.mark.parametrize(("share", "reason"), [(0.99, "objective_met"), (0.5, "objective_missed"), (0.9, None)])
def test_metrics_10_objectives_are_decided_by_a_sequential_bound(share, reason):
    met = np.random.default_rng(2).random(300) < share
    seen = partial_run(requests(np.where(met, 0.1, 0.9)), objectives=[{"metric": "ttft_p95_ms", "max": 500.0}])

    assert AttainmentDecided(0.9).reason(seen) == reason


def test_trust_W4_search_a_run_of_dependent_requests_is_not_decided_early():
    """One busy spell of sixty requests is one event: as independent misses it would show that the target is missed."""
    late = np.zeros(400, dtype=np.bool_)
    late[100:160] = True
    noise = 0.01 * np.random.default_rng(3).random(400)
    seen = partial_run(requests(np.where(late, 0.9, 0.1) + noise), objectives=[{"metric": "ttft_p95_ms", "max": 500.0}])

    assert AttainmentDecided(0.95).reason(seen) is None


def test_trust_W4_a_decision_is_corrected_for_fifteen_looks():
    """The bound of a single look at 5 % is above the target, that of one of fifteen looks is not."""
    met = np.random.default_rng(1).permutation(np.arange(400) % 100 < 94)
    seen = partial_run(requests(np.where(met, 0.1, 0.9)), objectives=[{"metric": "ttft_p95_ms", "max": 500.0}])

    assert pooled_fraction([(met, run_dependence(seen.measured, met))], 0.975).interval.lo > 0.5
    assert AttainmentDecided(0.5).reason(seen) is None
    assert AttainmentDecided(0.2).reason(seen) == "objective_met"


@pytest.mark.parametrize(("until_s", "reason"), [(4.0, None), (120.0, "objective_missed")])
def test_trust_W4_requests_in_flight_are_not_left_out_of_a_decision(tmp_path, until_s, reason):
    """39 % of the requests take at most 5 s. After 4 s all that have ended do: the others are in flight."""
    random = np.random.default_rng(1)
    written(tmp_path, closed_loop(lambda: random.exponential(10.0), until_s, users=200, spread_s=1.0))
    manifest = RunManifest("run", mode="closed", objectives=[{"metric": "ttft_p95_ms", "max": 5000.0}])

    found = GrowingRun(manifest, tmp_path).look(InterimLooks((AttainmentDecided(0.6),)))

    assert found == reason


@pytest.mark.parametrize(
    "rule",
    [
        AttainmentDecided(0.6),
        LimitMissed("ttft_mean_ms", 150.0, is_max=True, least_s=1.0),
        Converged((("ttft_mean_ms", 0.05),)),
    ],
)
def test_trust_W4_a_rule_that_reads_values_reads_the_settled_requests(rule):
    noise = 0.01 * np.random.default_rng(1).standard_normal((2, 400))
    slow = np.random.default_rng(2).random(400) < 0.5
    fast, mixed = (partial_run(requests(each + 0.1), objectives=[{"metric": "ttft_p95_ms", "max": 250.0}])
                   for each in (noise[0], noise[1] + 0.3 * slow))  # fmt: skip

    of_settled, of_ended = (
        dataclasses.replace(first, settled=second.measured) for first, second in ((fast, mixed), (mixed, fast))
    )

    assert rule.reason(of_settled) == rule.reason(mixed) != rule.reason(fast) == rule.reason(of_ended)


@pytest.mark.parametrize(("limit", "reason"), [(950.0, None), (1_200.0, "limit_missed")])
def test_trust_W4_tokens_of_requests_in_flight_are_not_left_out_of_a_limit(tmp_path, limit, reason):
    """256 users receive 1,000 tokens/s in answers of 20 s. Those that have ended after 60 s have fewer."""
    random = np.random.default_rng(1)
    records = closed_loop(
        lambda: 20 * random.uniform(0.8, 1.2), 60.0, users=256, spread_s=20.0, tokens=78, warmup_s=20.0
    )
    written(tmp_path, records)
    rule = LimitMissed("output_tokens_per_s", limit, is_max=False, least_s=15.0)

    found = GrowingRun(RunManifest("run", mode="closed", warmup_s=20.0), tmp_path).look(InterimLooks((rule,)))

    assert found == reason


@pytest.mark.parametrize(("count", "num_met"), [(50, 50), (400, 376), (400, 24)])
def test_trust_C1_the_attainment_of_a_run_that_ended_by_a_decision_has_the_bounds_of_the_decision(count, num_met):
    """50 of 50 requests decide on targets up to 79 %; sides 1.5 times as long would show 87 to 100 %."""
    met = np.random.default_rng(1).permutation(np.arange(count) < num_met)
    seen = partial_run(requests(np.where(met, 0.1, 0.9)), objectives=[{"metric": "ttft_p95_ms", "max": 500.0}])
    is_met = num_met > count / 2
    reason = "objective_met" if is_met else "objective_missed"
    ended = dataclasses.replace(seen.measured, window=dataclasses.replace(seen.measured.window, stop_reason=reason))

    shown = metric_interval(ended, "slo_attainment")

    limit = shown.lo if is_met else shown.hi
    assert AttainmentDecided(limit - 0.001).reason(seen) == ("objective_met" if is_met else None)
    assert AttainmentDecided(limit + 0.001).reason(seen) == (None if is_met else "objective_missed")


def test_trust_C6_a_run_goes_on_until_it_is_worth_enough_independent_requests():
    noise = 0.01 * np.random.default_rng(3).random(400)
    slow = 0.1 * np.sin(np.arange(400) / 40)
    independent, dependent = (partial_run(requests(0.2 + each)) for each in (noise, noise + slow))

    assert EnoughRequests(73, 10.0).reason(independent) == "enough_requests"
    assert EnoughRequests(73, 1_000.0).reason(independent) is None
    assert EnoughRequests(73, 10.0).reason(dependent) is None


def test_a_stable_queue_that_rises_by_few_requests_is_not_overloaded():
    rising = [0.1 + 0.002 * index for index in range(200)]

    assert Overloaded().reason(partial_run(requests(rising), in_flight=0.4 * np.arange(20))) is None


def test_rules_are_evaluated_at_doubling_sizes_only():
    asked = []

    @dataclasses.dataclass(frozen=True)
    class Rule:
        reads_values = False
        least: int = 50
        growth: float = 2.0

        def reason(self, seen):
            asked.append(int(seen.measured.started.sum()))

    looks = InterimLooks((Rule(),))
    for size in (40, 60, 70, 99, 100, 150, 230, 399, 400):
        looks.look(partial_run(requests([0.1] * size)))

    assert asked == [60, 100, 230, 400]


def test_a_run_is_watched_through_its_growing_files(tmp_path):
    manifest = RunManifest("run", mode="constant")
    stopped, reasons = threading.Event(), []

    def stop(reason):
        reasons.append(reason)
        stopped.set()

    stop_watcher = StopWatcher(manifest, tmp_path, (Converged((("ttft_mean_ms", 0.05),)),), stop)
    stop_watcher.start()
    with JsonlWriter(tmp_path / "requests-0.jsonl") as writer:
        for record in requests(0.1 + 0.01 * np.random.default_rng(1).standard_normal(150)):
            writer.write(record.to_json())
    was_stopped = stopped.wait(timeout=30)
    stop_watcher.finish()

    assert was_stopped
    assert reasons == ["converged"]


def test_an_incomplete_line_is_read_later(tmp_path):
    files = GrowingFiles(tmp_path, "requests")
    path = tmp_path / "requests.jsonl"
    path.write_bytes(b'{"a":1}\n{"a"')

    first = list(files.rows())
    with path.open("ab") as file:
        file.write(b":2}\n")

    assert first == [{"a": 1}]
    assert list(files.rows()) == [{"a": 2}]


def test_rules_come_from_the_settings_of_a_load():
    load = BenchConfig(
        mode="poisson", rate=5, slo=("ttft_p95_ms < 500",), converge=("output_tokens_per_s 3%", "gap_p99_ms 10 %"),
        stop_on_overload=True, stop_at_attainment=0.95,
    )  # fmt: skip

    assert stop_rules_of(load) == (
        Converged((("output_tokens_per_s", 0.03), ("gap_p99_ms", 0.1))),
        Overloaded(),
        AttainmentDecided(0.95),
    )
    assert stop_rules_of(BenchConfig()) == ()


@pytest.mark.parametrize("metric", ["ttft_max_ms", "speed", "speed_p95_ms"])
def test_a_metric_without_an_interval_cannot_converge(metric):
    with pytest.raises(UsageError, match=f"`converge` names '{metric}'"):
        stop_rules_of(BenchConfig(converge=f"{metric} 5%"))


@pytest.mark.parametrize(
    ("load", "message"),
    [
        ({"converge": "ttft_p95_ms"}, "not an interval width"),
        ({"stop_on_overload": True}, "needs an open loop"),
        ({"stop_at_attainment": 0.9}, "no `slo`"),
    ],
)
def test_rules_without_effect_are_refused(load, message):
    with pytest.raises(ValueError, match=message):
        BenchConfig(**load)


def test_every_rule_accepts_a_realistic_run():
    run = sample_run(SampleLoad(duration_s=120, rate=4.0))
    manifest = dataclasses.replace(run.manifest, objectives=[{"metric": "ttft_p95_ms", "max": 1.0}])
    measured = Measured.of(dataclasses.replace(run, manifest=manifest))
    seen = PartialRun(measured, (np.arange(120.0), np.ones(120)), measured)

    assert Converged((("output_tokens_per_s", 0.5), ("itl_p99_ms", 0.9))).reason(seen) == "converged"
    assert Overloaded().reason(seen) is None
    assert AttainmentDecided(0.95).reason(seen) == "objective_missed"

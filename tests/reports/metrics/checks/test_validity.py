"""Each validity check at its two bounds."""

from pathlib import Path
from typing import Any

import pytest

from reports.metrics.checks.client_checks import CHECKS
from reports.metrics.checks.client_facts import client_facts
from reports.metrics.checks.findings import Level
from reports.metrics.checks.restarts import restarted_s
from reports.metrics.measured import Measured
from reports.metrics.summary import summarize
from reports.run_schema import Status
from reports.run_store import RunResult
from reports.saved_run import load_run
from tests.support.samples.sample_run import SampleLoad, sample_run, write_killed_run

CLOSED = SampleLoad(mode="closed", duration_s=25)
GOOD: dict[str, Any] = {
    "sent_over_offered": 1.0,
    "schedule_lag_p99_s": 0.001,
    "ttft_median_s": 0.05,
    "gap_median_s": 0.02,
    "loop_lag_p99_s": 0.001,
    "loop_lag_max_s": 0.01,
    "cpu_share_max": 0.4,
    "token_mismatch_median": 0.0,
    "completions": 500,
    "requests": 510,
    "succeeded": 510,
    "server_requests": 510,
    "usage_mismatch_median": 0.0,
    "unfinished_answers": 0,
    "answers": 500,
    "only_errors": False,
    "burst_events": 4.0,
    "burst_interval_s": 0.08,
    "planned_input_tokens": 128.0,
    "input_tokens_excess": 0.0,
    "other_length_share": 0.0,
    "lost_workers": 0,
    "client_errors": 0,
    "write_errors": 0,
    "capacity_events_per_s": 10_000.0,
    "events_per_s_per_worker": 1_000.0,
}


def level(**changed: Any) -> Level:
    found = [finding for check in CHECKS if (finding := check(GOOD | changed)) is not None]
    assert len(found) <= 1
    return found[0].level if found else Level.VALID


@pytest.mark.parametrize(
    ("name", "fine", "degraded", "invalid"),
    [
        ("sent_over_offered", 0.99, 0.98, 0.94),
        ("schedule_lag_p99_s", 0.005, 0.006, 0.026),
        ("loop_lag_p99_s", 0.005, 0.006, 0.021),
        ("loop_lag_max_s", 1.0, 1.1, 5.1),
        ("cpu_share_max", 0.70, 0.71, 0.91),
        ("token_mismatch_median", 0.02, 0.03, 0.11),
        ("server_requests", 510, 509, 500),
        ("usage_mismatch_median", 0.02, 0.03, 0.11),
        ("unfinished_answers", 0, 1, 26),
    ],
)
def test_metrics_11_bounds(name: str, fine: float, degraded: float, invalid: float) -> None:
    assert level(**{name: fine}) is Level.VALID
    assert level(**{name: degraded}) is Level.DEGRADED
    assert level(**{name: invalid}) is Level.INVALID


def test_trust_3a_late_reads_are_harmless_with_arrival_times_of_the_kernel() -> None:
    """Late sending is not harmless: timestamps of received bytes do not correct it."""
    assert level(loop_lag_p99_s=0.05, arrival_times="kernel") is Level.VALID
    assert level(loop_lag_p99_s=0.05, arrival_times="mixed") is Level.INVALID
    assert level(loop_lag_p99_s=0.05, arrival_times="read") is Level.INVALID
    assert level(schedule_lag_p99_s=0.006, arrival_times="kernel") is Level.DEGRADED
    assert level(loop_lag_max_s=1.1, arrival_times="kernel") is Level.DEGRADED


@pytest.mark.parametrize("name", ["lost_workers", "client_errors", "write_errors"])
def test_metrics_11_a_failed_generator_invalidates(name: str) -> None:
    assert level(**{name: 1}) is Level.INVALID


def test_lag_within_five_percent_of_a_long_ttft_is_harmless() -> None:
    assert level(ttft_median_s=2.0, schedule_lag_p99_s=0.09) is Level.VALID
    assert level(ttft_median_s=2.0, schedule_lag_p99_s=0.11) is Level.DEGRADED
    assert level(ttft_median_s=2.0, schedule_lag_p99_s=0.41) is Level.INVALID


def test_missing_measurements_cause_no_finding() -> None:
    unknown = dict.fromkeys(
        ("sent_over_offered", "loop_lag_p99_s", "loop_lag_max_s", "cpu_share_max", "token_mismatch_median"), None
    )

    assert level(**unknown, server_requests=None, capacity_events_per_s=None) is Level.VALID


def verdict_of(run: RunResult) -> dict[str, Any]:
    return dict(summarize(run)["verdict"])


def test_sample_run_is_valid() -> None:
    run = sample_run(SampleLoad(mode="closed", failure_share=0))

    assert verdict_of(run) == {"status": "valid", "reasons": [], "findings": []}


def test_failed_requests_are_a_finding_at_level_valid() -> None:
    verdict = verdict_of(sample_run(SampleLoad(mode="closed")))

    message = "3 of 589 requests failed"
    assert (verdict["status"], verdict["reasons"]) == ("valid", [])
    assert verdict["findings"] == [{"check": "failed_requests", "level": "valid", "message": message}]


def test_a_request_that_is_due_at_the_end_of_the_window_is_sent_on_time() -> None:
    run = sample_run(SampleLoad(rate=2.0, duration_s=15))
    end_ns = round(run.manifest.window_end_s * 1e9)
    last = max((each for each in run.records if each.t_intended_ns <= end_ns), key=lambda each: each.t_intended_ns)
    last.t_intended_ns, last.t_dispatch_ns, last.t_sent_ns = end_ns, end_ns, end_ns + 300_000

    assert summarize(run)["client"]["sent_over_offered"] == 1.0


def test_trust_W13_a_run_of_few_requests_is_valid_and_has_no_intervals() -> None:
    summary = summarize(sample_run(SampleLoad(mode="closed", concurrency=2, duration_s=8, warmup_s=0)))

    assert summary["client"]["completions"] < 30
    assert (summary["verdict"]["status"], summary["verdict"]["reasons"]) == ("valid", [])
    assert not summary["metrics"]["ttft_s"]["percentiles"]["p95"]["supported"]


def test_trust_W7_one_completion_is_enough_for_a_valid_run() -> None:
    assert level(completions=1) is Level.VALID
    assert level(completions=0) is Level.INVALID


def test_run_without_completions_is_invalid() -> None:
    verdict = verdict_of(sample_run(SampleLoad(mode="closed", duration_s=3, warmup_s=0, failure_share=1.0)))

    assert verdict["status"] == "invalid"
    messages = [each["message"] for each in verdict["reasons"]]
    assert "no request completed in the window; see the causes of the failed requests" in messages


def test_a_run_that_is_shorter_than_its_requests_is_asked_to_run_longer() -> None:
    found = [finding.message for check in CHECKS if (finding := check(GOOD | {"completions": 0})) is not None]

    assert found == ["no request completed in the window; run longer"]


def test_trust_W10_a_killed_run_is_invalid_as_incomplete(tmp_path: Path) -> None:
    write_killed_run(tmp_path / "r", 7, SampleLoad(mode="closed", warmup_s=0))

    verdict = verdict_of(load_run(tmp_path / "r"))

    assert verdict["status"] == "invalid"
    assert verdict["reasons"][0] == {
        "check": "incomplete",
        "level": "invalid",
        "message": "incomplete: stopped after 7 of 60 s",
    }


def test_trust_W10_a_run_without_a_stop_reason_is_invalid_as_incomplete() -> None:
    run = sample_run(CLOSED)
    run.manifest.stop_reason = None

    assert verdict_of(run)["reasons"][0]["check"] == "incomplete"


def test_changed_server_invalidates() -> None:
    run = sample_run(CLOSED)
    run.manifest.target["info_end"] = run.manifest.target["info"] | {"sha": "other"}

    assert verdict_of(run)["reasons"][0]["message"] == "the server changed during the run: sha"


def test_server_that_is_gone_at_the_end_invalidates() -> None:
    run = sample_run(CLOSED)
    run.manifest.target["info_end"] = {}

    assert verdict_of(run)["reasons"][0]["message"] == "the server did not answer at the end of the run"


def test_client_errors_are_counted_from_the_records() -> None:
    run = sample_run(CLOSED)
    run.records[-1].status = Status.CLIENT_ERROR

    assert client_facts(run, Measured.of(run))["client_errors"] == 1
    assert verdict_of(run)["status"] == "invalid"


def gpu(name: str, *values: float) -> list[dict[str, Any]]:
    return [{"t_s": 20.0 + second, "name": name, "labels": 'gpu="0"', "value": v} for second, v in enumerate(values)]


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (gpu("accelerator_processes", 1, 2, 1), "shared: 2 processes"),
        (gpu("accelerator_throttle_reasons", 0, 0x40, 4), "throttled in 1 of 3 samples"),
    ],
)
def test_metrics_11_a_shared_or_throttled_accelerator_invalidates(rows: list[dict[str, Any]], message: str) -> None:
    run = sample_run(CLOSED)
    run.server_metrics += rows

    verdict = verdict_of(run)

    assert verdict["status"] == "invalid"
    assert message in verdict["reasons"][0]["message"]


def test_a_gpu_at_its_power_cap_is_at_full_load_not_throttled() -> None:
    run = sample_run(CLOSED)
    before = verdict_of(run)["status"]
    run.server_metrics += gpu("accelerator_throttle_reasons", 4, 4) + gpu("accelerator_processes", 1, 1)

    assert verdict_of(run)["status"] == before


def test_open_files_and_ports_are_those_of_the_worker_nearest_to_its_limit() -> None:
    run = sample_run()
    run.client["workers"] = [
        {"worker": 0, "open_files": 100, "max_open_files": 1024, "local_ports": 28232},
        {"worker": 1, "open_files": 512, "max_open_files": 1024, "local_ports": 1000},
        {"worker": 2, "open_files": 9, "max_open_files": -1},
    ]

    facts = client_facts(run, Measured.of(run))

    assert (facts["open_files_share"], facts["local_ports"]) == (0.5, 1000)


def test_trust_T17_a_server_count_above_the_sent_requests_is_another_client() -> None:
    """A server may or may not count failed requests: its count is between our successes and all sent requests."""
    assert level(requests=510, succeeded=400, server_requests=400) is Level.VALID
    assert level(requests=510, succeeded=400, server_requests=510) is Level.VALID
    assert level(requests=510, succeeded=400, server_requests=600) is Level.INVALID
    assert level(requests=510, succeeded=400, server_requests=390) is Level.INVALID


def test_trust_T13_many_tokens_at_long_intervals_were_held_back() -> None:
    assert level(burst_events=50.0, burst_interval_s=1.0) is Level.DEGRADED
    assert level(burst_events=4.0, burst_interval_s=1.0) is Level.VALID
    assert level(burst_events=50.0, burst_interval_s=0.2) is Level.VALID


def test_trust_T18_prompts_longer_or_shorter_than_planned_are_named() -> None:
    assert level(input_tokens_excess=6.0) is Level.VALID
    assert level(input_tokens_excess=7.0) is Level.DEGRADED
    assert level(input_tokens_excess=-7.0) is Level.DEGRADED


def test_trust_T9_forced_answers_of_another_length_are_named() -> None:
    assert level(other_length_share=None) is Level.VALID
    assert level(other_length_share=0.001) is Level.DEGRADED


def test_trust_T20_a_counter_that_falls_is_a_restart() -> None:
    def row(t_s: float, name: str, value: float) -> dict[str, Any]:
        return {"t_s": t_s, "name": name, "labels": "", "value": value}

    gauge = [row(1.0, "vllm:num_requests_running", 8), row(2.0, "vllm:num_requests_running", 2)]
    counter = [row(t_s, "vllm:request_success_total", value) for t_s, value in ((1.0, 5), (2.0, 9), (3.0, 1))]

    assert restarted_s(gauge) is None
    assert restarted_s([*gauge, *counter[:2]]) is None
    assert restarted_s([*gauge, *counter]) == 3.0


def test_trust_T20_a_restart_is_the_only_reason_of_the_verdict() -> None:
    run = sample_run()
    run.client["server_requests"] = 3
    for t_s, value in ((10.0, 50.0), (20.0, 3.0)):
        run.server_metrics.append({"t_s": t_s, "name": "vllm:request_success_total", "labels": "", "value": value})

    verdict = summarize(run)["verdict"]

    assert verdict["status"] == "invalid"
    assert [reason["check"] for reason in verdict["reasons"]] == ["server_identity"]
    assert "its counters fell back 20 s after the start" in verdict["reasons"][0]["message"]


@pytest.mark.parametrize("reason", ["server_unreachable", pytest.param("server_unhealthy", marks=pytest.mark.slow)])
def test_trust_T20_a_load_that_ended_because_the_server_was_gone_is_invalid(reason: str) -> None:
    run = sample_run()
    run.manifest.stop_reason = reason

    verdict = summarize(run)["verdict"]

    assert [each["check"] for each in verdict["reasons"]] == ["server_identity"]
    assert "because the server no longer answered" in verdict["reasons"][0]["message"]


def test_trust_3a_a_full_receive_buffer_is_a_finding() -> None:
    run = sample_run()
    run.manifest.arrival_times["full"] = 3

    found = {each["check"]: each["message"] for each in summarize(run)["verdict"]["findings"]}

    assert found["receive_buffer"].startswith("3 reads returned 64 KiB")


@pytest.mark.parametrize(("late_s", "is_starved"), [(0.030, True), (0.002, False)])
def test_trust_3a_merged_gaps_are_the_generators_fault_only_if_its_reads_were_late(
    late_s: float, is_starved: bool
) -> None:
    """A server may send several events in one segment, and its read is not late."""
    run = sample_run()
    for record in run.records:
        record.coalesced_events, record.read_late_max_s = len(record.gap_ns) // 5, late_s

    reasons = {each["check"]: each["message"] for each in summarize(run)["verdict"]["reasons"]}

    assert ("starved" in reasons) == is_starved
    assert not is_starved or "% of the gaps are inside one read" in reasons["starved"]

"""`summary.json`: its keys, finite values, and look-ups by the names of limits."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from reports.metrics.finish_run import finish_run
from reports.metrics.summary import analyse_run, metric_value, summarize
from reports.run_schema import Status
from tests.support.samples.sample_run import SampleLoad, sample_run, write_sample_run


@pytest.fixture(scope="module")
def summary() -> dict[str, Any]:
    return summarize(sample_run())


def test_metrics_15_keys(summary: dict[str, Any]) -> None:
    assert list(summary) == [
        *(
            "schema_version",
            "run_id",
            "verdict",
            "overload",
            "abandoned",
            "window",
            "counts",
            "metrics",
            "rates",
            "slo",
        ),
        *("client", "server", "cached", "speculation", "structured", "adapters", "workload"),
    ]
    assert list(summary["window"]) == ["start_s", "end_s", "warmup_rule", "truncation_s", "drain_s", "stop_reason"]
    assert list(summary["metrics"]["ttft_s"]["percentiles"]["p50"]) == [
        *("value", "lo", "hi", "at_least", "supported", "needed")
    ]
    assert list(summary["slo"]) == ["objectives", "results", "attainment", "goodput_rps", "first_violated"]
    assert list(summary["workload"]["finish_reasons"]) == ["length", "eos_token"]


def test_every_number_is_finite_or_null(summary: dict[str, Any]) -> None:
    def numbers(value: Any) -> list[float]:
        if isinstance(value, dict):
            return [number for each in value.values() for number in numbers(each)]
        if isinstance(value, list):
            return [number for each in value for number in numbers(each)]
        return [value] if isinstance(value, float) else []

    assert all(math.isfinite(number) for number in numbers(summary))
    json.dumps(summary, allow_nan=False)


def test_every_interval_contains_its_value(summary: dict[str, Any]) -> None:
    for metric in summary["metrics"].values():
        for found in metric["percentiles"].values():
            if found["lo"] is not None:
                assert found["lo"] <= found["value"] <= found["hi"]


def test_failures_are_missing_and_raise_adjusted_percentiles(summary: dict[str, Any]) -> None:
    ttft = summary["metrics"]["ttft_s"]

    assert ttft["missing"] == summary["counts"]["overloaded"] > 0
    assert ttft["adjusted"]["p50"] >= ttft["percentiles"]["p50"]["value"]
    assert ttft["adjusted"]["p99.9"] is None


def test_request_that_failed_after_its_first_token_counts_as_infinite() -> None:
    run = sample_run(SampleLoad(mode="closed", duration_s=20, failure_share=0.0))
    before = summarize(run)["metrics"]["ttft_s"]
    broken = [record for record in run.records if (record.t_sent_ns or 0) > 6e9][:20]
    for record in broken:
        record.status = Status.TRUNCATED

    after = summarize(run)["metrics"]["ttft_s"]

    assert after["count"] == before["count"] - 20
    assert after["missing"] == 20
    assert after["adjusted"]["p75"] > before["adjusted"]["p75"]
    assert before["adjusted"]["p99.9"] is not None
    assert after["adjusted"]["p95"] is None


def test_only_latencies_of_the_server_are_adjusted(summary: dict[str, Any]) -> None:
    metrics = summary["metrics"]

    assert metrics["schedule_lag_s"]["adjusted"] is None
    assert metrics["length_shortfall"]["adjusted"] is None
    assert metrics["e2e_s"]["adjusted"] is not None


def test_blocking_runs_have_null_ttft() -> None:
    run = sample_run()
    for record in run.records:
        record.t_first_ns = record.t_first_answer_ns = record.t_last_ns = None
        record.gap_ns = []

    metrics = summarize(run)["metrics"]

    assert metrics["ttft_s"]["count"] == 0
    assert metrics["ttft_s"]["percentiles"]["p50"]["value"] is None
    assert metrics["e2e_s"]["count"] > 0


def test_same_run_gives_the_same_summary(summary: dict[str, Any]) -> None:
    assert summarize(sample_run()) == summary


def test_metric_value_is_in_milliseconds_and_corrected_in_an_open_loop(summary: dict[str, Any]) -> None:
    metrics = summary["metrics"]

    assert metric_value(summary, "ttft_p95_ms", True) == 1e3 * metrics["ttft_co_s"]["percentiles"]["p95"]["value"]
    assert metric_value(summary, "ttft_p95_ms", False) == 1e3 * metrics["ttft_s"]["percentiles"]["p95"]["value"]
    assert metric_value(summary, "gap_p99_ms", True) == 1e3 * metrics["gap_s"]["percentiles"]["p99"]["value"]
    assert metric_value(summary, "tpot_mean_ms", True) == 1e3 * metrics["tpot_s"]["mean"]
    assert metric_value(summary, "output_tokens_per_s", True) == summary["rates"]["output_tokens_per_s"]["value"]
    with pytest.raises(KeyError):
        metric_value(summary, "latency", True)


def test_summary_is_the_same_from_a_finished_directory(tmp_path: Path) -> None:
    run = write_sample_run(tmp_path, SampleLoad(mode="closed", duration_s=10))
    finish_run(tmp_path)

    assert analyse_run(tmp_path).summary == summarize(run)
    assert json.loads((tmp_path / "summary.json").read_text())["run_id"] == run.manifest.run_id


def test_server_side_means_come_from_differences_over_the_window(summary: dict[str, Any]) -> None:
    assert summary["server"]["queue_s"]["mean"] == pytest.approx(0.011)
    assert summary["server"]["batch_size"]["max"] == 20.0

"""Each metric on a small run with values computed by hand."""

import math
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from reports.metrics.finish_run import write_table
from reports.metrics.measured import Measured
from reports.metrics.named_metrics import METRICS
from reports.metrics.requests.per_request import PER_REQUEST
from reports.metrics.requests.pooled_metrics import POOLED
from reports.metrics.run_metrics import PER_RUN
from reports.metrics.summary import summarize
from reports.run_schema import RequestRecord, Status
from reports.run_store import REQUESTS, RunManifest, RunResult, write_manifest
from tests.support.samples.stream_record import stream_record as stream

S = 1_000_000_000
MS = 1_000_000


def run_of(*records: RequestRecord, **manifest: object) -> RunResult:
    settings: dict[str, object] = {"mode": "poisson", "window_end_s": 10.0} | manifest
    return RunResult(RunManifest("r", **settings), list(records))  # type: ignore[arg-type]


def values(run: RunResult) -> dict[str, float]:
    measured = Measured.of(run)
    return {metric.name: metric.function(measured).value for metric in PER_RUN}


def column(run: RunResult, name: str) -> list[float]:
    return [float(value) for value in Measured.of(run).requests[name]]


def test_every_metric_has_one_name() -> None:
    names = [metric.name for metric in METRICS]

    assert len(names) == len(set(names))
    assert {"ttft_s", "ttft_co_s", "tpot_s", "gap_s", "itl_s", "output_tokens_per_s", "goodput_rps"} <= set(names)
    assert all(metric.formula and metric.unit for metric in METRICS)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("ttft_s", 0.09),
        ("ttft_co_s", 0.1),
        ("ttfat_s", 0.09),
        ("ttfb_s", 0.005),
        ("tpot_s", 0.02),
        ("max_gap_s", 0.02),
        ("e2e_s", 0.17),
        ("e2e_co_s", 0.18),
        ("ntpot_s", 0.034),
        ("decode_tps", 50.0),
        ("schedule_lag_s", 0.004),
        ("length_shortfall", 0.5),
    ],
)
def test_metrics_5_formula(name: str, expected: float) -> None:
    run = run_of(stream(1.0, 1.1, 0.02, 5, requested_output_tokens=10))

    assert column(run, name) == [pytest.approx(expected)]


def test_blocking_call_has_no_ttft_no_tpot_and_no_gaps() -> None:
    record = RequestRecord("r", "q", t_intended_ns=0, t_sent_ns=0, t_end_ns=2 * S, output_tokens=8)
    run = run_of(record)

    for name in ("ttft_s", "ttft_co_s", "tpot_s", "max_gap_s"):
        assert math.isnan(column(run, name)[0])
    assert column(run, "e2e_s") == [2.0]
    assert column(run, "ntpot_s") == [0.25]
    assert values(run)["output_tokens_per_s"] == 0.8


def test_tpot_counts_from_the_tokens_of_the_first_event() -> None:
    record = stream(0.0, 1.0, 0.1, 3, output_tokens=7, event_tokens=[3, 2, 2], first_event_tokens=3)

    assert column(run_of(record), "tpot_s") == [pytest.approx(0.05)]


def test_tpot_of_a_single_token_is_missing() -> None:
    assert math.isnan(column(run_of(stream(0.0, 1.0, 0.1, 1)), "tpot_s")[0])


def test_trust_D1_the_time_of_a_failed_request_counts_only_in_its_own_row(tmp_path: Path) -> None:
    whole = stream(0.0, 1.0, 0.1, 3)
    failed = stream(1.0, 6.0, 0.5, 3, status=Status.TRUNCATED)
    run = run_of(whole, failed)

    metrics = summarize(run)["metrics"]
    counted = {name: metrics[name]["max"] for name in ("ttft_s", "ttft_co_s", "tpot_s", "gap_s", "itl_s", "max_gap_s")}
    assert counted == pytest.approx(
        {"ttft_s": 0.99, "ttft_co_s": 1.0, "tpot_s": 0.1, "gap_s": 0.1, "itl_s": 0.1, "max_gap_s": 0.1}
    )
    assert (metrics["e2e_s"]["count"], metrics["ttft_s"]["count"], metrics["ttft_s"]["missing"]) == (1, 1, 1)

    write_manifest(tmp_path, run.manifest)
    write_table(tmp_path, REQUESTS, [record.to_json() for record in run.records], run.manifest)
    rows = pq.read_table(tmp_path / "requests.parquet").to_pylist()
    assert [row["ttft_s"] for row in rows] == pytest.approx([0.99, 4.99])
    assert [row["tpot_s"] for row in rows] == pytest.approx([0.1, 0.5])


def test_trust_W6_a_request_cut_off_after_its_first_token_has_no_mean_time_per_token() -> None:
    records = [stream(float(start), start + 0.5, 0.1, 3) for start in range(8)]
    cut_off = stream(8.0, 8.5, 0.9, 3, status=Status.UNFINISHED, t_end_ns=15 * S, requested_output_tokens=90)

    metrics = summarize(run_of(*records, cut_off))["metrics"]

    assert (metrics["tpot_s"]["count"], metrics["tpot_s"]["max"]) == (8, pytest.approx(0.1))
    assert (metrics["ntpot_s"]["count"], metrics["decode_tps"]["count"], metrics["length_shortfall"]["max"]) == (
        8,
        8,
        0,
    )
    assert (metrics["ttft_s"]["count"], metrics["ttft_s"]["at_least"]) == (9, False)


def test_trust_D1_a_request_cut_off_at_the_drain_limit_counts_in_quantiles_as_a_lower_bound() -> None:
    records = [stream(float(start), start + 0.5, 0.1, 3) for start in range(8)]
    cut_off = stream(8.0, 8.5, 0.1, 3, status=Status.UNFINISHED, t_end_ns=15 * S)

    summary = summarize(run_of(*records, cut_off, drain_s=5.0))

    e2e = summary["metrics"]["e2e_s"]
    assert (e2e["count"], e2e["max"], e2e["at_least"]) == (9, pytest.approx(6.99), True)
    found = {name: e2e["percentiles"][name] for name in ("p50", "p99")}
    assert {name: each["at_least"] for name, each in found.items()} == {"p50": False, "p99": True}
    assert e2e["percentiles"]["p99.9"]["hi"] is None
    assert e2e["mean_interval"]["hi"] is None
    drain = next(found for found in summary["verdict"]["findings"] if found["check"] == "drain")
    assert drain["message"].startswith("1 request was cut off at the drain limit of 5 s")


def test_trust_D1_a_percentile_among_the_requests_that_were_cut_off_is_a_lower_bound() -> None:
    whole = [stream(float(start), start + 0.5, 0.1, 3) for start in range(4)]
    end = {"status": Status.UNFINISHED, "t_end_ns": 15 * S}
    cut_off = [stream(4.0 + start, 5.0 + start, 0.1, 3, **end) for start in range(5)]

    metrics = summarize(run_of(*whole, *cut_off))["metrics"]

    marks = {name: metrics["e2e_co_s"]["percentiles"][name]["at_least"] for name in ("p25", "p50", "p90")}
    assert marks == {"p25": False, "p50": True, "p90": True}
    assert metrics["e2e_co_s"]["percentiles"]["p90"]["hi"] is None
    assert not metrics["ttft_co_s"]["percentiles"]["p90"]["at_least"]


def test_trust_D1_requests_of_the_drain_count_in_no_metric() -> None:
    records = [stream(float(start), start + 0.5, 0.1, 3) for start in range(8)]
    later = stream(9.0, 14.0, 2.0, 3, phase="drain")

    with_drain, without = (summarize(run_of(*these))["metrics"] for these in ([*records, later], records))

    for name in ("ttft_s", "tpot_s", "e2e_s", "gap_s"):
        assert with_drain[name] == without[name]


def test_gaps_are_pooled_and_itl_splits_them_over_the_tokens_of_their_event() -> None:
    run = run_of(stream(0.0, 1.0, 0.1, 3, output_tokens=5, event_tokens=[1, 2, 2]), stream(1.0, 2.0, 0.3, 2))
    gap, itl = (metric.function(Measured.of(run)) for metric in POOLED)

    assert gap[0].tolist() == pytest.approx([0.1, 0.1, 0.3])
    assert gap[1].tolist() == [2, 1]
    assert itl[0].tolist() == pytest.approx([0.05, 0.05, 0.05, 0.05, 0.3])
    assert itl[1].tolist() == [4, 1]


def test_metrics_6_request_across_the_window_edge_counts_only_its_part_inside() -> None:
    run = run_of(stream(9.0, 9.55, 0.1, 10))

    assert values(run)["output_tokens_per_s"] == pytest.approx(0.5)
    assert values(run)["requests_per_s"] == 0.0
    assert Measured.of(run).population["e2e_s"].count() == 1


def test_rates_count_input_at_the_first_token_and_success_at_its_end() -> None:
    found = values(run_of(stream(0.0, 1.0, 0.1, 3), stream(2.0, 3.0, 0.1, 3, status=Status.STREAM_ERROR)))

    assert found["input_tokens_per_s"] == pytest.approx(20.0)
    assert found["output_tokens_per_s"] == pytest.approx(0.6)
    assert found["total_tokens_per_s"] == pytest.approx(20.6)
    assert found["requests_per_s"] == pytest.approx(0.1)
    assert found["offered_rate"] == pytest.approx(0.2)
    assert found["error_rate"] == 0.5


def test_start_is_the_intended_time_in_an_open_loop_and_the_sent_time_in_a_closed_one() -> None:
    record = stream(9.995, 10.5, 0.1, 2)

    assert len(Measured.of(run_of(record)).population) == 1
    assert len(Measured.of(run_of(record, mode="closed")).population) == 0


def test_concurrency_is_weighted_by_time() -> None:
    run = run_of(
        stream(0.0, 1.0, 0.5, 9, t_sent_ns=0, t_end_ns=5 * S), stream(2.0, 3.0, 0.5, 9, t_sent_ns=2 * S, t_end_ns=4 * S)
    )
    found = values(run)

    assert found["concurrency_mean"] == pytest.approx(0.7)
    assert found["concurrency_p50"] == 0.0
    assert found["concurrency_max"] == 2.0
    assert found["little_residual"] == pytest.approx(0.0)


def test_objectives_use_the_corrected_metric_of_each_request() -> None:
    late = stream(0.0, 1.0, 0.01, 3)
    late.t_sent_ns = 995 * MS
    objectives = [{"metric": "ttft_p95_ms", "max": 200}, {"metric": "tpot_mean_ms", "max": 50}]
    run = run_of(late, stream(1.0, 1.1, 0.01, 3), stream(2.0, 2.1, 0.08, 3), objectives=objectives)

    assert Measured.of(run).requests["slo_ok"].tolist() == [False, True, False]
    assert values(run)["goodput_rps"] == pytest.approx(0.1)
    assert values(run)["slo_attainment"] == pytest.approx(1 / 3)


def test_request_without_the_metric_misses_the_objective() -> None:
    objectives = [{"metric": "tpot_mean_ms", "max": 50}]

    assert values(run_of(stream(0.0, 1.0, 0.1, 1), objectives=objectives))["slo_attainment"] == 0.0


def test_without_objectives_goodput_is_missing() -> None:
    assert math.isnan(values(run_of(stream(0.0, 1.0, 0.1, 3)))["goodput_rps"])


def test_timeliness_compares_each_token_with_its_due_time() -> None:
    objectives = [{"metric": "ttft_p95_ms", "max": 1000}, {"metric": "tpot_mean_ms", "max": 100}]
    punctual = stream(0.0, 0.9, 0.1, 4)
    stalled = stream(2.0, 2.9, 0.3, 4)

    assert values(run_of(punctual, stalled, objectives=objectives))["token_timeliness"] == pytest.approx(5 / 8)


def test_requested_tokens_of_a_failed_request_are_due() -> None:
    objectives = [{"metric": "ttft_p95_ms", "max": 1000}, {"metric": "tpot_mean_ms", "max": 100}]
    refused = RequestRecord("r", "x", status=Status.OVERLOADED, t_intended_ns=S, requested_output_tokens=12)

    found = values(run_of(stream(0.0, 0.9, 0.1, 4), refused, objectives=objectives))

    assert found["token_timeliness"] == pytest.approx(4 / 16)


def test_cost_and_tokens_per_joule() -> None:
    run = run_of(stream(0.0, 1.0, 0.1, 20), price_per_hour=3.6)
    run.server_metrics = [
        {"t_s": float(t), "name": "accelerator_power_watts", "labels": "", "value": 100.0} for t in range(12)
    ]

    assert values(run)["cost_per_mtok"] == pytest.approx(500.0)
    assert values(run)["tokens_per_joule"] == pytest.approx(20 / 1000)
    assert math.isnan(values(run_of(stream(0.0, 1.0, 0.1, 20)))["tokens_per_joule"])


def test_trust_W11_energy_and_tokens_cover_the_same_interval() -> None:
    """A token every 50 ms and a power of 300 + 60 sin(t) watts for 10.6 s, sampled once a second."""
    run = run_of(stream(0.0, 0.0, 0.05, 400), window_end_s=10.6, warmup_s=0.6)
    run.server_metrics = [
        {"t_s": t + 0.1, "name": "accelerator_power_watts", "labels": "", "value": 300 + 60 * math.sin(t + 0.1)}
        for t in range(-2, 14)
    ]
    joules = 300 * 10.0 + 60 * (math.cos(0.6) - math.cos(10.6))

    assert values(run)["tokens_per_joule"] == pytest.approx(200 / joules, rel=0.01)


def test_trust_W11_energy_is_unknown_if_samples_do_not_cover_the_window() -> None:
    run = run_of(stream(0.0, 0.0, 0.05, 400), window_end_s=10.6, warmup_s=0.6)
    run.server_metrics = [
        {"t_s": float(t), "name": "accelerator_power_watts", "labels": "", "value": 300.0} for t in range(10)
    ]

    assert math.isnan(values(run)["tokens_per_joule"])


def test_empty_run_has_no_values() -> None:
    measured = Measured.of(run_of())

    assert all(len(metric.function(measured)[0]) == 0 for metric in POOLED)
    assert math.isnan(values(run_of())["error_rate"])
    assert len(PER_REQUEST) == 18


def test_usage_totals_are_spread_over_events_of_unknown_size() -> None:
    run = run_of(stream(0.0, 1.0, 0.1, 3, output_tokens=6, tokens_source="server_usage"))

    [batch] = Measured.of(run).events.batches()
    assert batch.tokens.tolist() == [2.0, 2.0, 2.0]


def test_metrics_5_truncated_stream_keeps_its_tokens_and_has_no_e2e() -> None:
    whole = stream(0.0, 1.0, 0.1, 11)
    cut = stream(1.0, 2.0, 0.1, 6, status=Status.TRUNCATED, requested_output_tokens=11)

    found = values(run_of(whole, cut))

    assert found["output_tokens_per_s"] == pytest.approx((11 + 6) / 10)
    assert found["requests_per_s"] == pytest.approx(0.1)
    assert found["error_rate"] == pytest.approx(0.5)
    assert column(run_of(whole, cut), "e2e_s") == pytest.approx([1.99, math.nan], nan_ok=True)
    assert column(run_of(whole, cut), "ttft_s") == pytest.approx([0.99, math.nan], nan_ok=True)
    assert column(run_of(whole, cut), "length_shortfall") == pytest.approx([0.0, math.nan], nan_ok=True)


def test_metrics_6_censored_request_is_a_failure_of_the_window_it_started_in() -> None:
    waiting = RequestRecord(
        "r", "x", status=Status.UNFINISHED, t_intended_ns=9 * S, t_dispatch_ns=9 * S, t_sent_ns=9 * S, t_end_ns=14 * S
    )
    records = [stream(float(start), start + 0.5, 0.1, 3) for start in range(8)]

    run = run_of(*records, waiting)
    ttft = summarize(run)["metrics"]["ttft_co_s"]

    assert values(run)["error_rate"] == pytest.approx(1 / 9)
    assert values(run)["concurrency_max"] == 1
    assert (ttft["count"], ttft["missing"]) == (9, 0)
    assert ttft["percentiles"]["p75"]["value"] == pytest.approx(0.5)
    assert (ttft["max"], ttft["at_least"]) == (pytest.approx(5.0), True)
    # One failure in nine: beyond the 88th percentile nothing is bounded.
    assert (ttft["adjusted"]["p75"], ttft["adjusted"]["p90"]) == (pytest.approx(0.5), None)


def test_metrics_5_bursty_stream_has_long_gaps_short_itl_and_a_mean_that_hides_both() -> None:
    """Three events of four tokens each, 0.4 s apart, after one of a single token."""
    record = stream(0.0, 1.0, 0.4, 4, event_tokens=[1, 4, 4, 4], output_tokens=13)
    measured = Measured.of(run_of(record))
    gaps, itl = (metric.function(measured)[0] for metric in POOLED)

    assert list(gaps) == pytest.approx([0.4] * 3)
    assert list(itl) == pytest.approx([0.1] * 12)
    assert column(run_of(record), "tpot_s") == pytest.approx([1.2 / 12])
    assert column(run_of(record), "max_gap_s") == pytest.approx([0.4])


def test_metrics_2_coalesced_events_have_gaps_of_zero_and_are_counted() -> None:
    record = stream(0.0, 1.0, 0.0, 4, gap_ns=[0, 300 * MS, 0], t_last_ns=1300 * MS, coalesced_events=2)
    run = run_of(record)

    assert list(POOLED[0].function(Measured.of(run))[0]) == pytest.approx([0.0, 0.3, 0.0])
    assert column(run, "tpot_s") == pytest.approx([0.1])
    facts = summarize(run)["client"]
    assert facts["coalesced_share"] == pytest.approx(0.5)
    assert facts["coalesced_gaps_share"] == pytest.approx(2 / 3)


def test_metrics_7_littles_law_holds_when_every_request_is_counted() -> None:
    records = [stream(float(start), start + 0.5, 0.1, 6, t_sent_ns=start * S) for start in range(9)]

    found = values(run_of(*records))

    # Nine stays of one second in ten seconds.
    assert found["concurrency_mean"] == pytest.approx(0.9)
    assert found["little_residual"] == pytest.approx(0.0, abs=1e-9)


def test_metrics_7_energy_is_that_of_all_devices() -> None:
    run = run_of(stream(0.0, 1.0, 0.1, 20))
    run.server_metrics = [
        {"t_s": float(t), "name": "accelerator_power_watts", "labels": f'gpu="{gpu}"', "value": 50.0}
        for t in range(12)
        for gpu in range(2)
    ]

    assert values(run)["tokens_per_joule"] == pytest.approx(20 / 1000)

"""The rows of adapters: the base model first, then by requests, and by name where these are equal."""

from collections.abc import Sequence

from reports.metrics.summary import Analysis
from reports.pages.sections.adapters import adapters_table
from reports.run_store import RunResult
from tests.support.samples.sample_run import SampleLoad, sample_run


def run_of(names: Sequence[str | None], load: SampleLoad | None = None) -> RunResult:
    """A run whose requests name these adapters in turn."""
    run = sample_run(load or SampleLoad(duration_s=3, warmup_s=0, rate=8 / 3, failure_share=0.0))
    for number, record in enumerate(run.records):
        record.adapter = names[number % len(names)]
    return run


def test_adapters_are_ordered_by_requests_and_then_by_name() -> None:
    rows = Analysis.of(run_of(["b", "d", "a", "d", None, "c", "a10", "b"])).summary["adapters"]

    assert [row["adapter"] for row in rows] == [None, "b", "d", "a", "a10", "c"]
    assert [row["requests"] for row in rows] == [1, 2, 2, 1, 1, 1]


def test_without_adapters_there_are_no_rows() -> None:
    assert Analysis.of(run_of([None])).summary["adapters"] == []


def test_percentiles_have_the_intervals_of_the_run_and_few_requests_have_none() -> None:
    load = SampleLoad(duration_s=120, rate=4, failure_share=0.0)
    summary = Analysis.of(run_of(["a"], load)).summary
    whole = summary["metrics"]["tpot_s"]["percentiles"]["p50"]

    [only] = summary["adapters"]
    rows = Analysis.of(run_of(["a"] * 60 + ["rare"], load)).summary["adapters"]

    assert only["tpot_s_p50"] == whole["value"]
    assert only["tpot_s_p50_interval"] == {"lo": whole["lo"], "hi": whole["hi"], "needed": None}
    common, rare = rows
    assert common["tpot_s_p50_interval"]["lo"] < common["tpot_s_p50"] < common["tpot_s_p50_interval"]["hi"]
    assert common["tpot_s_p95_interval"]["needed"] > common["requests"]
    assert rare["tpot_s_p95"] is None
    table = adapters_table(rows)
    assert "–" in table["TPOT p50, ms ↓"][0].interval
    assert str(table["TPOT p95, ms ↓"][0]).startswith("≥")
    assert table["TPOT p95, ms ↓"][1] is None


def test_times_count_from_the_schedule_in_an_open_loop_and_from_the_send_in_a_closed_loop() -> None:
    """A client whose sends wait in its queue: each request is sent half a second late."""
    for mode, latencies in (("poisson", {"ttft_s": "ttft_co_s", "e2e_s": "e2e_co_s"}), ("closed", {})):
        run = run_of(["a"], SampleLoad(mode=mode, duration_s=60, rate=4, concurrency=4, failure_share=0.0))
        for record in run.records:
            record.t_intended_ns = (record.t_intended_ns or 0) - 500_000_000
        summary = Analysis.of(run).summary

        [row] = summary["adapters"]

        for name in ("ttft_s", "tpot_s", "e2e_s"):
            found = summary["metrics"][latencies.get(name, name)]["percentiles"]["p50"]
            assert row[f"{name}_p50"] == found["value"]
            assert row[f"{name}_p50_interval"]["lo"] == found["lo"]
        assert (row["ttft_s_p50"] > 0.5) == (mode == "poisson")

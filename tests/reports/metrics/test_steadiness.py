"""Steady state is shown, or the verdict states that it was not checked."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from loadgen.commands.present import render_summary
from reports.metrics.summary import Analysis
from reports.pages.run_page import build_run_report
from reports.run_schema import RequestRecord
from reports.run_store import RunResult
from tests.support.samples.sample_run import SampleLoad, sample_run

S = 1_000_000_000
FAST = SampleLoad(mode="closed", duration_s=33, warmup_s=3, step_s=0.005, failure_share=0)


def slowed(load: SampleLoad, work_done_s: Callable[[np.ndarray], np.ndarray]) -> RunResult:
    """A run of a saturated server whose speed changes. work_done_s: from the time, in seconds at full speed."""
    run = sample_run(load)
    real_s = np.linspace(0, 3 * load.duration_s, 300_001)
    done_s = work_done_s(real_s)

    def real_ns(moments_ns: list[int]) -> list[int]:
        return [round(each * S) for each in np.interp(np.array(moments_ns) / S, done_s, real_s)]

    for record in run.records:
        _move(record, real_ns)
    run.records = [each for each in run.records if each.t_sent_ns <= load.duration_s * S]  # type: ignore[operator]
    return run


def _move(record: RequestRecord, real_ns: Callable[[list[int]], list[int]]) -> None:
    names = ("t_intended_ns", "t_dispatch_ns", "t_sent_ns", "t_headers_ns", "t_end_ns")
    for name, moment in zip(names, real_ns([getattr(record, name) for name in names]), strict=True):
        setattr(record, name, moment)
    events = real_ns(list(np.cumsum([record.t_first_ns or 0, *record.gap_ns])))
    record.t_first_ns = record.t_first_answer_ns = events[0]
    record.t_last_ns = events[-1]
    record.gap_ns = np.diff(events).tolist()


def analysed(run: RunResult) -> Analysis:
    return Analysis.of(run)


def checks(analysis: Analysis) -> list[str]:
    return [reason["check"] for reason in analysis.summary["verdict"]["reasons"]]


def tokens_per_s(analysis: Analysis) -> float:
    return float(analysis.summary["rates"]["output_tokens_per_s"]["value"])


def test_trust_W5_a_server_three_times_slower_for_half_of_the_window_degrades_the_run() -> None:
    analysis = analysed(slowed(FAST, lambda t: np.where(t < 18, t / 3, t - 12)))

    [reason] = analysis.summary["verdict"]["reasons"]
    assert (analysis.summary["verdict"]["status"], reason["check"]) == ("degraded", "not_stationary")
    assert reason["message"].startswith(("throughput rose by 19", "throughput rose by 20", "throughput rose by 21"))
    assert reason["message"].endswith("during the window; run longer or raise --warmup")


def test_trust_W5_a_slow_start_in_the_first_third_is_removed_from_the_window() -> None:
    truth = tokens_per_s(analysed(sample_run(FAST)))

    analysis = analysed(slowed(FAST, lambda t: np.where(t < 8, t / 3, t - 16 / 3)))

    window = analysis.summary["window"]
    assert window["warmup_rule"] == "step"
    assert window["start_s"] == window["truncation_s"] == pytest.approx(8, abs=1)
    assert tokens_per_s(analysis) == pytest.approx(truth, rel=0.05)
    assert checks(analysis) == []


def test_trust_S1_a_linear_rise_of_20_percent_degrades_the_run() -> None:
    analysis = analysed(slowed(FAST, lambda t: 0.9 * t + 0.1 * np.maximum(t - 3, 0) ** 2 / 30))

    [reason] = analysis.summary["verdict"]["reasons"]
    assert reason["level"] == "degraded"
    assert "throughput rose by" in reason["message"]


def test_trust_S1_a_drop_by_half_in_mid_run_degrades_the_run() -> None:
    """A drop is not a warm-up, so the first half of the window is kept."""
    analysis = analysed(slowed(FAST, lambda t: np.where(t < 18, t, 18 + (t - 18) / 2)))

    [reason] = analysis.summary["verdict"]["reasons"]
    assert reason["message"].startswith(("throughput fell by 4", "throughput fell by 5"))
    assert analysis.summary["window"]["start_s"] == 3.0


VARIANTS = (SampleLoad(mode="closed"), SampleLoad(rate=12, duration_s=30))


@pytest.mark.parametrize(
    "load", [FAST, SampleLoad(), *(pytest.param(load, marks=pytest.mark.slow) for load in VARIANTS)]
)
def test_trust_S1_a_level_run_is_checked_and_valid(load: SampleLoad) -> None:
    verdict = analysed(sample_run(replace(load, failure_share=0.0))).summary["verdict"]

    assert verdict == {"status": "valid", "reasons": [], "findings": []}


def test_trust_S1_a_short_run_is_valid_and_its_verdict_line_states_that_it_was_not_checked() -> None:
    analysis = analysed(sample_run(SampleLoad(mode="closed", concurrency=4, duration_s=8, warmup_s=0)))

    [finding] = analysis.summary["verdict"]["findings"]
    assert analysis.summary["verdict"]["status"] == "valid"
    assert (finding["check"], finding["level"]) == ("steady_state_unchecked", "valid")
    assert finding["message"].startswith("steady state not checked, needs about ")
    first_line = render_summary([analysis]).splitlines()[0]
    assert first_line == f"valid run {analysis.label}, {finding['message']}"
    assert build_run_report([analysis]).verdicts[0].word == f"Valid run, {finding['message']}"


def test_trust_S1_a_run_of_ten_seconds_is_checked() -> None:
    load = SampleLoad(mode="closed", duration_s=13, warmup_s=3, step_s=0.005, failure_share=0.0)

    assert analysed(sample_run(load)).summary["verdict"]["findings"] == []


@pytest.mark.parametrize(
    "mode", ["stages", *(pytest.param(mode, marks=pytest.mark.slow) for mode in ("trace", "burst"))]
)
def test_trust_S1_loads_of_varying_rate_are_not_checked(mode: str) -> None:
    run: Any = slowed(FAST, lambda t: np.where(t < 18, t / 3, t - 12))
    run.manifest.mode, run.manifest.open_loop = mode, False

    verdict = analysed(run).summary["verdict"]

    assert [each["check"] for each in verdict["reasons"] + verdict["findings"]] == []

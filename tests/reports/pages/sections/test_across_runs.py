"""Several runs per side: variation within and between runs, and effects, on records made by hand."""

import numpy as np
import pytest

from reports.metrics.summary import Analysis
from reports.pages.run_page import build_run_report
from reports.pages.sections.across_runs import Side, across_section, adjusted_ratio, paired_ratio, sides_of, spread_of
from reports.run_schema import RequestRecord
from reports.run_store import RunManifest, RunResult
from tests.support.samples.sample_run import SampleLoad, sample_run

MS = 1_000_000


def analysis(label: str, ttft_ms: list[float], tokens: list[int], tpot_ms: float = 10.0) -> Analysis:
    records = []
    for index, (first, count) in enumerate(zip(ttft_ms, tokens, strict=True)):
        sent = index * 100 * MS
        t_first = sent + round(first * MS)
        t_last = t_first + round((count - 1) * tpot_ms * MS)
        records.append(
            RequestRecord(
                label, f"r{index}", f"p{index}",
                t_intended_ns=sent, t_dispatch_ns=sent, t_sent_ns=sent, t_first_ns=t_first, t_last_ns=t_last,
                t_end_ns=t_last, input_tokens=10, output_tokens=count, first_event_tokens=1, events=count,
                gap_ns=[round(tpot_ms * MS)] * (count - 1),
            )
        )  # fmt: skip
    manifest = RunManifest(label, label=label, mode="closed", window_end_s=10.0, length_control="capped")
    return Analysis.of(RunResult(manifest, records))


def test_variation_between_runs_widens_the_interval() -> None:
    random = np.random.default_rng(1)
    same = [random.normal(100, 10, 400) for _ in range(5)]
    shifted = [values + shift for values, shift in zip(same, (-20, -10, 0, 10, 20), strict=True)]

    alike, apart = (spread_of(runs, 50.0, [1.0] * 5) for runs in (same, shifted))

    # The median of 400 normal values has a standard error of 1.2533 * 10 / 20.
    assert alike.within == pytest.approx(0.63, abs=0.12)
    assert alike.between < 0.7
    assert apart.between == pytest.approx(np.std([-20, -10, 0, 10, 20], ddof=1), rel=0.1)
    assert apart.interval.hi - apart.interval.lo > 5 * (alike.interval.hi - alike.interval.lo)


def test_requests_are_paired_by_prompt_id() -> None:
    first, second = [10.0, 20.0, 400.0, 80.0], [11.0, 22.0, 200.0, 88.0]
    a = Side("a", (analysis("a", first, [5] * 4),))
    b = Side("b", (analysis("b", second, [5] * 4),))

    ratio, count = paired_ratio(a, b, "ttft_s")

    assert (ratio, count) == (pytest.approx(1.1), 4)


def test_longer_responses_are_no_slowdown_at_equal_lengths() -> None:
    lengths = [10, 20, 30, 40] * 5
    a = Side("a", (analysis("a", [50.0] * 20, lengths),))
    b = Side("b", (analysis("b", [50.0] * 20, [length + 20 for length in lengths]),))
    slower = Side("b", (analysis("b", [50.0] * 20, [length + 20 for length in lengths], tpot_ms=11.0),))

    assert adjusted_ratio(a, b, "e2e_s") == pytest.approx(1.0, abs=1e-6)
    assert adjusted_ratio(a, slower, "e2e_s") == pytest.approx(1.08, abs=0.02)
    assert paired_ratio(a, b, "e2e_s")[0] > 1.5


def test_three_runs_per_side_show_both_variations_and_the_effect() -> None:
    load = {"mode": "closed", "duration_s": 10.0}
    runs = [
        sample_run(SampleLoad(label=label, seed=seed, slowdown=slowdown, **load))
        for label, slowdown in (("old", 1.0), ("new", 1.3))
        for seed in range(3)
    ]
    analyses = [Analysis.of(run) for run in runs]

    report = build_run_report(analyses)
    [section] = [each for each in report.sections if each.title == "Across runs"]

    assert [len(side.analyses) for side in sides_of(analyses)] == [3, 3]
    spread, effect = (block.frame for block in section.blocks)
    assert {"within", "between", "value"} <= set(spread.columns)
    tpot = effect.set_index("metric").loc["TPOT p50"]
    assert tpot["change"].value == pytest.approx(30, abs=6)
    assert tpot["change"].lo < tpot["change"].value < tpot["change"].hi
    assert report.title == "old · new"


def test_fewer_than_three_runs_per_side_have_no_section() -> None:
    runs = [Analysis.of(sample_run(SampleLoad(label="a", mode="closed", duration_s=10, seed=seed))) for seed in (1, 2)]

    assert across_section(runs) == ()

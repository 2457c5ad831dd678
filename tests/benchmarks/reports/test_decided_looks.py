import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

from benchmarks.reports.decided_looks import (
    DecidedCell,
    look_sizes,
    quantile_of,
    render,
    reported_coverage,
    shifted,
    stored,
)
from benchmarks.reports.repeated_looks import simulated_runs
from loadgen.generator.stop_rules import DOUBLING, FIRST_LOOK, AttainmentDecided, PartialRun
from loadgen.selftest.queue_models import Runs, model_named
from reports.metrics.early_end import DECIDED_FACTOR
from reports.metrics.measured import Measured
from reports.metrics.named_metrics import metric_interval
from reports.run_schema import RequestRecord
from reports.run_store import RunManifest, RunResult
from reports.stats.estimators import Interval
from tests.support.samples.stream_record import stream_record

PAGE, RESULT = Path("docs/intervals.md"), Path("benchmarks/results/decided_looks.json")


def stored_cells() -> list[DecidedCell]:
    return [DecidedCell(**cell) for cell in json.loads(RESULT.read_text())["cells"]]


def test_trust_C1_the_tables_of_the_page_are_those_of_the_stored_result():
    page = PAGE.read_text()

    for table in render(stored_cells()).split("\n\n"):
        assert table in page


def test_trust_C1_the_intervals_of_a_decision_keep_the_promise():
    """docs/intervals.md, "Repeated looks". With longer sides, an attainment of 80 % misses often."""
    cells = stored_cells()

    frequent = [cell for cell in cells if cell.is_frequent]
    low = [cell for cell in frequent if not cell.is_enough(reported_coverage(cell))]
    assert len(frequent) >= 200
    assert len(low) <= 0.01 * len(frequent)
    assert all(reported_coverage(cell) >= 0.91 * cell.ended for cell in low)
    assert all(cell.is_enough(reported_coverage(cell)) for cell in cells if not cell.is_frequent)
    by_factor = [cell for cell in cells if not cell.keeps_promise(DECIDED_FACTOR)]
    assert len(by_factor) == 6
    assert {cell.statistic for cell in by_factor} == {"attainment 0.8"}


def test_trust_C1_few_runs_decide_for_the_wrong_side():
    """The decision allows 5 % over all looks."""
    assert all(cell.wrong <= 0.05 * cell.runs for cell in stored_cells())


@pytest.mark.slow
@pytest.mark.parametrize(("attainment", "target"), [(0.9, 0.75), (0.5, 0.65)])
def test_trust_C1_goodput_of_a_queue_after_a_decision_is_covered(attainment: float, target: float) -> None:
    """M/M/1 at half load: in a fraction of its requests, the first token arrives within the limit."""
    model, runs = model_named("M/M/1"), 60
    limit_s = quantile_of(model, 0.5, attainment)
    truth = attainment * model.arrivals_per_s(0.5)

    ended = [found for run in simulated_runs(model, 0.5, runs, 77) if (found := decided(run, limit_s, target))]
    shown = [metric_interval(measured, "goodput_rps") for measured in ended]

    assert len(ended) >= 0.7 * runs
    assert sum(found.lo <= truth <= found.hi for found in shown) >= 0.93 * len(ended)
    assert np.median([(found.hi - found.lo) / found.value for found in shown]) < 2


def decided(run: Runs, limit_s: float, target: float) -> Measured | None:
    """The run up to the look that decides, as a report reads it; None without a decision."""
    records = [
        stream_record(float(start), float(start + first), 0.01, 2)
        for start, first in zip(run.arrival_s[:1_600], run.queue_s, strict=False)
    ]
    for size in look_sizes():
        if size > len(records):
            return None
        measured = Measured.of(RunResult(manifest_of(records[:size], limit_s), records[:size]))
        reason = AttainmentDecided(target).reason(PartialRun(measured, (np.zeros(0), np.zeros(0)), measured))
        if reason is not None:
            return dataclasses.replace(measured, window=dataclasses.replace(measured.window, stop_reason=reason))
    return None


def manifest_of(records: list[RequestRecord], limit_s: float) -> RunManifest:
    objectives = [{"metric": "ttft_p95_ms", "max": 1e3 * limit_s}]
    end_s = records[-1].t_intended_ns / 1e9
    return RunManifest("r", mode="poisson", warmup_s=records[0].t_intended_ns / 1e9, window_end_s=end_s,
                       objectives=objectives)  # fmt: skip


def test_a_result_has_one_cell_a_line():
    cells = stored_cells()[:3]

    text = stored(400, 7, cells)

    assert len(text.splitlines()) == len(cells) + 2
    assert [DecidedCell(**cell) for cell in json.loads(text)["cells"]] == cells
    assert json.loads(text)["seed"] == 7


def test_a_report_has_the_interval_of_the_decision_for_an_attainment():
    attainment, latency = (DecidedCell("M/M/1", 0.5, name, -0.5, runs=10) for name in ("attainment 0.9", "ttft mean"))
    for cell in (attainment, latency):
        cell.add(Interval(0.96, 0.91, 0.98), 0.9, is_wrong=False)
    attainment.add_decision(Interval(0.96, 0.89, 0.98), 0.9)

    assert attainment.keeps_promise(DECIDED_FACTOR)
    assert [reported_coverage(cell) for cell in (attainment, latency)] == [1, 1]
    attainment.add_decision(Interval(0.96, 0.91, 0.98), 0.9)
    assert reported_coverage(attainment) == 1


def test_decisions_are_looked_for_from_the_first_look_at_every_doubling():
    assert look_sizes()[:3] == [FIRST_LOOK, FIRST_LOOK * DOUBLING, FIRST_LOOK * DOUBLING**2]
    assert look_sizes()[-1] == 12_800


def test_a_target_is_shifted_in_logits_and_stays_a_fraction():
    assert shifted(0.95, 0.0) == 0.95
    assert shifted(0.5, 1.0) == pytest.approx(0.731, abs=1e-3)
    assert 0.99 < shifted(0.99, 1.0) < 1.0


def test_a_cell_counts_wrong_decisions_and_the_coverage_of_longer_sides():
    cell = DecidedCell("M/M/1", 0.5, "attainment 0.9", 0.25, runs=10)
    for _ in range(4):
        cell.add(Interval(0.96, 0.91, 0.98), 0.9, is_wrong=False)

    assert (cell.ended, cell.wrong, cell.is_frequent) == (4, 0, True)
    assert (cell.coverage(1.0), cell.coverage(1.5)) == (0.0, 1.0)
    assert not cell.keeps_promise(1.0)
    assert cell.keeps_promise(1.5)

"""The page of each run of a series: links from the series to its runs, and back."""

import re
import shutil
from pathlib import Path

from loadgen.cli import main
from reports.document import Link, Table
from reports.metrics.summary import Analysis
from reports.metrics.sweep import LoadPoint, Sweep
from reports.pages.index.page import results_table
from reports.pages.index.saved_results import saved_results
from reports.pages.run_page import build_run_report
from reports.pages.run_pages import run_link, runs_section, way_up
from reports.pages.sweep_page import sweep_json
from reports.run_store import write_json
from tests.support.samples.sample_run import SampleLoad, write_sample_run
from tests.support.undrawn_figures import undrawn_figures


def test_pages_1_a_run_of_a_series_links_back_and_one_of_no_series_does_not(tmp_path: Path) -> None:
    run = tmp_path / "tuned" / "trials" / "0003" / "run"
    run.mkdir(parents=True)

    assert way_up(run) is None
    (tmp_path / "tuned" / "study.json").write_text("{}")
    assert way_up(run) == Link("study tuned", "../../../report.html")
    assert way_up(tmp_path / "tuned" / "trials" / "0003") == Link("study tuned", "../../report.html")


def test_pages_1_only_a_run_with_a_page_is_linked(tmp_path: Path) -> None:
    run = tmp_path / "rate 8"
    run.mkdir()

    assert run_link("8", run) == "8"
    (run / "report.html").write_text("")
    assert run_link("8", run) == Link("8", "rate%208/report.html")
    assert run_link("8", None) == "8"


def test_pages_1_the_pages_of_a_series_runs_are_written_on_demand(tmp_path: Path, capsys) -> None:
    write_sample_run(tmp_path / "run-1", SampleLoad(duration_s=8, warmup_s=1, rate=2))
    shutil.copytree(tmp_path / "run-1", tmp_path / "run-2")
    (tmp_path / "run-2" / "manifest.json").write_text("{")

    with undrawn_figures():
        assert main(["report", str(tmp_path), "--runs"]) == 2
    (tmp_path / "noise.json").write_text("{}")
    assert main(["report", str(tmp_path)]) == 2
    assert "is a noise measurement: its report is written with it; --runs" in capsys.readouterr().err
    with undrawn_figures():
        assert main(["report", str(tmp_path), "--runs"]) == 0

    page = (tmp_path / "run-1" / "report.html").read_text(encoding="utf-8")
    assert f'<a href="../report.html">← noise measurement {tmp_path.name}</a>' in page
    assert not (tmp_path / "run-1" / "figures").exists()
    assert not (tmp_path / "run-2" / "report.html").exists()


def test_pages_1_an_unsupported_ttft_has_its_mark_in_the_tables_of_series_and_in_the_index(tmp_path: Path) -> None:
    """A hundred requests are too few for the interval of a 95th percentile."""
    loads = [SampleLoad(rate=2, seed=seed, failure_share=0.0) for seed in (1, 2)]
    runs = [Analysis.of(write_sample_run(tmp_path / f"run-{load.seed}", load)) for load in loads]
    for number, analysis in enumerate(runs, 1):
        write_json(tmp_path / f"run-{number}" / "summary.json", analysis.summary)
    point = LoadPoint(2.0, (runs[0],))
    (tmp_path / "sweep").mkdir()
    write_json(tmp_path / "sweep" / "sweep.json", sweep_json(Sweep("rate", (point,), 0.95)))

    [table] = runs_section([("a", runs[0])]).blocks
    indexed = results_table(tmp_path, saved_results(tmp_path), tmp_path)
    first_line = build_run_report([each.named(str(n)) for n, each in enumerate(runs)]).verdicts[-1].sentence

    column = "TTFT p95, ms ↓"
    assert isinstance(table, Table)
    assert [str(each)[0] for each in table.frame[column]] == ["≥"]
    assert [str(each)[0] for each in indexed[column]] == ["≥"] * 3
    assert re.search(r"Lowest TTFT p95: \d, ≥[\d.]+ ms", first_line)

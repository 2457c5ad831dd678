"""A value whose run is too short for an interval: marked, without bounds, and with the requests that it needs."""

import json
import re
from pathlib import Path

import pandas as pd

from loadgen.commands.present import render_summary
from reports.document import Estimate, about, format_number
from reports.metrics.summary import Analysis, analyse_run
from reports.pages.run_page import build_run_report
from reports.pages.sections.latency_tables import scaled, unsupported_note
from reports.renderers import html, markdown
from reports.renderers import json as json_report
from tests.support.samples.sample_run import SampleLoad, sample_run, write_sample_run
from tests.support.undrawn_figures import empty_figures


def test_trust_C3_a_withheld_interval_is_marked_and_names_the_requests_it_needs(tmp_path: Path) -> None:
    """This is the same in the terminal, the page, Markdown, JSON and the summary."""
    write_sample_run(tmp_path, SampleLoad(duration_s=6, warmup_s=1))

    analysis = analyse_run(tmp_path)
    report = build_run_report([analysis])
    found = analysis.summary["metrics"]["ttft_co_s"]["percentiles"]["p95"]
    value, needed = f"≥{format_number(1e3 * found['value'])}", f"{about(found['needed']):,}"

    assert (found["lo"], found["hi"], found["supported"]) == (None, None, False)
    assert found["needed"] > analysis.summary["metrics"]["ttft_co_s"]["count"]
    assert f"{value} (needs {needed})" in markdown.render(report).decode()
    assert re.search(
        rf"{value}<span class=\"ci\">needs {needed}</span>",
        html.render(report, empty_figures(report)).decode(),
    )
    [cell] = [
        each
        for section in json.loads(json_report.render(report))["sections"]
        for block in section["blocks"]
        if block.get("columns", [""])[-1] == "missing" and "p99" in block["columns"]
        for each in [block["rows"][0][block["columns"].index("p95")]]
    ]
    assert (cell["lo"], cell["is_supported"], cell["needed"]) == (None, False, found["needed"])
    terminal = render_summary([analysis])
    assert value in terminal
    assert "mark values that are unsupported" in terminal
    assert f"{needed}" in terminal


def test_trust_C3_a_supported_run_has_no_mark() -> None:
    analysis = Analysis.of(sample_run(SampleLoad(mode="closed", duration_s=120, warmup_s=5)))

    assert unsupported_note([analysis]) == ""
    assert "≥" not in render_summary([analysis])


def test_trust_C2_an_interval_wider_than_its_value_names_the_requests_that_narrow_it() -> None:
    assert str(Estimate(100.0, 20.0, 180.0, needed=2_560)) == "100 (20–180, needs 2,600)"
    assert str(Estimate(100.0, needed=8_951, is_supported=False, is_high=True)) == "≥100 (needs 9,000)"


def test_trust_C3_attainment_and_throughput_of_a_short_run_are_withheld_with_the_requests_they_need() -> None:
    rates = pd.DataFrame(
        {"metric": ["SLO attainment", "requests per second"], "v": [scaled(SHORT, 100.0), scaled(SHORT, 1.0)]}
    )

    assert [str(each) for each in rates["v"]] == ["~90.0 (needs 9,000)", "~0.900 (needs 9,000)"]


SHORT = {"value": 0.9, "lo": None, "hi": None, "needed": 8_951}

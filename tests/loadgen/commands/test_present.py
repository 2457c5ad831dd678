import re
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

from loadgen.commands.present import render_summary, render_table
from reports.document import Estimate
from reports.metrics.summary import Analysis
from reports.pages.run_page import build_run_report
from reports.pages.sections.request_tables import error_table
from reports.renderers.markdown import render
from reports.run_schema import Status
from tests.support.samples.sample_run import SampleLoad, sample_run


def test_counts_are_whole_and_measures_have_three_digits():
    frame = pd.DataFrame(
        {"what": ["a", "b"], "count": [7, 12_345], "mean": [7.0, np.nan], "share": [Estimate(1.5), None]}
    )

    assert render_table(frame).splitlines() == [
        "what   count  mean  share",
        "a          7  7.00   1.50",
        "b     12,345     -      -",
    ]


def test_pages_2_a_table_that_is_too_wide_has_headings_of_several_lines_and_fewer_intervals():
    frame = pd.DataFrame(
        {
            "users": ["1", "16"],
            "Output tokens/s ↑": [Estimate(420.0, 362.0, 477.0), Estimate(1_304.0, 1_181.0, 1_426.0)],
            **{f"TTFT p{percent}, ms ↓": [7.5, 1_064.0] for percent in (50, 90, 95, 99)},
            "met, %": [Estimate(100.0, 94.6, 100.0), Estimate(95.6, 93.0, 98.2)],
            "objectives": ["undecided", "undecided"],
        }
    )

    lines = render_table(frame).splitlines()

    assert max(map(len, lines)) <= 80
    assert [line.split() for line in lines[-2:]] == [
        ["1", "420", *["7.50"] * 4, "100", "(94.6–100.0)", "undecided"],
        ["16", "1,304", *["1,064"] * 4, "95.6", "(93.0–98.2)", "undecided"],
    ]
    assert lines[0].split() == ["Output", *["TTFT"] * 4]


def test_servers_1_failed_requests_have_the_message_of_the_server():
    """One row for messages that differ in numbers; the most frequent cause is in the summary."""
    run = sample_run(SampleLoad(mode="closed", duration_s=3, warmup_s=0, failure_share=1.0))
    odd = len(run.records) // 2
    for number, record in enumerate(run.records):
        record.status = Status.HTTP_4XX
        record.error_type = "first_event/422: \x1b[2J" if number == odd else f"first_event/400: {number} tokens are a/b"
    analysis = Analysis.of(run)

    causes = error_table([analysis]).set_index("requests")["cause"]
    text = render_summary([analysis])

    assert len(causes) == 2
    assert causes[1] == "422: \x1b[2J"
    assert re.fullmatch(r"400: \d+ tokens are a/b", causes[len(analysis.measured.population) - 1])
    assert re.search(r"most often +400: \d+ tokens are a/b", text)


@pytest.mark.parametrize("ended_early", [False, True])
def test_the_first_line_of_a_run_has_its_failed_requests_at_every_level(ended_early):
    run = sample_run(SampleLoad(mode="closed", concurrency=2, duration_s=8, warmup_s=0, failure_share=0))
    run.records[3].status, run.records[3].error_type = Status.HTTP_4XX, "first_event/400: bad request"
    if ended_early:
        run = replace(run, manifest=replace(run.manifest, stop_reason="server_unreachable"))
    analysis = Analysis.of(run)
    level = "invalid" if ended_early else "valid"
    expected = f"1 of {len(analysis.measured.population)} requests failed"

    text, page = render_summary([analysis]), render(build_run_report([analysis])).decode()

    assert text.splitlines()[0].startswith(f"{level} run ")
    assert expected in text.splitlines()[0]
    word = "Not a valid measurement" if ended_early else "Valid run"
    assert f"{word}, {expected}" in page
    assert page.count(expected) == 1
    assert analysis.summary["verdict"]["status"] == level


def test_the_text_of_a_structured_load_has_its_validity_with_the_interval():
    run = sample_run(SampleLoad(mode="closed", concurrency=4, slots=24, failure_share=0))
    for number, record in enumerate(run.records):
        if number % 2:
            record.constraint, record.validity = "schema", "cut" if number % 10 == 1 else "valid"
    analysis = Analysis.of(run)
    [row] = [row for row in analysis.summary["structured"] if row["kind"] == "schema"]
    value, lo, hi = (100 * row["validity"][name] for name in ("value", "lo", "hi"))

    [line] = [line for line in render_summary([analysis]).splitlines() if line.startswith("JSON schema")]

    assert line == f"JSON schema      {value:.1f} % valid ({lo:.0f}–{hi:.0f}) of {row['requests']:,} answers"

import re

import numpy as np
import pandas as pd

from loadgen.commands.present import render_summary, render_table
from reports.document import Estimate
from reports.metrics.summary import Analysis
from reports.pages.sections.request_tables import error_table
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

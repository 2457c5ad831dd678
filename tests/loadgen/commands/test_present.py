import numpy as np
import pandas as pd

from loadgen.commands.present import render_table
from reports.document import Estimate


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

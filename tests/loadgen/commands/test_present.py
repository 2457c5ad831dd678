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

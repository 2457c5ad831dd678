import pandas as pd

from reports.document import Report, Table
from reports.pages.step_page import build_step_report


def frame(*sizes: int, half: float | None = 1.0) -> pd.DataFrame:
    rows = [
        {"step": step, "batch_size": size, "runs": 10, "average": value * size, "half_interval": half}
        | {"lowest": 1.0, "highest": 99.0, "p50": 5.0, "p90": 9.0, "p99": None}
        for step, value in (("Prefill", 20.0), ("Decode (token)", 4.0), ("Decode (total)", 28.0), ("Decode", 250.0))
        for size in sizes
    ]
    return pd.DataFrame(rows)


def report(*sizes: int, half: float | None = 1.0) -> Report:
    return build_step_report("a/model", frame(*sizes, half=half), frame(*sizes, half=half), (("Load", (("a", "b"),)),))


def test_the_verdict_has_the_smallest_and_the_largest_batch():
    assert report(1, 2, 8).verdicts[0].sentence == (
        "A decode step takes 4.00 ms and 250 tokens/s with batch size 1; 32.0 ms and 2,000 tokens/s with batch size 8."
    )


def test_averages_have_intervals_and_unknown_percentiles_are_missing():
    table = report(1).sections[0].blocks[-1]

    assert isinstance(table, Table)
    row = table.frame.iloc[0]
    assert (str(row["average"]), row["p90"], row["p99"]) == ("20.0 (19.0–21.0)", 9.0, None)


def test_a_single_batch_size_has_no_figure():
    assert (len(report(1).plots), len(report(1, 2).plots)) == (0, 2)


def test_a_single_run_has_no_interval():
    table = report(1, half=None).sections[0].blocks[-1]

    assert isinstance(table, Table)
    assert str(table.frame.iloc[0]["average"]) == "20.0"

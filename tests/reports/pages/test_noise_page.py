"""The page of a noise measurement: the answer first, in the words of the other pages."""

from reports.document import Report, Table
from reports.gate.comparison import CompareOptions
from reports.gate.noise import noise_of
from reports.gate.side_run import SideRun
from reports.pages.noise_page import build_noise_report, noise_verdict
from tests.support.samples.sample_pages import noise_report

OPTIONS = CompareOptions(gated=("tpot_p50_ms", "error_rate"), shown=("ttft_p50_ms",))


def runs(*tpot: float, status: str = "valid") -> list[SideRun]:
    reasons = ("the client was too slow",) if status == "invalid" else ()
    values = [{"tpot_p50_ms": each, "error_rate": 0.0, "ttft_p50_ms": None} for each in tpot]
    return [SideRun("x", each, status, reasons) for each in values]


def verdict_of(measured: list[SideRun]) -> tuple[str, str]:
    line = noise_verdict(measured, noise_of(measured, OPTIONS), OPTIONS)
    return line.level, line.sentence


def test_the_verdict_has_the_fewest_pairs_that_find_a_clear_regression_and_the_size_of_the_table() -> None:
    measured = runs(20.0, 20.1, 20.2)
    rows = table(build_noise_report("x", measured, noise_of(measured, OPTIONS), OPTIONS), "Noise").frame
    size = rows.set_index("metric").loc["TPOT p50, ms ↓", "4 pairs"]

    assert verdict_of(measured) == (
        "valid",
        f"With 4 pairs, 80 % of comparisons find a regression of {size} in any gated metric. A regression of up to "
        "4.5 % is small enough.",
    )


def test_a_noisy_side_has_the_smallest_change_by_the_title_of_the_metric() -> None:
    level, sentence = verdict_of(runs(20.0, 24.0, 22.0))

    assert level == "degraded"
    assert "With 12 pairs, 80 % of comparisons find a regression of this size: TPOT p50" in sentence


def test_an_invalid_run_is_named_with_its_reason() -> None:
    measured = [*runs(20.0, 20.1), *runs(20.2, status="invalid")]

    line = noise_verdict(measured, noise_of(measured, OPTIONS), OPTIONS)

    assert (line.level, line.reasons) == ("invalid", ("Run 3: the client was too slow",))


def test_a_single_run_and_a_metric_without_values_have_no_numbers() -> None:
    measured = runs(20.0)

    report = build_noise_report("x", measured, noise_of(measured, OPTIONS), OPTIONS)

    assert report.verdicts[0].level == "invalid"
    assert table(report, "Noise").frame["12 pairs"].isna().all()


def test_interleaved_runs_have_the_components_of_their_noise() -> None:
    report = noise_report()

    assert list(table(report, "Where the noise is").frame["metric"])[:2] == ["Output tokens/s", "TTFT p50, ms"]
    assert [plot.name for plot in report.plots] == ["effects", "runs"]


def table(report: Report, title: str) -> Table:
    blocks = next(section.blocks for section in report.sections if section.title == title)
    return next(block for block in blocks if isinstance(block, Table))

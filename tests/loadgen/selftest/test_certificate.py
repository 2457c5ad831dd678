"""The certificate of the intervals: its judgement, and the certificate itself in its long form."""

import json
from pathlib import Path

import pytest

from loadgen.cli import main
from loadgen.selftest import certificate, certificate_table
from loadgen.selftest.certificate import LONG_RUNS, Certificate, required_fraction, settings
from loadgen.selftest.coverage import CoverageCell

ROOT = Path(__file__).parents[3]
RESULT, METHODS = (ROOT / "benchmarks" / "results" / f"{name}.json" for name in ("coverage", "interval_methods"))
PAGE = ROOT / "docs" / "intervals.md"


def cell(model="M/G/16", load=0.5, count=1_000, statistic="p50", runs=1_000, printed=1.0, coverage=0.95, width=0.2):
    """Estimates spread by 0.05 around a true value of 1."""
    found = CoverageCell(model, load, count, "ttft", statistic, 1.0, runs, round(runs * printed))
    found.covered = round(found.printed * coverage)
    found.widths, found.values = [width] * found.printed, [0.95, 1.05] * (runs // 2)
    return found


def judged(*cells):
    found = Certificate(cells, cells[0].runs, 1)
    return found.is_kept, [finding.promise for finding in found.findings]


def test_trust_C1_a_cell_below_91_percent_breaks_the_promise():
    assert judged(cell()) == (True, [])
    assert judged(*[cell()] * 200, cell(coverage=0.9)) == (False, ["covers 90.0%, below 91%"])


def test_trust_C1_one_frequent_cell_in_a_hundred_may_cover_between_91_and_93_percent():
    low = cell(coverage=0.92)

    assert judged(*[cell()] * 99, low) == (True, ["covers 92.0%, below 93%"])
    assert judged(*[cell()] * 98, low, low) == (False, ["covers 92.0%, below 93%"] * 2)


def test_trust_C1_a_rarely_printed_interval_may_miss_in_three_percent_of_all_runs():
    rare = {"load": 0.95, "printed": 0.1}

    assert judged(cell(), cell(coverage=0.72, **rare)) == (True, [])
    assert judged(cell(), cell(coverage=0.68, **rare))[1] == ["3.2% of the runs print an interval that misses"]


def test_trust_C2_silence_and_width_break_the_promise():
    assert judged(cell(printed=0.8)) == (False, ["printed in 80.0% of the runs, below 90%"])
    assert judged(cell(load=0.85, printed=0.8)) == (True, [])
    assert judged(cell(width=0.6)) == (False, ["is 3.06 times as wide as an ideal interval"])


@pytest.mark.parametrize(
    ("model", "load", "count", "statistic", "least"),
    [
        ("closed loop", 0.7, 1_000, "mean", 0.9),
        ("closed loop", 0.85, 1_000, "mean", 0.0),
        ("M/G/16", 0.7, 1_000, "p50", 0.0),
        ("M/G/16", 0.7, 5_000, "p50", 0.9),
        ("M/G/1 cv 1.5", 0.5, 1_000, "p95", 0.0),
        ("M/G/1 cv 1.5", 0.5, 5_000, "p95", 0.9),
        ("independent", 0.0, 300, "p95", 0.99),
        ("independent", 0.0, 300, "p99", 0.0),
    ],
)
def test_trust_C2_names_the_cells_that_must_print(model, load, count, statistic, least):
    assert required_fraction(cell(model, load, count, statistic)) == least


def test_trust_C4_few_runs_allow_for_chance():
    few = {"runs": 100, "coverage": 0.89}

    assert judged(cell(**few)) == (True, [])
    assert not judged(cell(runs=LONG_RUNS, coverage=0.89))[0]
    assert not judged(cell(runs=100, coverage=0.7))[0]


def test_trust_C4_the_command_prints_the_table_the_conclusion_and_its_exit_code(monkeypatch, capsys):
    small = [each for each in settings() if each.count == 300 and each.load == 0.7 and each.model.name == "M/M/1"]
    monkeypatch.setattr(certificate, "settings", lambda: small)

    code = main(["selftest", "--statistics", "--runs", "10", "--json"])

    found = json.loads(capsys.readouterr().out)
    assert code == 0, found["findings"]
    assert found["conclusion"].startswith("The intervals keep their promise in 10 runs of each of 17 cells.")
    assert len(certificate_table.rows(found["cells"])) == 2
    assert found["seed"] == certificate.SEED


def test_trust_C4_a_broken_promise_is_exit_code_1(monkeypatch, capsys):
    monkeypatch.setattr(
        "loadgen.commands.selftest.certify", lambda *_, **__: Certificate([cell(coverage=0.5)], 1_000, 1)
    )

    assert main(["selftest", "--statistics"]) == 1
    assert "THE INTERVALS BREAK their promise" in capsys.readouterr().out


def test_trust_C4_the_table_of_the_page_is_that_of_the_stored_certificate():
    stored = json.loads(RESULT.read_text())

    assert stored["runs"] >= 500
    assert certificate_table.markdown(stored["cells"]) in PAGE.read_text()
    assert stored["conclusion"] in PAGE.read_text()


def test_trust_C4_the_table_of_methods_is_that_of_the_stored_result():
    text = PAGE.read_text()

    for row in json.loads(METHODS.read_text())["rows"]:
        [line] = [line for line in text.splitlines() if line.startswith(f"| {row['statistic']} | {row['method']} |")]
        assert f"{100 * row['coverage']:.0f}" in line


@pytest.mark.slow
@pytest.mark.timeout(1_800)
def test_trust_C1_every_cell_of_the_certificate():
    """With other seeds than the stored certificate, and fewer runs, so within wider bounds."""
    found = certificate.certify(40, seed=certificate.SEED + 1)

    frequent = found.frequent
    below = [each for each in frequent if each.coverage < certificate.LEAST_COVERAGE]
    assert len(below) <= 0.08 * len(frequent), found.conclusion()
    assert min(each.coverage for each in frequent) >= 0.82, found.conclusion()
    assert all(each.printed_fraction >= 0.80 for each in found.required), found.conclusion()
    assert max(each.miss_fraction for each in found.cells if each not in frequent) <= 0.09

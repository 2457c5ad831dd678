"""The sections on runs in the report of a comparison: per-request effects and setup."""

import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path

import pytest

from reports.document import Facts, Plot, Section, Table, Text
from reports.gate.compare import judge
from reports.gate.comparison import CompareOptions, Comparison
from reports.gate.decide import GateDecision
from reports.gate.pairs_needed import pairs_needed
from reports.gate.side_run import Pair, SideRun
from reports.metrics.summary import Analysis, analyse_run
from reports.pages.comparison_page import (
    build_comparison_report,
    forest_frame,
    metric_sentence,
    metrics_table,
    pairs_frame,
    verdict_line,
)
from reports.pages.comparison_runs import analysis_of, runs_sections
from reports.plots.figure import HALF
from reports.run_store import load_manifest, write_manifest
from tests.support.samples.sample_run import SampleLoad, write_sample_run

SIDES: Mapping[str, float] = {"a": 1.0, "b": 1.3}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Path]]:
    """Three runs per side with the same prompts; B is slower, lengths are capped and not forced."""
    root = tmp_path_factory.mktemp("pairs")
    found: dict[str, list[Path]] = {}
    for letter, slowdown in SIDES.items():
        for number in range(3):
            directory = root / f"pair{number + 1:02d}-{letter}"
            write_sample_run(directory, SampleLoad(duration_s=20, seed=number, slowdown=slowdown))
            manifest = load_manifest(directory)
            write_manifest(directory, dataclasses.replace(manifest, length_control="capped"))
            found.setdefault(letter, []).append(directory)
    return found


@pytest.fixture(scope="module")
def sections(runs: dict[str, list[Path]]) -> dict[str, Section]:
    return {each.title: each for each in runs_sections(runs["a"], runs["b"], "main", "change")}


def test_metrics_12_table_has_same_prompts_equal_lengths_and_the_unadjusted_change(
    sections: dict[str, Section],
) -> None:
    effect, _ = sections["Per-request comparison"].blocks
    assert isinstance(effect, Table)
    row = effect.frame.set_index("metric").loc["E2E p50"]

    assert row["prompts"] > 100
    assert row["same prompts"].value == pytest.approx(30, abs=3)
    assert row["mean at equal lengths"].value == pytest.approx(30, abs=3)
    assert row["change"].lo < 30 < row["change"].hi


def test_metrics_9_finish_reasons_of_both_sides_are_listed(sections: dict[str, Section]) -> None:
    _, table = sections["Per-request comparison"].blocks

    assert isinstance(table, Table)
    assert list(table.frame.columns) == ["finish reason", "main", "change"]
    assert set(table.frame["finish reason"]) == {"length", "eos_token"}
    assert table.frame["main"].sum() > 300


def test_setup_lists_both_servers_the_load_and_the_sizes(sections: dict[str, Section]) -> None:
    facts, sizes = sections["Setup"].blocks

    assert isinstance(facts, Facts)
    assert [title for title, _ in facts.groups] == ["A · main", "B · change", "Load", "Machine"]
    assert isinstance(sizes, Text)
    assert sizes.text.startswith("A: 3 runs with ")


def test_fewer_than_three_runs_per_side_have_only_the_setup_and_the_runs(runs: dict[str, list[Path]]) -> None:
    few = runs_sections(runs["a"][:2], runs["b"][:2], "main", "change")

    assert [each.title for each in few] == ["Setup", "Runs"]
    assert runs_sections(runs["a"], [], "main", "change") == ()


def noisy(pairs: int, noise: float = 0.06, change: float = 0.02) -> Comparison:
    """Pairs whose logarithmic changes of TPOT alternate around `change`."""
    made = []
    for number in range(pairs):
        ratio = math.exp(change + (noise if number % 2 else -noise))
        made.append(Pair(side(20.0), side(20.0 * ratio)))
    return judge(made, CompareOptions(gated=("tpot_p50_ms",), shown=()))


def side(tpot_ms: float) -> SideRun:
    return SideRun("x", {"tpot_p50_ms": tpot_ms})


def test_an_inconclusive_verdict_states_the_pairs_that_find_a_clear_regression() -> None:
    few = noisy(6)
    needed = pairs_needed(few)

    assert few.verdict is GateDecision.INCONCLUSIVE
    assert needed is not None
    assert f"With about {needed} pairs, 80 % of comparisons find a regression of 4.5 %." in verdict_line(few).sentence
    [metric] = noisy(needed).gated
    assert metric.smallest_effect == pytest.approx(4.5, rel=0.1)


def test_the_page_opens_with_the_difference_of_the_sides_and_a_forest_plot(runs: dict[str, list[Path]]) -> None:
    a, b = runs["a"][:1], runs["b"][:1]
    [directory] = b
    manifest = load_manifest(directory)
    changed = manifest.target | {"launch_argv": ["serve", "--fast"]}
    write_manifest(directory, dataclasses.replace(manifest, target=changed))

    report = build_comparison_report(noisy(6), of_runs=runs_sections(a, b, "main", "change"))
    write_manifest(directory, manifest)

    first, metrics, *_ = report.sections
    [table] = first.blocks
    assert isinstance(table, Table)
    assert table.frame.set_index("").loc["launched with", "B"] == "serve --fast"
    assert [type(block) for block in metrics.blocks][:2] == [Plot, Table]
    [axes] = report.plots[0].draw(HALF).axes
    assert axes.get_xlabel() == "change of B against A, %"


def test_pages_1_the_page_has_the_titles_of_metrics_and_two_digits_of_an_interval_everywhere() -> None:
    made = noisy(6)
    [metric] = made.gated
    [row] = metrics_table(made).to_dict("records")

    assert row["metric"] == "TPOT p50, ms ↓"
    assert forest_frame(made)["name"].tolist() == ["TPOT p50 ↓"]
    assert pairs_frame(made)["metric"].unique().tolist() == ["TPOT p50"]
    assert metric_sentence(metric).startswith(
        f"TPOT p50: {row['change of B'].text} % ({row['change of B'].interval}), "
    )
    assert "in TPOT p50." in verdict_line(made).sentence


def test_a_change_has_the_decimals_of_its_bounds_and_both_changes_have_their_unit_beside_them() -> None:
    [row] = metrics_table(noisy(6, noise=0.06, change=0.078)).to_dict("records")

    assert str(row["change of B"]) == "+8 (0 to +17)"
    names = list(row)
    assert names[names.index("change of B") :][:3] == ["change of B", "found in 80 %", "unit of both"]


def test_pages_1_a_fraction_is_shown_in_percent_without_another_unit() -> None:
    pairs = [Pair(*(SideRun("x", {"error_rate": share}) for share in (0.0, 0.02)))] * 4
    [row] = metrics_table(judge(pairs, CompareOptions(gated=("error_rate",), shown=()))).to_dict("records")

    assert (row["metric"], row["B"], row["unit of both"]) == ("Failed, % ↓", 2.0, "points")


def test_forest_frame_has_the_bounds_of_each_gated_ratio() -> None:
    frame = forest_frame(noisy(6))
    [metric] = noisy(6).gated

    assert frame.loc[0, ["value", "lo", "hi"]].tolist() == [metric.change.value, metric.change.lo, metric.change.hi]
    assert not frame.loc[0, "decided"]


def test_the_setup_of_slices_is_the_same_with_their_stored_summaries(tmp_path: Path) -> None:
    directories = [tmp_path / name for name in ("a", "b")]
    for directory in directories:
        write_sample_run(directory, SampleLoad(duration_s=10))
        analyse_run(directory)

    of_runs, summarized = (
        runs_sections(directories[:1], directories[1:], "A", "B", is_sliced=True, analyse=analyse)
        for analyse in (analysis_of, Analysis.summarized)
    )

    assert [section.title for section in summarized] == [section.title for section in of_runs]
    assert repr(summarized) == repr(of_runs)

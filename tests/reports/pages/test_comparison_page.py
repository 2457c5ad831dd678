"""The sections on runs in the report of a comparison: per-request effects and setup."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path

import pytest

from reports.document import Facts, Section, Table, Text
from reports.pages.comparison_page import runs_sections
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


def test_fewer_than_three_runs_per_side_have_only_the_setup(runs: dict[str, list[Path]]) -> None:
    few = runs_sections(runs["a"][:2], runs["b"][:2], "main", "change")

    assert [each.title for each in few] == ["Setup"]
    assert runs_sections(runs["a"], [], "main", "change") == ()

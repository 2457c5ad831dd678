"""The page of a sweep over two settings."""

import pytest

from reports.document import Section, Table
from reports.metrics.sweep import Sweep
from reports.pages.matrix_page import MatrixResult, build_matrix_report
from tests.support.samples.sample_pages import sample_sweep


def table_titles(section: Section) -> list[str]:
    return [block.title for block in section.blocks if isinstance(block, Table)]


@pytest.fixture(scope="module")
def facets() -> tuple[tuple[str, Sweep], ...]:
    return ("128", sample_sweep(rates=(2.0, 8.0))), ("1024", sample_sweep(1.4, (2.0, 8.0)))


@pytest.mark.parametrize(
    ("setting", "is_of_server", "is_judged"), [("server.speculate", True, True), ("input_tokens", False, False)]
)
def test_only_values_of_a_server_are_judged(
    facets: tuple[tuple[str, Sweep], ...], setting: str, is_of_server: bool, is_judged: bool
):
    """More tokens/s at shorter prompts do not make them better."""
    result = MatrixResult(setting, facets, is_of_server=is_of_server)

    report = build_matrix_report(result)

    assert ("Best value at each load" in table_titles(report.sections[0])) is is_judged


def test_the_title_is_the_label_of_all_runs_or_the_two_settings(
    facets: tuple[tuple[str, Sweep], ...], monkeypatch: pytest.MonkeyPatch
):
    (_, sweep), _ = facets
    result = MatrixResult("input_tokens", (("128", sweep),))
    manifest = sweep.points[0].first.run.manifest

    monkeypatch.setattr(manifest, "label", f"{sweep.quantity} {sweep.points[0].load:g}")
    assert build_matrix_report(result).title == f"Sweep over {sweep.quantity} and input_tokens"
    monkeypatch.setattr(manifest, "label", "May")
    assert build_matrix_report(result).title == "May"

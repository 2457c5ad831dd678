"""The tiles of a run agree with the tables below them."""

import pytest

from reports.document import Estimate
from reports.pages.sections.objectives import ObjectiveResult
from reports.pages.sections.run_summary import objectives_tile

MET, MISSED = (True, True), (False, True)
UNDECIDED, LIKELY_MISSED = (True, False), (False, False)


def results(*judged: tuple[bool, bool]) -> list[ObjectiveResult]:
    return [ObjectiveResult("TTFT p95 ≤ 400 ms", "350", Estimate(99.0), *each) for each in judged]


@pytest.mark.parametrize(
    ("judged", "value", "unit", "is_bad"),
    [
        ((MET, MET), "all met", "", False),
        ((UNDECIDED, UNDECIDED), "2 undecided", "of 2", False),
        ((MET, LIKELY_MISSED), "1 undecided", "of 2", False),
        ((MISSED, UNDECIDED), "1 missed, 1 undecided", "of 2", True),
        ((UNDECIDED,), "undecided", "", False),
        ((MISSED,), "missed", "", True),
    ],
)
def test_the_tile_of_objectives_has_the_decisions_of_its_lines(
    judged: tuple[tuple[bool, bool], ...], value: str, unit: str, is_bad: bool
) -> None:
    tile = objectives_tile(results(*judged))

    assert (tile.value, tile.unit, tile.is_bad) == (value, unit, is_bad)
    assert len(tile.details) == len(judged)

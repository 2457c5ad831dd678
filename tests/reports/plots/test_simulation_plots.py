"""The map of predictions over two settings: exact settings at its ticks and over its cells."""

import pandas as pd
import pytest

from reports.document import Size
from reports.plots.figure import NARROW, WIDE
from reports.plots.hovers import CellHovers
from reports.plots.simulation_plots import heat_map
from reports.study import Knob

BUDGET, ROWS = Knob("max_batch_prefill_tokens", scale="log"), Knob("max_batch_size", scale="log")
ODD_BUDGETS = (1000, 1024, 1500, 2048, 3000, 4096, 8191, 8192)


@pytest.mark.parametrize("size", [WIDE, NARROW])
@pytest.mark.parametrize(
    ("budgets", "labels"),
    [((2048, 4096, 8192), ["2048", "4096", "8192"]), (ODD_BUDGETS, ["1024", "2048", "4096", "8192"])],
)
def test_pages_1_a_map_labels_settings_exactly(budgets: tuple[int, ...], labels: list[str], size: Size) -> None:
    pairs = [(budget, rows) for budget in budgets for rows in (8, 16, 1040)]
    frame = pd.DataFrame(pairs, columns=["x", "y"], dtype=float).assign(value=1.0, excess=0.5)

    axes, _ = heat_map(frame, BUDGET, ROWS, "speed", size).axes

    assert [label.get_text() for label in axes.get_xticklabels()] == labels
    assert [label.get_text() for label in axes.get_yticklabels()] == ["8", "16", "1040"]
    assert axes.get_xlim() == pytest.approx((budgets[0], 8192))
    [hovers] = [each for each in axes.artists if isinstance(each, CellHovers)]
    assert hovers.cells[-1][-1].startswith("max_batch_prefill_tokens ")
    assert "–8192, max_batch_size " in hovers.cells[-1][-1]
    assert "–1040: speed" in hovers.cells[-1][-1]

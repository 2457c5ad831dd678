"""The base of every figure: names of series at both widths."""

import pytest
from matplotlib.text import Annotation

from reports.document import Size
from reports.plots.figure import HALF, NARROW, label_axis, new_figure
from reports.plots.series_names import name_series


@pytest.mark.parametrize("size", [HALF, NARROW])
def test_the_names_of_three_latencies_are_whole_and_not_over_the_axis_title(size: Size) -> None:
    figure, [axes] = new_figure(size)
    names = ["TTFT p95", "TPOT p50", "E2E p95"]

    name_series(axes, names, size)
    label_axis(axes, "ms (log scale)  ↓ better")

    figure.canvas.draw()
    found = [text for text in axes.texts if isinstance(text, Annotation)]
    title = axes.get_title(loc="left")
    [drawn] = [text for text in axes.get_children() if getattr(text, "get_text", str)() == title]
    assert sorted(text.get_text() for text in found) == sorted(names)
    assert not any(text.get_window_extent().overlaps(drawn.get_window_extent()) for text in found)
    assert all(text.get_window_extent().y1 <= size.height for text in found)

"""Boxes of a latency, one for each run: the middle half of its requests, the median, and p5 to p95."""

import pandas as pd
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from reports.document import Size, format_number
from reports.plots.figure import MARGIN_NAMES, MARGIN_RIGHT, label_axis, new_figure, series_colour, styled
from reports.plots.hovers import add_hovers
from reports.plots.latency_plots import value_axis
from reports.plots.series_names import name_rows

PERCENTILES = (5, 25, 50, 75, 95)


def boxes(frame: pd.DataFrame, quantity: str, size: Size) -> Figure:
    """A box for each run from p25 to p75, with a line at the median and whiskers from p5 to p95.

    frame: run, count, and p5 to p95 in ms, in the order of the rows, top first.
    """
    with styled():
        left = MARGIN_RIGHT if size.is_narrow else MARGIN_NAMES
        figure, [axes] = new_figure(size, gridspec_kw={"left": left / size.width})
        columns = [f"p{each}" for each in PERCENTILES]
        last = len(frame) - 1
        for index, values in enumerate(frame[columns].to_numpy(dtype=float).tolist()):
            p5, p25, p50, p75, p95 = values
            row, colour = last - index, series_colour(index)
            axes.plot([p5, p95], [row, row], color=colour, linewidth=1.2)
            axes.add_patch(Rectangle((p25, row - 0.18), p75 - p25, 0.36, color=colour, alpha=0.3, linewidth=0))
            axes.plot([p50, p50], [row - 0.18, row + 0.18], color=colour, linewidth=2.4)
        texts = [
            f"{run}, {count:,} requests: "
            + ", ".join(f"{name} {format_number(value)} ms" for name, value in each.items())
            for run, count, each in zip(frame["run"], frame["count"], frame[columns].to_dict("records"), strict=True)
        ]
        add_hovers(axes, frame["p50"], [last - index for index in range(len(frame))], texts)
        name_rows(axes, [str(run)[:24] for run in frame["run"]][::-1], size)
        scale = value_axis(axes, pd.concat([frame["p5"], frame["p95"]]))
        axes.grid(visible=False, axis="y")
        axes.grid(visible=True, axis="x")
        axes.set_xlabel(f"{quantity}, ms{scale}   ← better")
        label_axis(axes, "box: p25 to p75, line: median, whiskers: p5 to p95")
        return figure

"""Figures of a benchmark of steps: latency and throughput by batch size."""

import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from reports.document import Size, format_number
from reports.plots.figure import axis_from_zero, label_axis, new_figure, series_colour, styled
from reports.plots.hovers import add_hovers
from reports.plots.series_names import name_series


def by_batch_size(frame: pd.DataFrame, axis_title: str, unit: str, size: Size) -> Figure:
    """A line per step over the batch size, with the 95 % interval of each average.

    frame: step, batch_size, average, half_interval. unit: of a value, in the text of its dot.
    """
    with styled():
        figure, [axes] = new_figure(size)
        names = list(dict.fromkeys(frame["step"]))
        for index, name in enumerate(names):
            rows = frame[frame["step"] == name]
            axes.errorbar(
                rows["batch_size"],
                rows["average"],
                yerr=rows["half_interval"].astype(float),
                fmt="o-",
                color=series_colour(index),
                markersize=4,
                linewidth=1.2,
            )
            texts = [
                f"{name}, batch size {number}: {format_number(float(value))} {unit}"
                for number, value in zip(rows["batch_size"], rows["average"], strict=True)
            ]
            add_hovers(axes, rows["batch_size"], rows["average"], texts)
        sizes = sorted(frame["batch_size"].unique())
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_locator(FixedLocator(sizes))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axis_from_zero(axes, float(frame["average"].max()), headroom=0.05)
        axes.set_xlabel("batch size (log scale)")
        name_series(axes, names, size)
        label_axis(axes, axis_title)
        return figure

"""Figures of a study's predictions and measurements; each takes a frame and returns a `Figure`."""

import math

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullLocator

from reports.document import Size
from reports.plots.figure import PALETTE, label_axis, new_figure, styled, tick_number
from reports.plots.hovers import add_hovers
from reports.plots.series_names import name_series
from reports.plots.study.setting_axis import Array, places_of, setting_axis
from reports.study import Knob


def predicted(frame: pd.DataFrame, metric: str, size: Size) -> Figure:
    """Measured against predicted, with the line of equality and bands of ±5 and ±15 % around it.

    frame: predicted, measured (both above 0, in the same unit), how (the kind of prediction), text.
    """
    with styled():
        figure, [axes] = new_figure(size)
        both = np.concatenate([frame["predicted"], frame["measured"]]).astype(float)
        ends = np.array([both.min() / 1.25, both.max() * 1.25])
        for fraction, alpha in ((0.15, 0.10), (0.05, 0.16)):
            band = (ends * (1 - fraction), ends * (1 + fraction))
            axes.fill_between(ends, *band, color=PALETTE["series-0"], alpha=alpha, linewidth=0)
        axes.plot(ends, ends, color=PALETTE["muted"], linewidth=0.9)
        colours = [PALETTE["series-0"], PALETTE["series-4"]]
        names = list(dict.fromkeys(frame["how"]))
        for name, colour, marker in zip(names, colours, "oD", strict=False):
            rows = frame[frame["how"] == name]
            axes.plot(rows["predicted"], rows["measured"], marker, color=colour, markersize=6, markeredgewidth=0)
        add_hovers(axes, frame["predicted"], frame["measured"], frame["text"])
        for axis, which in ((axes.xaxis, "x"), (axes.yaxis, "y")):
            (axes.set_xscale if which == "x" else axes.set_yscale)("log")
            (axes.set_xlim if which == "x" else axes.set_ylim)(*ends)
            axis.set_minor_locator(NullLocator())
            ticks = [tick for tick in _round_numbers(*ends) if ends[0] <= tick <= ends[1]]
            axis.set_ticks(ticks, [tick_number(float(tick)) for tick in ticks])
        axes.set_xlabel(f"predicted {metric}")
        label_axis(axes, "measured")
        if len(names) > 1:
            name_series(axes, names, size, colours)
        return figure


def _round_numbers(low: float, high: float) -> Array:
    """Ticks of a logarithmic axis: three per decade, or two if the axis spans more than two decades."""
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    steps = (1.0, 2.0, 5.0) if last - first <= 2 else (1.0, 3.0)
    return np.array([step * 10.0**power for power in range(first, last + 1) for step in steps])


def residuals(frame: pd.DataFrame, knob: Knob, quantity: str, size: Size) -> Figure:
    """The error of predictions against one setting. frame: setting, error (in %), text."""
    with styled():
        figure, [axes] = new_figure(size)
        setting_axis(axes, "x", knob, frame["setting"], size)
        axes.axhspan(-15, 15, color=PALETTE["shade"], linewidth=0, zorder=0)
        axes.axhline(0, color=PALETTE["muted"], linewidth=0.9)
        axes.plot(places_of(knob, frame["setting"]), frame["error"], "o", color=PALETTE["series-0"], markersize=6)
        add_hovers(axes, places_of(knob, frame["setting"]), frame["error"], frame["text"])
        axes.margins(y=0.15)
        axes.set_xlabel(knob.name)
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:+g} %" if value else "0"))
        axes.yaxis.set_major_locator(MaxNLocator(5))
        label_axis(axes, quantity)
        return figure

"""Figures of the course of a study: trials, their phases, drift. Each takes a frame and returns a `Figure`."""

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import FuncFormatter, MaxNLocator

from reports.document import Size
from reports.plots.figure import PALETTE, label_axis, new_figure, styled, tick_number
from reports.plots.hovers import add_hovers
from reports.plots.series_names import name_series
from reports.plots.study.outcome_marks import draw_outcomes, name_outcomes

PHASE_COLOURS = {"launch": PALETTE["series-4"], "warm": PALETTE["series-5"], "measure": PALETTE["series-0"]}


def history(frame: pd.DataFrame, quantity: str, noise: float | None, size: Size) -> Figure:
    """The objective of every trial in order, and the best so far in a band of ± `noise`.

    frame: trial, value, outcome, best, text; a trial without a value has a mark at the bottom.
    noise: the relative noise of one launch.
    """
    with styled():
        figure, [axes] = new_figure(size)
        known = frame[frame["best"].notna()]
        if noise:
            best = known["best"]
            band = (best * (1 - noise), best * (1 + noise))
            axes.fill_between(known["trial"], *band, step="post", color=PALETTE["series-0"], alpha=0.15, linewidth=0)
        axes.step(known["trial"], known["best"], where="post", color=PALETTE["series-0"])
        valued = frame[frame["value"].notna()]
        low, high = float(valued["value"].min()), float(valued["value"].max())
        pad = 0.12 * (high - low) or 0.1 * abs(high) or 1.0
        axes.set_ylim(low - 2 * pad, high + pad)
        draw_outcomes(axes, frame.assign(value=frame["value"].fillna(low - 1.3 * pad)), "trial", "value")
        name_outcomes(axes, frame, size)
        axes.set_xlabel("trial")
        axes.xaxis.set_major_locator(MaxNLocator(5 if size.is_narrow else 10, integer=True))
        axes.yaxis.set_major_formatter(FuncFormatter(tick_number))
        label_axis(axes, quantity)
        return figure


def pareto(frame: pd.DataFrame, x_title: str, y_title: str, size: Size) -> Figure:
    """Two metrics of every measured trial, and the Pareto front.

    frame: x (higher is better), y (lower is better), outcome, on_front, is_winner, is_baseline, text.
    """
    with styled():
        figure, [axes] = new_figure(size)
        front = frame[frame["on_front"]].sort_values("x")
        axes.plot(front["x"], front["y"], color=PALETTE["series-0"], linewidth=1.2)
        draw_outcomes(axes, frame, "x", "y")
        is_baseline, is_winner = frame["is_baseline"], frame["is_winner"]
        named = (
            (is_baseline & is_winner, "baseline, winner"),
            (is_baseline & ~is_winner, "baseline"),
            (is_winner & ~is_baseline, "winner"),
        )
        for chosen, name in named:
            for x, y in frame.loc[chosen, ["x", "y"]].to_numpy(dtype=np.float64):
                is_right = x > (float(frame["x"].min()) + float(frame["x"].max())) / 2
                axes.annotate(
                    name,
                    (x, y),
                    xytext=(-7 if is_right else 7, 6),
                    textcoords="offset points",
                    ha="right" if is_right else "left",
                    color=PALETTE["ink"],
                    fontweight="bold",
                )
        axes.margins(0.14)
        axes.set_xlabel(x_title)
        axes.xaxis.set_major_formatter(FuncFormatter(tick_number))
        axes.yaxis.set_major_formatter(FuncFormatter(tick_number))
        axes.xaxis.set_major_locator(MaxNLocator(4 if size.is_narrow else 6))
        label_axis(axes, y_title)
        name_outcomes(axes, frame, size)
        return figure


def phases(frame: pd.DataFrame, size: Size) -> Figure:
    """The phases of each launch over time. frame: row, start_s, seconds, phase, text, in the order of start."""
    with styled():
        figure, [axes] = new_figure(size)
        minutes = frame.assign(start=frame["start_s"] / 60, length=frame["seconds"] / 60)
        for phase, rows in minutes.groupby("phase", sort=False):
            colour = PHASE_COLOURS.get(str(phase), PALETTE["series-3"])
            for start, length, row in zip(rows["start"], rows["length"], rows["row"], strict=True):
                axes.add_patch(Rectangle((start, row - 0.36), length, 0.72, color=colour, linewidth=0))
            add_hovers(axes, rows["start"] + rows["length"] / 2, rows["row"], rows["text"])
        axes.set_xlim(0, float((minutes["start"] + minutes["length"]).max()) * 1.02)
        axes.set_ylim(float(frame["row"].max()) + 0.8, -0.8)
        axes.yaxis.set_major_locator(MaxNLocator(6, integer=True))
        axes.grid(visible=False, axis="y")
        names = [str(name) for name in dict.fromkeys(frame["phase"])]
        name_series(axes, names, size, [PHASE_COLOURS.get(name, PALETTE["series-3"]) for name in names])
        axes.set_xlabel("minutes since the study's start")
        label_axis(axes, "launch")
        return figure


def drift_checks(frame: pd.DataFrame, quantity: str, noise: float | None, size: Size) -> Figure:
    """Launches of the baseline over time, and their mean in a band of ± `noise`. frame: minutes, value, text.

    noise: the relative noise of one launch.
    """
    with styled():
        figure, [axes] = new_figure(size)
        middle = float(frame["value"].mean())
        if noise:
            axes.axhspan(middle * (1 - noise), middle * (1 + noise), color=PALETTE["shade"], linewidth=0, zorder=0)
        axes.axhline(middle, color=PALETTE["muted"], linewidth=0.9)
        axes.plot(frame["minutes"], frame["value"], "o-", color=PALETTE["series-0"], markersize=5)
        add_hovers(axes, frame["minutes"], frame["value"], frame["text"])
        axes.margins(y=0.4)
        axes.set_xlabel("minutes since the study's start")
        axes.yaxis.set_major_formatter(FuncFormatter(tick_number))
        axes.yaxis.set_major_locator(MaxNLocator(5))
        label_axis(axes, quantity)
        return figure

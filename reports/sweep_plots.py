"""Figures of several load points; each takes a frame and returns a `Figure`."""

from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from reports.plots import PALETTE, Size, label_axis, new_figure, series_colour, styled, tick_number


def throughput_latency(frame: pd.DataFrame, quantity: str, size: Size) -> Figure:
    """Latency against throughput, one dot a load, joined in the order of loads.

    frame: load, output_tokens_per_s, value_ms, is_knee, is_valid. A point that was no valid measurement is hollow.
    """
    with styled():
        figure, [axes] = new_figure(size)
        axes.plot(frame["output_tokens_per_s"], frame["value_ms"], color=series_colour(0), linewidth=1.2)
        for is_valid, fill in ((True, series_colour(0)), (False, "white")):
            rows = frame[frame["is_valid"] == is_valid]
            axes.plot(
                rows["output_tokens_per_s"],
                rows["value_ms"],
                "o",
                color=series_colour(0),
                markerfacecolor=fill,
                markersize=5,
            )
        for row in frame.itertuples():
            _name_point(axes, row)
        _axes(axes, "output tokens/s  → better", size)
        axes.set_ylim(bottom=0, top=1.12 * float(frame["value_ms"].max()))
        axes.margins(x=0.08)
        label_axis(axes, f"{quantity}, ms  ↓ better")
        return figure


def against_load(frame: pd.DataFrame, load: str, size: Size) -> Figure:
    """Throughput against load. frame: load, output_tokens_per_s, lo, hi, is_knee."""
    with styled():
        figure, [axes] = new_figure(size)
        axes.fill_between(frame["load"], frame["lo"], frame["hi"], color=series_colour(0), alpha=0.15, linewidth=0)
        axes.plot(frame["load"], frame["output_tokens_per_s"], "o-", color=series_colour(0), markersize=4)
        for load_value, speed in frame.loc[frame["is_knee"], ["load", "output_tokens_per_s"]].to_numpy():
            axes.annotate(
                "knee",
                (load_value, speed),
                xytext=(0, 9),
                textcoords="offset points",
                ha="center",
                color=PALETTE["ink"],
                fontweight="bold",
            )
        _axes(axes, load, size)
        axes.set_xlim(left=0)
        axes.set_ylim(bottom=0, top=1.12 * float(frame["output_tokens_per_s"].max()))
        label_axis(axes, "output tokens/s  ↑ better")
        return figure


def _name_point(axes: Axes, row: Any) -> None:
    text = f"{row.load:g}" + ("  knee" if row.is_knee else "")
    axes.annotate(
        text,
        (float(row.output_tokens_per_s), float(row.value_ms)),
        xytext=(6, 4),
        textcoords="offset points",
        color=PALETTE["ink"] if row.is_knee else PALETTE["muted"],
        fontweight="bold" if row.is_knee else "normal",
    )


def _axes(axes: Axes, label: str, size: Size) -> None:
    axes.set_xlabel(label)
    axes.xaxis.set_major_formatter(FuncFormatter(tick_number))
    axes.xaxis.set_major_locator(MaxNLocator(4 if size.is_narrow else 7))

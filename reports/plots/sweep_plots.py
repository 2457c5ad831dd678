"""Figures of a sweep; each takes a frame and returns a `Figure`."""

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

from reports.document import Size, format_number
from reports.plots.figure import PALETTE, axis_from_zero, label_axis, new_figure, series_colour, styled, tick_number
from reports.plots.hovers import add_hovers
from reports.plots.series_names import name_series
from reports.stats.estimators import Interval

MAX_LINEAR_RATIO = 12.0
"""The axis is logarithmic if latencies differ by more than this factor: queues grow without bound beyond the knee."""


def throughput_latency(frame: pd.DataFrame, quantity: str, objective_ms: float | None, size: Size) -> Figure:
    """Latency against throughput: a dot per load, joined in the order of loads, and the objective as a line.

    frame: load, output_tokens_per_s, lo, hi, value_ms, lo_ms, hi_ms, is_knee, is_valid, text. Bars are 95 % intervals.
    Invalid points are hollow.
    """
    with styled():
        figure, [axes] = new_figure(size)
        axes.plot(frame["output_tokens_per_s"], frame["value_ms"], color=series_colour(0), linewidth=1.2)
        bars: dict[str, Any] = {"color": series_colour(0), "linewidth": 0.9, "alpha": 0.7}
        axes.hlines(frame["value_ms"], frame["lo"], frame["hi"], **bars)
        axes.vlines(frame["output_tokens_per_s"], frame["lo_ms"], frame["hi_ms"], **bars)
        add_hovers(axes, frame["output_tokens_per_s"], frame["value_ms"], frame["text"])
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
            _name_point(axes, row, float(frame["output_tokens_per_s"].max()))
        _axes(axes, "output tokens/s  → better", size)
        values = frame["value_ms"]
        low, top = float(values.min()), float(frame[["value_ms", "hi_ms"]].max().max())
        if objective_ms is not None and objective_ms <= 3 * top:
            _objective(axes, objective_ms, is_low=objective_ms < 1.3 * float(values.iloc[0]))
            low, top = min(low, objective_ms), max(top, objective_ms)
        scale = _latency_axis(axes, low, top)
        axes.margins(x=0.08)
        label_axis(axes, f"{quantity}, ms{scale}  ↓ better")
        return figure


def _latency_axis(axes: Axes, low: float, top: float) -> str:
    """Set up the y axis: linear from zero, or logarithmic for a wide range. Returns the suffix of the axis title."""
    if low <= 0 or top <= MAX_LINEAR_RATIO * low:
        axis_from_zero(axes, 1.05 * top)
        return ""
    axes.set_yscale("log")
    axes.set_ylim(low / 1.5, top * 1.6)
    axes.yaxis.set_major_locator(LogLocator(10, subs=(1.0,) if top > 200 * low else (1.0, 3.0)))
    axes.yaxis.set_major_formatter(FuncFormatter(tick_number))
    axes.yaxis.set_minor_locator(NullLocator())
    return " (log scale)"


def _objective(axes: Axes, value_ms: float, *, is_low: bool) -> None:
    """Draw a dashed line. Its label is away from the curve: at the left, or at the right for a low objective."""
    axes.axhline(value_ms, color=PALETTE["bad"], linewidth=0.9, linestyle=(0, (4, 3)))
    axes.annotate(
        f"objective {format_number(value_ms)} ms",
        (1.0 if is_low else 0.0, value_ms),
        xycoords=axes.get_yaxis_transform(),
        xytext=(0 if is_low else 3, 4),
        textcoords="offset points",
        ha="right" if is_low else "left",
        color=PALETTE["bad"],
    )


def against_load(frame: pd.DataFrame, load: str, size: Size) -> Figure:
    """Throughput against load. frame: load, output_tokens_per_s, lo, hi, is_knee, is_highest_within."""
    with styled():
        figure, [axes] = new_figure(size)
        axes.fill_between(frame["load"], frame["lo"], frame["hi"], color=series_colour(0), alpha=0.15, linewidth=0)
        axes.plot(frame["load"], frame["output_tokens_per_s"], "o-", color=series_colour(0), markersize=4)
        add_hovers(axes, frame["load"], frame["output_tokens_per_s"], frame["text"])
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
        axis_from_zero(axes, 1.05 * float(frame[["output_tokens_per_s", "hi"]].max().max()))
        _load_axis(axes, frame["load"], load, size)
        for load_value in frame.loc[frame["is_highest_within"], "load"]:
            axes.axvline(load_value, color=PALETTE["muted"], linewidth=0.8, linestyle=(0, (4, 3)))
            is_right = axes.transAxes.inverted().transform(axes.transData.transform((load_value, 0)))[0] > 0.45
            axes.annotate(
                "highest within objectives",
                (load_value, 0),
                xytext=(-5 if is_right else 5, 6),
                textcoords="offset points",
                ha="right" if is_right else "left",
                color=PALETTE["muted"],
            )
        label_axis(axes, "output tokens/s  ↑ better")
        return figure


def attainment(
    points: pd.DataFrame, curve: pd.DataFrame, target: float, capacity: Interval | None, load: str, size: Size
) -> Figure:
    """Objectives met (%) against load, with the fitted curve and the interval of the capacity.

    points: load, value, lo, hi, is_overloaded. curve: load, value, lo, hi, or empty.
    """
    with styled():
        figure, [axes] = new_figure(size)
        if capacity is not None and math.isfinite(capacity.hi - capacity.lo):
            axes.axvspan(capacity.lo, capacity.hi, color=PALETTE["shade"], linewidth=0)
            axes.axvline(capacity.value, color=PALETTE["muted"], linewidth=0.8)
        if len(curve):
            axes.fill_between(curve["load"], curve["lo"], curve["hi"], color=series_colour(0), alpha=0.15, linewidth=0)
            axes.plot(curve["load"], curve["value"], color=series_colour(0), linewidth=1.2)
        axes.axhline(target, color=PALETTE["bad"], linewidth=0.9, linestyle=(0, (4, 3)))
        axes.vlines(points["load"], points["lo"], points["hi"], color=series_colour(0), linewidth=1.0)
        for is_overloaded, fill in ((False, series_colour(0)), (True, "white")):
            rows = points[points["is_overloaded"] == is_overloaded]
            axes.plot(rows["load"], rows["value"], "o", color=series_colour(0), markerfacecolor=fill, markersize=5)
        texts = [
            f"{at:g} {load}: {value:.1f} % ({lo:.1f}–{hi:.1f})" if lo == lo else f"{at:g} {load}: {value:.1f} %"
            for at, value, lo, hi in points[["load", "value", "lo", "hi"]].to_numpy(dtype=float).tolist()
        ]
        add_hovers(axes, points["load"], points["value"], texts)
        axes.yaxis.set_major_formatter(FuncFormatter(tick_number))
        _load_axis(axes, points["load"], load, size)
        counted = points.loc[~points["is_overloaded"], ["value", "lo"]].min(axis=1)
        least = min([target, *counted.dropna()])
        axes.set_ylim(bottom=max(0.0, least - 0.2 * (100 - least) - 1), top=100.0 + 0.04 * (100 - least) + 0.1)
        label_axis(axes, "requests within the objectives, %  ↑ better")
        return figure


def latencies_by_load(frame: pd.DataFrame, names: Sequence[str], load: str, size: Size) -> Figure:
    """Latencies in ms against load on a logarithmic axis. frame: load, and a column per name."""
    with styled():
        figure, [axes] = new_figure(size)
        for index, name in enumerate(names):
            axes.plot(frame["load"], frame[name], "o-", color=series_colour(index), markersize=4)
            texts = [
                f"{row:g} {load}: {name} {format_number(value)} ms"
                for row, value in zip(frame["load"], frame[name], strict=True)
            ]
            add_hovers(axes, frame["load"], frame[name], texts)
        values = frame[list(names)].to_numpy(dtype=float)
        low, top = float(np.nanmin(values)), float(np.nanmax(values))
        axes.set_yscale("log")
        axes.set_ylim(low / 1.5, top * 1.6)
        axes.yaxis.set_major_locator(LogLocator(10, subs=(1.0,) if top > 200 * low else (1.0, 3.0)))
        axes.yaxis.set_major_formatter(FuncFormatter(tick_number))
        axes.yaxis.set_minor_locator(NullLocator())
        _load_axis(axes, frame["load"], load, size)
        name_series(axes, list(names), size)
        label_axis(axes, "ms (log scale)  ↓ better")
        return figure


def speed_per_user(frame: pd.DataFrame, size: Size) -> Figure:
    """Tokens/s of one request against output tokens/s in total. frame: load, output_tokens_per_s, per_user, text."""
    with styled():
        figure, [axes] = new_figure(size)
        axes.plot(
            frame["output_tokens_per_s"], frame["per_user"], "o-", color=series_colour(0), markersize=5, linewidth=1.2
        )
        # Dots beyond the knee are close to each other, so their labels alternate above and below the line.
        points = frame[["load", "output_tokens_per_s", "per_user"]].to_numpy(dtype=float).tolist()
        for index, (load, total, per_user) in enumerate(points):
            place = (0, -14 if index % 2 else 6)
            axes.annotate(
                f"{load:g}",
                (total, per_user),
                xytext=place,
                textcoords="offset points",
                ha="center",
                color=PALETTE["muted"],
            )
        add_hovers(axes, frame["output_tokens_per_s"], frame["per_user"], frame["text"])
        _axes(axes, "output tokens/s  → better", size)
        axis_from_zero(axes, 1.1 * float(frame["per_user"].max()))
        axes.margins(x=0.08)
        label_axis(axes, "tokens/s of one request  ↑ better")
        return figure


def _load_axis(axes: Axes, loads: "pd.Series[float]", label: str, size: Size) -> None:
    """Set up the x axis over all loads, with ticks at the loads; logarithmic (base 2) for geometric loads."""
    places = sorted({float(load) for load in loads})
    is_geometric = len(places) > 2 and places[0] > 0 and all(b >= 1.5 * a for a, b in pairwise(places))
    if is_geometric:
        axes.set_xscale("log", base=2)
        margin = (places[-1] / places[0]) ** 0.05
        axes.set_xlim(places[0] / margin, places[-1] * margin)
    else:
        margin = 0.05 * (places[-1] - places[0]) or 0.5
        axes.set_xlim(places[0] - margin, places[-1] + margin)
    max_ticks = 6 if size.is_narrow else 10
    if is_geometric or len(places) <= max_ticks:
        ticks = places if len(places) <= max_ticks else places[:: math.ceil(len(places) / max_ticks)]
        axes.set_xticks(ticks, [tick_number(tick) for tick in ticks])
        axes.xaxis.set_minor_locator(NullLocator())
    else:
        axes.xaxis.set_major_locator(MaxNLocator(max_ticks - 1))
        axes.xaxis.set_major_formatter(FuncFormatter(tick_number))
    axes.set_xlabel(label)


def _name_point(axes: Axes, row: Any, max_throughput: float) -> None:
    """Write the load above its dot at the left, where a rising curve leaves room; right of a dot near the axis."""
    is_left = float(row.output_tokens_per_s) > 0.15 * max_throughput
    text = f"{row.load:g}" + ("  knee" if row.is_knee else "")
    axes.annotate(
        text,
        (float(row.output_tokens_per_s), float(row.value_ms)),
        xytext=(-5 if is_left else 6, 5),
        textcoords="offset points",
        ha="right" if is_left else "left",
        color=PALETTE["ink"] if row.is_knee else PALETTE["muted"],
        fontweight="bold" if row.is_knee else "normal",
    )


def _axes(axes: Axes, label: str, size: Size) -> None:
    axes.set_xlabel(label)
    axes.xaxis.set_major_formatter(FuncFormatter(tick_number))
    axes.yaxis.set_major_formatter(FuncFormatter(tick_number))
    is_whole = label == "users"
    axes.xaxis.set_major_locator(MaxNLocator(4 if size.is_narrow else 7, integer=is_whole, steps=[1, 2, 4, 5, 10]))

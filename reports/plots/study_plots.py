"""Figures of a tuning study; each takes a frame and returns a `Figure`."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullFormatter, NullLocator

from reports.document import Size
from reports.plots.figure import (
    CHARACTER_PIXELS,
    MARGIN_NAMES,
    MARGIN_RIGHT,
    PALETTE,
    PIXELS_PER_INCH,
    label_axis,
    name_rows,
    name_series,
    new_figure,
    styled,
    tick_number,
)
from reports.study import Knob, TrialOutcome

Array = npt.NDArray[np.float64]

# Outcomes differ in shape and in colour.
OUTCOME_STYLE = {
    TrialOutcome.FEASIBLE: ("o", PALETTE["good"]),
    TrialOutcome.VIOLATED: ("D", PALETTE["series-4"]),
    TrialOutcome.NOT_SERVED: ("X", PALETTE["bad"]),
    TrialOutcome.FAILED: ("s", PALETTE["muted"]),
}
SHORT_OUTCOME = {
    TrialOutcome.FEASIBLE: "within limits",
    TrialOutcome.VIOLATED: "beyond a limit",
    TrialOutcome.NOT_SERVED: "could not serve",
    TrialOutcome.FAILED: "not measured",
}
PHASE_COLOURS = {"launch": PALETTE["series-4"], "warm": PALETTE["series-5"], "measure": PALETTE["series-0"]}


def history(frame: pd.DataFrame, quantity: str, noise: float | None, size: Size) -> Figure:
    """The objective of every trial in order, and the best so far with a band of one launch's noise.

    frame: trial, value, outcome, best; a trial without a value is a mark at the bottom.
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
        _marks(axes, frame.assign(value=frame["value"].fillna(low - 1.3 * pad)), "trial", "value")
        _outcome_legend(axes, frame, size)
        axes.set_xlabel("trial")
        axes.xaxis.set_major_locator(MaxNLocator(5 if size.is_narrow else 10, integer=True))
        axes.yaxis.set_major_formatter(FuncFormatter(tick_number))
        label_axis(axes, quantity)
        return figure


def settings_map(frame: pd.DataFrame, x: Knob, y: Knob, size: Size) -> Figure:
    """Every trial by two of its settings, marked by its outcome. frame: x, y, outcome."""
    with styled():
        figure, [axes] = new_figure(size, gridspec_kw=_left_margin(y, size))
        _setting_axis(axes, "x", x, frame["x"], size)
        _setting_axis(axes, "y", y, frame["y"], size)
        places = pd.DataFrame({"x": _places(x, frame["x"]), "y": _places(y, frame["y"]), "outcome": frame["outcome"]})
        _marks(axes, places, "x", "y")
        axes.set_xlabel(x.name)
        label_axis(axes, y.name)
        _outcome_legend(axes, frame, size)
        return figure


def contour(frame: pd.DataFrame, x: Knob, y: Knob, quantity: str, size: Size) -> Figure:
    """The objective over two settings: one dot per trial, and contour lines. frame: x, y, value.

    A choice has no intermediate values, so there are no contour lines with one.
    """
    with styled():
        figure, [axes] = new_figure(size, gridspec_kw=_left_margin(y, size))
        _setting_axis(axes, "x", x, frame["x"], size)
        _setting_axis(axes, "y", y, frame["y"], size)
        at_x, at_y, value = _places(x, frame["x"]), _places(y, frame["y"]), np.asarray(frame["value"], dtype=float)
        if "category" not in (x.scale, y.scale) and _spans_a_plane(at_x, at_y) and np.ptp(value) > 0:
            lines = axes.tricontour(
                at_x, at_y, value, levels=3 if size.is_narrow else 6, colors=[PALETTE["series-0"]], linewidths=0.9
            )
            axes.clabel(lines, fmt=lambda level: tick_number(float(f"{level:.3g}")), fontsize=7.5)
        fraction = (value - value.min()) / (np.ptp(value) or 1.0)
        axes.scatter(at_x, at_y, s=18 + 60 * fraction, color=PALETTE["series-0"], alpha=0.55, linewidths=0)
        # Contour lines leave no margin.
        axes.set_xlim(_padded(x, at_x))
        axes.set_ylim(_padded(y, at_y))
        axes.set_xlabel(x.name)
        label_axis(axes, y.name if size.is_narrow else f"{y.name}; larger dot: higher {quantity}")
        return figure


def _spans_a_plane(x: Array, y: Array) -> bool:
    places = np.unique(np.column_stack((x, y)), axis=0)
    return len(places) >= 6 and int(np.linalg.matrix_rank(places - places[0])) == 2


def slice_of(frame: pd.DataFrame, knob: Knob, quantity: str, size: Size) -> Figure:
    """The objective against one setting, a mark per trial. frame: setting, value, outcome, is_winner."""
    with styled():
        figure, [axes] = new_figure(size)
        _setting_axis(axes, "x", knob, frame["setting"], size)
        places = frame.assign(x=_places(knob, frame["setting"]))
        _marks(axes, places, "x", "value")
        winner = places[places["is_winner"]]
        axes.plot(
            winner["x"], winner["value"], "o", markersize=12, markerfacecolor="none", markeredgecolor=PALETTE["ink"]
        )
        axes.margins(y=0.15)
        axes.set_xlabel(knob.name)
        axes.yaxis.set_major_formatter(FuncFormatter(tick_number))
        axes.yaxis.set_major_locator(MaxNLocator(5))
        label_axis(axes, quantity)
        _outcome_legend(axes, frame, size)
        return figure


def parallel_coordinates(frame: pd.DataFrame, knobs: Sequence[Knob], quantity: str, size: Size) -> Figure:
    """A line per trial through its settings to its objective; better trials are darker, the winner is bold.

    frame: a column per knob's name, value, is_winner, rank (0 the worst, 1 the best).
    """
    with styled():
        bottom = (MARGIN_NAMES if size.is_narrow else 84) / size.height
        left = 24 if size.is_narrow else 96
        figure, [axes] = new_figure(size, gridspec_kw={"bottom": bottom, "left": left / size.width})
        columns = [_unit_places(knob, frame[knob.name]) for knob in knobs]
        value = np.asarray(frame["value"], dtype=float)
        columns.append((value - value.min()) / (np.ptp(value) or 1.0))
        lines = np.column_stack(columns)
        for row, (rank, is_winner) in enumerate(zip(frame["rank"], frame["is_winner"], strict=True)):
            colour = PALETTE["ink"] if is_winner else PALETTE["series-0"]
            width, alpha = (2.4, 1.0) if is_winner else (1.2, 0.12 + 0.6 * float(rank))
            axes.plot(range(lines.shape[1]), lines[row], color=colour, alpha=alpha, linewidth=width)
        names = [*(knob.name for knob in knobs), quantity]
        axes.set_xticks(range(len(names)), [_short(name, 22) for name in names], rotation=90 if size.is_narrow else 20)
        for label in axes.get_xticklabels():
            label.set_horizontalalignment("center" if size.is_narrow else "right")
        axes.set_yticks([])
        axes.grid(visible=True, axis="x")
        axes.set_ylim(-0.09, 1.09)
        for place, (low, high) in enumerate([*(_ends(knob, frame[knob.name]) for knob in knobs), _value_ends(value)]):
            for text, y, side in ((low, -0.02, "top"), (high, 1.02, "bottom")):
                axes.text(place, y, _short(text, 10), ha="center", va=side, color=PALETTE["muted"], fontsize=7.5)
        return figure


def bars(frame: pd.DataFrame, quantity: str, size: Size) -> Figure:
    """A bar per name, with an interval unless it is NaN. frame: name, value, lo, hi (in percent)."""
    with styled():
        left = MARGIN_RIGHT if size.is_narrow else MARGIN_NAMES + 20
        figure, [axes] = new_figure(size, gridspec_kw={"left": left / size.width})
        rows = frame.iloc[::-1].reset_index(drop=True)
        axes.barh(rows.index, rows["value"], height=0.45, color=PALETTE["series-0"], alpha=0.75, linewidth=0)
        for row, lo, hi in zip(rows.index, rows["lo"], rows["hi"], strict=True):
            if lo == lo and hi == hi:
                axes.plot([lo, hi], [row, row], color=PALETTE["ink"], linewidth=1.4)
        name_rows(axes, [_short(str(name), 40 if size.is_narrow else 25) for name in rows["name"]], size)
        axes.grid(visible=False, axis="y")
        axes.grid(visible=True, axis="x")
        axes.axvline(0, color=PALETTE["muted"], linewidth=0.8)
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g} %"))
        axes.xaxis.set_major_locator(MaxNLocator(5))
        axes.set_xlabel(quantity)
        return figure


def pareto(frame: pd.DataFrame, x_title: str, y_title: str, size: Size) -> Figure:
    """Two metrics of every measured trial, and the Pareto front.

    frame: x (higher is better), y (lower is better), outcome, on_front, is_winner, is_baseline.
    """
    with styled():
        figure, [axes] = new_figure(size)
        front = frame[frame["on_front"]].sort_values("x")
        axes.plot(front["x"], front["y"], color=PALETTE["series-0"], linewidth=1.2)
        _marks(axes, frame, "x", "y")
        both, one = frame["is_baseline"] & frame["is_winner"], frame["is_baseline"] ^ frame["is_winner"]
        named = (
            (both, "baseline, winner"),
            (one & frame["is_baseline"], "baseline"),
            (one & frame["is_winner"], "winner"),
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
        _outcome_legend(axes, frame, size)
        return figure


def predicted(frame: pd.DataFrame, metric: str, size: Size) -> Figure:
    """Measured against predicted, with the line of equality and bands of ±5 and ±15 % around it.

    frame: predicted, measured (above 0, in one unit), how.
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
    """Three numbers per decade; two over several decades."""
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    steps = (1.0, 2.0, 5.0) if last - first <= 2 else (1.0, 3.0)
    return np.array([step * 10.0**power for power in range(first, last + 1) for step in steps])


def residuals(frame: pd.DataFrame, knob: Knob, quantity: str, size: Size) -> Figure:
    """The error of predictions against one setting. frame: setting, error (in %)."""
    with styled():
        figure, [axes] = new_figure(size)
        _setting_axis(axes, "x", knob, frame["setting"], size)
        axes.axhspan(-15, 15, color=PALETTE["shade"], linewidth=0, zorder=0)
        axes.axhline(0, color=PALETTE["muted"], linewidth=0.9)
        axes.plot(_places(knob, frame["setting"]), frame["error"], "o", color=PALETTE["series-0"], markersize=6)
        axes.margins(y=0.15)
        axes.set_xlabel(knob.name)
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:+g} %" if value else "0"))
        axes.yaxis.set_major_locator(MaxNLocator(5))
        label_axis(axes, quantity)
        return figure


def phases(frame: pd.DataFrame, size: Size) -> Figure:
    """The phases of each launch over time. frame: row, start_s, seconds, phase, in the order of start."""
    with styled():
        figure, [axes] = new_figure(size)
        minutes = frame.assign(start=frame["start_s"] / 60, length=frame["seconds"] / 60)
        for phase, rows in minutes.groupby("phase", sort=False):
            colour = PHASE_COLOURS.get(str(phase), PALETTE["series-3"])
            for start, length, row in zip(rows["start"], rows["length"], rows["row"], strict=True):
                axes.add_patch(Rectangle((start, row - 0.36), length, 0.72, color=colour, linewidth=0))
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
    """Launches of the baseline over time, their mean, and a band of one launch's noise. frame: minutes, value."""
    with styled():
        figure, [axes] = new_figure(size)
        middle = float(frame["value"].mean())
        if noise:
            axes.axhspan(middle * (1 - noise), middle * (1 + noise), color=PALETTE["shade"], linewidth=0, zorder=0)
        axes.axhline(middle, color=PALETTE["muted"], linewidth=0.9)
        axes.plot(frame["minutes"], frame["value"], "o-", color=PALETTE["series-0"], markersize=5)
        axes.margins(y=0.4)
        axes.set_xlabel("minutes since the study's start")
        axes.yaxis.set_major_formatter(FuncFormatter(tick_number))
        axes.yaxis.set_major_locator(MaxNLocator(5))
        label_axis(axes, quantity)
        return figure


def _marks(axes: Axes, frame: pd.DataFrame, x: str, y: str) -> None:
    for outcome, (marker, colour) in OUTCOME_STYLE.items():
        rows = frame[frame["outcome"] == outcome]
        axes.plot(rows[x], rows[y], marker, color=colour, markersize=6, alpha=0.85, markeredgewidth=0, linestyle="none")


def _outcome_legend(axes: Axes, frame: pd.DataFrame, size: Size) -> None:
    """The outcomes in their colours beside the axis title, or above it in a narrow figure."""
    shown = [outcome for outcome in OUTCOME_STYLE if (frame["outcome"] == outcome).any()]
    if len(shown) < 2:
        return
    names, colours = [SHORT_OUTCOME[each] for each in shown], [OUTCOME_STYLE[each][1] for each in shown]
    if not size.is_narrow:
        name_series(axes, names, size, colours)
        return
    lines = _name_lines(names, size)
    box, line = axes.get_position(), 15 / size.height
    axes.set_position((box.x0, box.y0, box.width, box.height - line * (1 + max(row for row, _ in lines))))
    for name, colour, (row, offset) in zip(names, colours, lines, strict=True):
        axes.annotate(
            name,
            (0.0, 1.0),
            xycoords="axes fraction",
            xytext=(offset * 72 / PIXELS_PER_INCH, (26 + 15 * row) * 72 / PIXELS_PER_INCH),
            textcoords="offset points",
            color=colour,
            fontweight="bold",
            fontsize=8.0,
        )


def _name_lines(names: Sequence[str], size: Size) -> list[tuple[int, float]]:
    """The line, counted from the axes, and the offset in pixels of each name above a narrow figure."""
    room, row, offset, found = size.width - 90, 0, 0.0, []
    for name in names:
        width = len(name) * CHARACTER_PIXELS
        if offset and offset + width > room:
            row, offset = row + 1, 0.0
        found.append((row, offset))
        offset += width + 1.5 * CHARACTER_PIXELS
    return found


def _left_margin(knob: Knob, size: Size) -> dict[str, float]:
    return {"left": (96 if knob.scale == "category" else 76) / size.width}


def _levels(knob: Knob, column: "pd.Series[Any]") -> list[str] | None:
    """The names on a categorical axis; None for a numeric one."""
    numbers = [value for value in column if isinstance(value, int | float) and not isinstance(value, bool)]
    if knob.scale != "category" and numbers:
        return None
    return sorted({_text(knob, value) for value in column})


def _text(knob: Knob, value: object) -> str:
    return knob.unset if value is None or value != value else str(value)


def _places(knob: Knob, column: "pd.Series[Any]") -> Array:
    """Values as coordinates: the index of a level, or the number; an unset value is one step below all numbers."""
    levels = _levels(knob, column)
    if levels is not None:
        return np.array([float(levels.index(_text(knob, value))) for value in column])
    numbers = pd.to_numeric(column, errors="coerce").astype(float)
    known = numbers.dropna()
    unset = known.min() / 1.5 if knob.scale == "log" else known.min() - 0.1 * (float(np.ptp(known)) or 1.0)
    return np.asarray(numbers.fillna(unset), dtype=float)


def _unit_places(knob: Knob, column: "pd.Series[Any]") -> Array:
    places = _places(knob, column)
    if knob.scale == "log" and places.min() > 0:
        places = np.log(places)
    unit: Array = (places - places.min()) / (np.ptp(places) or 1.0)
    return unit


def _ends(knob: Knob, column: "pd.Series[Any]") -> tuple[str, str]:
    levels = _levels(knob, column)
    if levels is not None:
        return levels[0], levels[-1]
    numbers = pd.to_numeric(column, errors="coerce").astype(float)
    low = knob.unset if numbers.isna().any() else tick_number(float(numbers.min()))
    return low, tick_number(float(numbers.max()))


def _value_ends(value: Array) -> tuple[str, str]:
    low, high = (tick_number(float(f"{end:.3g}")) for end in (value.min(), value.max()))
    return low, high


def _setting_axis(axes: Axes, which: str, knob: Knob, column: "pd.Series[Any]", size: Size) -> None:
    """The ticks of one axis: the levels, or a few numbers."""
    axis = axes.xaxis if which == "x" else axes.yaxis
    levels = _levels(knob, column)
    if levels is not None:
        longest = 9 if size.is_narrow else 16
        axis.set_ticks(range(len(levels)), [_short(level, longest) for level in levels])
        (axes.set_xlim if which == "x" else axes.set_ylim)(-0.5, len(levels) - 0.5)
        return
    places = _places(knob, column)
    if knob.scale == "log" and places.min() > 0:
        (axes.set_xscale if which == "x" else axes.set_yscale)("log")
        axis.set_minor_locator(NullLocator())
        axis.set_minor_formatter(NullFormatter())
    known = _known(column)
    even = MaxNLocator(4 if size.is_narrow else 6).tick_values(float(known.min()), float(known.max()))
    ticks = _log_ticks(known) if knob.scale == "log" else even
    inside = [float(tick) for tick in ticks if known.min() <= tick <= known.max()] or [float(known.min())]
    labels = [tick_number(tick) for tick in inside]
    has_unset = len(known) < len(column)
    if size.is_narrow and which == "x" and len(inside) > 4:
        inside, labels = inside[has_unset::2], labels[has_unset::2]
    if has_unset:
        inside, labels = [float(places.min()), *inside], [_short(knob.unset, 9), *labels]
    axis.set_ticks(inside, labels)
    axes.margins(0.12)


def _padded(knob: Knob, places: Array, fraction: float = 0.08) -> tuple[float, float]:
    """Limits of an axis with a margin, on its own scale."""
    low, high = float(places.min()), float(places.max())
    if knob.scale == "log" and low > 0:
        margin = (high / low) ** fraction if high > low else 2.0
        return low / margin, high * margin
    margin = fraction * (high - low) or 0.5
    return low - margin, high + margin


def _known(column: "pd.Series[Any]") -> Array:
    return np.asarray(pd.to_numeric(column, errors="coerce").astype(float).dropna())


def _log_ticks(values: Array) -> Array:
    """The values if they are few, else round numbers between them."""
    seen = np.unique(values)
    if len(seen) <= 6:
        return seen
    low, high = math.floor(math.log10(seen[0])), math.ceil(math.log10(seen[-1]))
    steps = (1.0, 2.0, 5.0) if high - low <= 3 else (1.0,)
    return np.array([step * 10.0**power for power in range(low, high + 1) for step in steps])


def _short(text: str, most: int) -> str:
    return text if len(text) <= most else text[: most - 1] + "…"

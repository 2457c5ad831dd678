"""A setting of a study as an axis: numbers on its scale, or the levels of a choice, and a place for an unset value."""

import math
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator, NullFormatter, NullLocator

from reports.document import Size
from reports.study import Knob

Array = npt.NDArray[np.float64]


def setting_axis(axes: Axes, which: str, knob: Knob, column: "pd.Series[Any]", size: Size) -> None:
    """Set scale and ticks of one axis (`which` is x or y): a tick per level, or a few numbers."""
    axis = axes.xaxis if which == "x" else axes.yaxis
    column = _with_default(knob, column)
    levels = _levels(knob, column)
    if levels is not None:
        max_len = 9 if size.is_narrow else 16
        axis.set_ticks(range(len(levels)), [shorten(level, max_len) for level in levels])
        (axes.set_xlim if which == "x" else axes.set_ylim)(-0.5, len(levels) - 0.5)
        return
    places = places_of(knob, column)
    if knob.scale == "log" and places.min() > 0:
        (axes.set_xscale if which == "x" else axes.set_yscale)("log")
        axis.set_minor_locator(NullLocator())
        axis.set_minor_formatter(NullFormatter())
    known = np.asarray(pd.to_numeric(column, errors="coerce").astype(float).dropna())
    has_unset = len(known) < len(column)
    ticks = _number_ticks(known, knob, size)
    if size.is_narrow and which == "x" and len(ticks) > 4:
        ticks = ticks[has_unset::2]
    labels = [setting_number(tick) for tick in ticks]
    if has_unset:
        ticks, labels = [float(places.min()), *ticks], [shorten(knob.unset, 9), *labels]
    axis.set_ticks(ticks, labels)
    axes.margins(0.12)


def _number_ticks(known: Array, knob: Knob, size: Size) -> list[float]:
    """A few ticks from the smallest to the largest value."""
    low, high = float(known.min()), float(known.max())
    ticks = _log_ticks(known) if knob.scale == "log" else MaxNLocator(4 if size.is_narrow else 6).tick_values(low, high)
    return [float(tick) for tick in ticks if low <= tick <= high] or [low]


MAX_LOG_TICKS = 6


def _log_ticks(values: Array) -> Array:
    """The values if they are few, else powers of two between whole numbers, or round numbers."""
    seen = np.unique(values)
    if len(seen) <= MAX_LOG_TICKS:
        return seen
    if is_whole(seen) and seen[-1] >= 4 * seen[0] > 0:
        powers = np.arange(math.ceil(math.log2(seen[0])), math.floor(math.log2(seen[-1])) + 1)
        return np.asarray(2.0 ** powers[:: math.ceil(len(powers) / MAX_LOG_TICKS)], dtype=np.float64)
    low, high = math.floor(math.log10(seen[0])), math.ceil(math.log10(seen[-1]))
    steps = (1.0, 2.0, 5.0) if high - low <= 3 else (1.0,)
    return np.array([step * 10.0**power for power in range(low, high + 1) for step in steps])


def is_whole(values: Array) -> bool:
    """Whether all values are whole numbers."""
    return bool((values == np.round(values)).all())


def places_of(knob: Knob, column: "pd.Series[Any]") -> Array:
    """Values as coordinates: the index of a level, or the number. An unset value is at the default.

    Without a known default it is one step below all numbers.
    """
    column = _with_default(knob, column)
    levels = _levels(knob, column)
    if levels is not None:
        return np.array([float(levels.index(_text(knob, value))) for value in column])
    numbers = pd.to_numeric(column, errors="coerce").astype(float)
    known = numbers.dropna()
    unset = known.min() / 2 if knob.scale == "log" else known.min() - 0.18 * (float(np.ptp(known)) or 1.0)
    return np.asarray(numbers.fillna(unset), dtype=float)


def _with_default(knob: Knob, column: "pd.Series[Any]") -> "pd.Series[Any]":
    """The column with the default in place of unset values, if it is known: both are one value of the setting."""
    if knob.default is None:
        return column
    filled = [knob.default if value is None or value != value else value for value in column]
    return pd.Series(filled, index=column.index, dtype=object)


def _levels(knob: Knob, column: "pd.Series[Any]") -> list[str] | None:
    """The names on a categorical axis; None for a numeric one."""
    numbers = [value for value in column if isinstance(value, int | float) and not isinstance(value, bool)]
    if knob.scale != "category" and numbers:
        return None
    return sorted({_text(knob, value) for value in column})


def is_choice(knob: Knob, column: "pd.Series[Any]") -> bool:
    """Whether the axis of a setting has levels instead of numbers."""
    return _levels(knob, _with_default(knob, column)) is not None


def _text(knob: Knob, value: object) -> str:
    if value is None or value != value:
        return knob.unset
    return str(value).lower() if isinstance(value, bool) else str(value)


def unit_places(knob: Knob, column: "pd.Series[Any]") -> Array:
    """Values as coordinates from 0 to 1, on the scale of the setting."""
    places = places_of(knob, column)
    if knob.scale == "log" and places.min() > 0:
        places = np.log(places)
    unit: Array = (places - places.min()) / (np.ptp(places) or 1.0)
    return unit


def ends_of(knob: Knob, column: "pd.Series[Any]") -> tuple[str, str]:
    """The lowest and the highest value as text."""
    column = _with_default(knob, column)
    levels = _levels(knob, column)
    if levels is not None:
        return levels[0], levels[-1]
    numbers = pd.to_numeric(column, errors="coerce").astype(float)
    low = knob.unset if numbers.isna().any() else setting_number(float(numbers.min()))
    return low, setting_number(float(numbers.max()))


def padded_limits(knob: Knob, places: Array, fraction: float = 0.08) -> tuple[float, float]:
    """Limits of an axis with a margin, on its own scale."""
    low, high = float(places.min()), float(places.max())
    if knob.scale == "log" and low > 0:
        margin = (high / low) ** fraction if high > low else 2.0
        return low / margin, high * margin
    margin = fraction * (high - low) or 0.5
    return low - margin, high + margin


def left_margin(knob: Knob, size: Size) -> dict[str, float]:
    """The left margin of a figure with a setting as its y axis, for `gridspec_kw`; names of choices need more space."""
    return {"left": (96 if knob.scale == "category" else 76) / size.width}


def setting_number(value: float) -> str:
    """A number as a flag accepts it, and as the tables of settings have it: without separators.

    >>> setting_number(4096.0), setting_number(1048576.0), setting_number(0.3)
    ('4096', '1048576', '0.3')
    """
    return f"{value:.10g}"


def shorten(text: str, max_len: int) -> str:
    """The text, cut to `max_len` characters."""
    return text if len(text) <= max_len else text[: max_len - 1] + "…"

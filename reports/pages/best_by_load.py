"""The best value of a server's setting at each load of a sweep over both, such as the draft tokens that pay there."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import pandas as pd

from reports.document import format_number
from reports.metrics.sweep import LoadPoint, Sweep

RATE = "output_tokens_per_s"
NOTE = (
    "The value with the most output tokens/s at each load. It replaces the first value only if their 95 % intervals do "
    "not overlap; otherwise the first value is named. Each value was measured on one launch: the intervals do not "
    "contain the differences between launches. `tgi-bench compare` decides between two values."
)


@dataclass(frozen=True, slots=True)
class BestValue:
    """The best value at a load. gain: of its output tokens/s over those of the first value, as a fraction."""

    load: float
    value: str
    tokens_per_s: float
    gain: float


def best_by_load(facets: Sequence[tuple[str, Sweep]]) -> list[BestValue]:
    """The best value at every load at which the first value was measured validly."""
    found = []
    for place in range(len(facets[0][1].points)):
        points = [(value, sweep.points[place]) for value, sweep in facets]
        base = _rate(points[0][1])
        if base is None:
            continue
        value, rate = points[0][0], base
        for other, point in points[1:]:
            own = _rate(point)
            if own is not None and own[1] > base[2] and own[0] > rate[0]:
                value, rate = other, own
        found.append(BestValue(points[0][1].load, value, rate[0], rate[0] / base[0] - 1))
    return found


def best_table(found: Sequence[BestValue], setting: str, unit: str) -> pd.DataFrame:
    """A row per load."""
    return pd.DataFrame(
        {
            unit: f"{each.load:g}",
            f"best {setting}": each.value,
            "Output tokens/s ↑": each.tokens_per_s,
            "gain over the first, % ↑": 100 * each.gain,
        }
        for each in found
    )


def best_sentence(found: Sequence[BestValue], setting: str, unit: str) -> str:
    """`Best speculate: 8 at 1–4 users (up to +80 %), 0 at 16–64 users.`; empty with fewer than two loads."""
    if len(found) < 2:
        return ""
    parts = []
    for value, group in groupby(found, key=lambda each: each.value):
        own = list(group)
        loads = f"{own[0].load:g}" + (f"–{own[-1].load:g}" if len(own) > 1 else "")
        gain = max(each.gain for each in own)
        parts.append(f"{value} at {loads} {unit}" + (f" (up to +{format_number(100 * gain)} %)" if gain > 0 else ""))
    return f"Best {setting}: {', '.join(parts)}."


def _rate(point: LoadPoint) -> tuple[float, float, float] | None:
    """Output tokens/s with their interval; None for a point that is not valid or has no interval."""
    rate = point.first.summary["rates"][RATE]
    known = (rate["value"], rate["lo"], rate["hi"])
    if not point.is_valid or any(each is None for each in known) or not known[0]:
        return None
    return float(known[0]), float(known[1]), float(known[2])

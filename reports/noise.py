"""How much runs of one side differ, and the smallest effect that pairs of such runs could show."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from reports.compare import LEAST_EFFECT, SHARES, CompareOptions, SideRun, median_of, worseness
from reports.results import SCHEMA_VERSION
from reports.sequential import smallest_effect

PAIRS = (4, 5, 6, 8, 10, 12)


@dataclass(frozen=True, slots=True)
class MetricNoise:
    """Run-to-run deviation of a metric as a share of it (of a share, as it is); None where a run lacks the metric.

    `effects`: by number of pairs the effect, as a share of the metric, that they show in four of five cases.
    """

    name: str
    is_gated: bool
    median: float | None
    deviation: float | None
    effects: dict[int, float]


def noise_of(runs: Sequence[SideRun], options: CompareOptions) -> tuple[MetricNoise, ...]:
    """Every metric of the options over runs of one side."""
    return tuple(_noise(name, runs, name in options.gated) for name in (*options.gated, *options.shown))


def _noise(name: str, runs: Sequence[SideRun], is_gated: bool) -> MetricNoise:
    values = [run.values.get(name) for run in runs]
    scaled = worseness(values, name)
    if scaled is None or len(scaled) < 2:
        return MetricNoise(name, is_gated, median_of(values), None, {})
    deviation = float(np.std(scaled, ddof=1))
    # A pair's d has the noise of two runs.
    effects = {pairs: smallest_effect(math.sqrt(2) * deviation, pairs) for pairs in PAIRS}
    if name not in SHARES:
        effects = {pairs: math.expm1(min(effect, 20.0)) for pairs, effect in effects.items()}
    return MetricNoise(name, is_gated, median_of(values), deviation, effects)


def noise_table(found: Sequence[MetricNoise]) -> pd.DataFrame:
    """A row per metric: its median, the deviation between runs, and what numbers of pairs show; percent and points."""
    rows = []
    for each in found:
        is_share = each.name in SHARES
        row: dict[str, Any] = {
            "metric": each.name,
            "median": None if each.median is None else 100 * each.median if is_share else each.median,
            "run to run": None if each.deviation is None else 100 * each.deviation,
            "unit": "points" if is_share else "%",
            "gated": "yes" if each.is_gated else "no",
        }
        rows.append(row | {f"{pairs} pairs show": 100 * each.effects[pairs] for pairs in PAIRS if each.effects})
    return pd.DataFrame(rows)


def noise_json(label: str, runs: Sequence[SideRun], found: Sequence[MetricNoise]) -> dict[str, Any]:
    """The content of `noise.json`; effects and deviations as shares."""
    return {
        "schema_version": SCHEMA_VERSION,
        "side": label,
        "runs": len(runs),
        "metrics": {
            each.name: {
                "gated": each.is_gated,
                "median": each.median,
                "deviation": each.deviation,
                "smallest_effect": {str(pairs): effect for pairs, effect in each.effects.items()},
            }
            for each in found
        },
    }


def noise_sentence(found: Sequence[MetricNoise], options: CompareOptions) -> str:
    """What the gate can and cannot see with the most pairs it takes."""
    most = PAIRS[-1]
    bound = max(options.min_effect, LEAST_EFFECT)
    beyond = [
        f"{each.name} {100 * each.effects[most]:.1f} %"
        for each in found
        if each.is_gated and each.effects and each.name not in SHARES and each.effects[most] > bound
    ]
    if not beyond:
        return f"{most} pairs show a change of {100 * bound:g} % in every gated metric."
    return f"{most} pairs do not show a change of {100 * bound:g} %; the smallest they show: {', '.join(beyond)}."

"""Run-to-run noise of one side, and the regressions that comparisons with this noise find."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import pandas as pd

from reports.gate.comparison import CLEAR_EFFECT, MIN_EFFECT, CompareOptions
from reports.gate.decide import Evidence
from reports.gate.noise_split import NoiseSplit
from reports.gate.side_run import FRACTIONS, SideRun, log_degradation, median_of
from reports.metrics.titles import metric_heading, percent_title
from reports.run_store import SCHEMA_VERSION

PAIRS = (4, 5, 6, 8, 10, 12)


@dataclass(frozen=True, slots=True)
class MetricNoise:
    """The noise of a metric: its run-to-run deviation, relative or, for a fraction, absolute.

    median, deviation: None if no run, or not every run, has the metric.
    effects: by the largest number of pairs, the regression that 80 % of comparisons find, relative or absolute.
    """

    name: str
    is_gated: bool
    median: float | None
    deviation: float | None
    effects: dict[int, float]


def noise_of(
    runs: Sequence[SideRun], options: CompareOptions, splits: Sequence[NoiseSplit] = ()
) -> tuple[MetricNoise, ...]:
    """The noise of every metric of the options, over runs of one side.

    With `splits`, the effects are those of interleaved pairs with the slices of `splits`; else those of separate runs.
    """
    deviations = {each.name: each.deviation_d for each in splits}
    return tuple(_noise(name, runs, options, deviations.get(name)) for name in (*options.gated, *options.shown))


def _noise(name: str, runs: Sequence[SideRun], options: CompareOptions, deviation_d: float | None) -> MetricNoise:
    is_gated = name in options.gated
    values = [run.values.get(name) for run in runs]
    scaled = log_degradation(values, name)
    if scaled is None or len(scaled) < 2:
        return MetricNoise(name, is_gated, median_of(values), None, {})
    deviation = float(np.std(scaled, ddof=1))
    if deviation_d is None:
        deviation_d = math.sqrt(2) * deviation  # d is the difference of two separate runs
    effects = {
        pairs: Evidence(0.0, deviation_d / math.sqrt(pairs), pairs - 1).detectable(
            _up_to(pairs, options).claim_level(is_gated), options.limit(name)
        )
        for pairs in PAIRS
    }
    if name not in FRACTIONS:
        effects = {pairs: math.expm1(min(effect, 20.0)) for pairs, effect in effects.items()}
    return MetricNoise(name, is_gated, median_of(values), deviation, effects)


def _up_to(pairs: int, options: CompareOptions) -> CompareOptions:
    """The options of a comparison with at most this number of pairs."""
    return replace(options, pairs=None, min_pairs=min(options.min_pairs, pairs), max_pairs=pairs)


def noise_table(found: Sequence[MetricNoise]) -> pd.DataFrame:
    """A row per metric, in percent or points: median, run-to-run deviation, regressions that N pairs find."""
    rows = []
    for each in found:
        is_fraction = each.name in FRACTIONS
        row: dict[str, Any] = {
            "metric": percent_title(each.name),
            "median": None if each.median is None else 100 * each.median if is_fraction else each.median,
            "run to run": None if each.deviation is None else 100 * each.deviation,
            "unit": "points" if is_fraction else "%",
            "gated": "yes" if each.is_gated else "no",
        }
        rows.append(row | {f"{pairs} pairs find": 100 * each.effects[pairs] for pairs in PAIRS if each.effects})
    return pd.DataFrame(rows)


def noise_json(
    label: str, runs: Sequence[SideRun], found: Sequence[MetricNoise], splits: Sequence[NoiseSplit] = ()
) -> dict[str, Any]:
    """The content of `noise.json`. Effects and deviations are fractions (not percent); components are variances."""
    return {
        "schema_version": SCHEMA_VERSION,
        "side": label,
        "runs": len(runs),
        "components": [asdict(each) for each in splits],
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
    """The regression of each gated metric that the largest number of pairs finds, and a warning about high noise."""
    most, bound = PAIRS[-1], max(options.min_effect, MIN_EFFECT)
    effects = {each.name: each.effects[most] for each in gated_speeds(found)}
    sizes = ", ".join(f"{metric_heading(name)} {100 * effect:.1f} %" for name, effect in effects.items())
    text = f"With {most} pairs, 80 % of comparisons find a regression of this size: {sizes}."
    if max(effects.values(), default=0.0) <= CLEAR_EFFECT * bound:
        return text
    return (
        f"{text} That is more than {CLEAR_EFFECT:g} times the smallest effect of interest ({100 * bound:g} %), so many "
        "comparisons are inconclusive: use longer runs, --interleave or a larger --min-effect."
    )


def gated_speeds(found: Sequence[MetricNoise]) -> list[MetricNoise]:
    """The measured noise of each gated metric that is not a fraction."""
    return [each for each in found if each.is_gated and each.effects and each.name not in FRACTIONS]

"""Variation between runs and within runs, for one or two sides. Descriptive only: decisions are made by the gate.

Intervals come from a hierarchical bootstrap: runs are resampled, then blocks of requests within each run.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pandas as pd

from reports.document import Block, Estimate, Section, Table
from reports.metrics.requests.per_request import primary_latency
from reports.metrics.summary import Analysis
from reports.run_schema import Status
from reports.stats.bootstrap import (
    BOOTSTRAP_SEED,
    block_length,
    bootstrap_block,
    counted,
    counted_quantile,
    cut_points,
    resampled_counts,
)
from reports.stats.estimators import Interval, mean_interval, quantile

Array = npt.NDArray[np.float64]

MIN_RUNS = 3
RESAMPLES = 1_000
PERCENTILES = (50.0, 95.0)
LATENCIES = (("ttft_s", "TTFT"), ("tpot_s", "TPOT"), ("e2e_s", "E2E"), ("ntpot_s", "Normalized latency"))
RATES = (("output_tokens_per_s", "Output tokens/s"), ("requests_per_s", "Requests/s"))
ADJUSTED_FOR = {
    "ttft_s": ("input_tokens",),
    "e2e_s": ("input_tokens", "output_tokens"),
    "ntpot_s": ("input_tokens", "output_tokens"),
}
"""The lengths that each latency is adjusted for; TTFT does not depend on the number of output tokens."""
SPREAD_NOTE = (
    "Latencies in ms, over the requests of all runs of a side. Interval: 95 %, from resampled runs and resampled "
    "blocks of requests within them; for rates: Student's, over runs. Within: standard deviation of one run's value "
    "due to its requests. Between: additional standard deviation between runs."
)
EFFECT_NOTE = (
    "Change of B against A in %; intervals from the same resampling, on the logarithmic scale. Same prompts: the "
    "median of the ratios of each prompt. At equal lengths: after a regression on input and output tokens (TTFT: on "
    "input tokens). These numbers are descriptive only; use tgi-bench compare for a decision."
)


@dataclass(frozen=True, slots=True)
class Side:
    """The runs with one label."""

    label: str
    analyses: tuple[Analysis, ...]

    def pooled(self, column: str) -> Array:
        return np.concatenate([values_of(analysis, column) for analysis in self.analyses])


@dataclass(frozen=True, slots=True)
class Spread:
    """A statistic over all runs of a side. `within` and `between` are standard deviations of a run's own value."""

    interval: Interval
    within: float
    between: float
    draws: Array


def sides_of(analyses: Sequence[Analysis]) -> tuple[Side, ...]:
    """The sides, one per label, in the order of appearance."""
    labels = dict.fromkeys(analysis.label for analysis in analyses)
    return tuple(Side(label, tuple(each for each in analyses if each.label == label)) for label in labels)


def values_of(analysis: Analysis, column: str) -> Array:
    """A latency of the requests in the window, in order of start; in an open loop from the intended start."""
    name = primary_latency(column, analysis.run.manifest.is_open_loop)
    return np.asarray(analysis.measured.population[name].dropna(), dtype=np.float64)


def spread_of(runs: Sequence[Array], percentile: float, concurrency: Sequence[float]) -> Spread:
    """A percentile over runs by a hierarchical bootstrap. runs: values of each; concurrency: mean of each, [runs]."""
    pooled = np.concatenate(runs)
    cuts = cut_points(np.sort(pooled), len(pooled), (percentile,))
    drawn = [
        _resampled(values, cuts, block_length(len(values), mean))
        for values, mean in zip(runs, concurrency, strict=True)
    ]
    share = percentile / 100
    own = [counted_quantile(cuts, below, share) for below in drawn]
    random = np.random.default_rng(BOOTSTRAP_SEED)
    pooled_below = np.zeros((RESAMPLES, len(cuts)))
    for _ in runs:
        chosen, rows = random.integers(0, len(runs), RESAMPLES), random.integers(0, RESAMPLES, RESAMPLES)
        for index, each in enumerate(drawn):
            pooled_below[chosen == index] += each[rows[chosen == index]]
    draws = counted_quantile(cuts, pooled_below, share)
    lo, hi = (float(end) for end in np.quantile(draws, (0.025, 0.975)))
    within = math.sqrt(float(np.mean([np.var(each, ddof=1) for each in own])))
    seen = float(np.var([quantile(values, percentile) for values in runs], ddof=1))
    return Spread(Interval(quantile(pooled, percentile), lo, hi), within, math.sqrt(max(0.0, seen - within**2)), draws)


def _resampled(values: Array, cuts: Array, min_block: int) -> Array:
    """The number of values of one run up to each cut, [resamples, cuts]."""
    counts, sizes, min_block = counted(values, np.ones(len(values), dtype=np.int64), cuts, min_block)
    return resampled_counts(np.cumsum(counts, axis=1), bootstrap_block(counts, sizes, min_block), RESAMPLES)


def latency_spread(side: Side, column: str, percentile: float) -> Spread | None:
    """A percentile of a latency over a side; None if one of its runs has too few values."""
    runs = [values_of(analysis, column) for analysis in side.analyses]
    if min(len(values) for values in runs) < 10:
        return None
    means = [analysis.summary["rates"]["concurrency_mean"]["value"] or 0.0 for analysis in side.analyses]
    return spread_of(runs, percentile, means)


def spread_table(sides: Sequence[Side]) -> pd.DataFrame:
    """A row per metric and side: value, interval, and the deviations within and between runs."""
    rows = []
    for column, title in LATENCIES:
        for percentile in PERCENTILES:
            for side in sides:
                found = latency_spread(side, column, percentile)
                if found is not None:
                    value, lo, hi = (1e3 * each for each in _ends(found.interval))
                    layers = {"within": 1e3 * found.within, "between": 1e3 * found.between}
                    rows.append(
                        {
                            "metric": f"{title} p{percentile:g}",
                            **_named(side),
                            "value": Estimate(value, lo, hi),
                            **layers,
                        }
                    )
    for name, title in RATES:
        for side in sides:
            rates = [analysis.summary["rates"][name] for analysis in side.analyses]
            rows.append({"metric": title, **_named(side), **_rate_spread(rates)})
    return pd.DataFrame(rows)


def _rate_spread(rates: "Sequence[dict[str, float | None]]") -> dict[str, object]:
    values = np.array([rate["value"] or 0.0 for rate in rates])
    # Half an interval of twenty batch means is 2.093 standard errors. Without an interval both deviations are unknown.
    errors = np.array([(_known(rate["hi"]) - _known(rate["lo"])) / 2 / 2.093 for rate in rates])
    within = math.sqrt(float(np.mean(errors**2)))
    between = math.nan if math.isnan(within) else math.sqrt(max(0.0, float(np.var(values, ddof=1)) - within**2))
    return {"value": Estimate(*_ends(mean_interval(values))), "within": within, "between": between}


def _known(value: float | None) -> float:
    return math.nan if value is None else value


def _ends(interval: Interval) -> tuple[float, float, float]:
    return interval.value, interval.lo, interval.hi


def _named(side: Side) -> dict[str, object]:
    return {"runs of": side.label, "runs": len(side.analyses)}


def effect_table(a: Side, b: Side) -> pd.DataFrame:
    """Change of B against A: of the pooled percentile, for the same prompts, and at equal lengths if lengths differ."""
    is_capped = any(analysis.run.manifest.length_control != "forced" for side in (a, b) for analysis in side.analyses)
    rows = []
    for column, title in LATENCIES:
        for percentile in PERCENTILES:
            spreads = latency_spread(a, column, percentile), latency_spread(b, column, percentile)
            if spreads[0] is None or spreads[1] is None:
                continue
            row: dict[str, object] = {"metric": f"{title} p{percentile:g}", "change": _change(spreads[0], spreads[1])}
            if percentile == PERCENTILES[0]:
                paired, count = paired_ratio(a, b, column)
                row |= {"same prompts": _percent(paired), "prompts": count or None}
                if is_capped and column in ADJUSTED_FOR:
                    row["mean at equal lengths"] = _percent(adjusted_ratio(a, b, column))
            rows.append(row)
    return pd.DataFrame(rows)


def _change(a: Spread, b: Spread) -> Estimate:
    logs = np.log(b.draws) - np.log(a.draws)
    ends = (math.log(b.interval.value / a.interval.value), *np.quantile(logs, (0.025, 0.975)))
    value, lo, hi = (100 * math.expm1(float(end)) for end in ends)
    return Estimate(value, lo, hi, is_change=True)


def _percent(ratio: float | None) -> Estimate | None:
    return None if ratio is None else Estimate(100 * (ratio - 1), is_change=True)


def paired_ratio(a: Side, b: Side, column: str) -> tuple[float | None, int]:
    """The median ratio of B's mean to A's mean over common prompts, and the number of common prompts."""
    means = [_by_prompt(side, column) for side in (a, b)]
    both = means[0].index.intersection(means[1].index)
    if not len(both):
        return None, 0
    return float((means[1][both] / means[0][both]).median()), len(both)


def _by_prompt(side: Side, column: str) -> "pd.Series[float]":
    frames = [_succeeded(analysis, column)[["prompt_id", column]] for analysis in side.analyses]
    rows = pd.concat(frames)
    return rows[rows[column] > 0].groupby("prompt_id")[column].mean()


def _succeeded(analysis: Analysis, column: str) -> pd.DataFrame:
    """The successful requests of the window; in an open loop, `column` counts from the intended start."""
    population = analysis.measured.population
    name = primary_latency(column, analysis.run.manifest.is_open_loop)
    return population[population["status"] == Status.OK].assign(**{column: population[name]})


def adjusted_ratio(a: Side, b: Side, column: str) -> float | None:
    """The ratio of B's mean to A's at equal lengths, by least squares on tokens and side; None with too little data."""
    lengths = list(ADJUSTED_FOR[column])
    rows = pd.concat(
        [
            _succeeded(analysis, column)[[column, *lengths]].assign(is_b=float(side is b))
            for side in (a, b)
            for analysis in side.analyses
        ]
    ).dropna()
    if rows["is_b"].nunique() < 2 or len(rows) < 10:
        return None
    design = np.column_stack([np.ones(len(rows)), rows["is_b"], *(rows[name] - rows[name].mean() for name in lengths)])
    fitted, *_ = np.linalg.lstsq(design, np.asarray(rows[column], dtype=np.float64), rcond=None)
    level, difference = float(fitted[0]), float(fitted[1])
    return (level + difference) / level if level > 0 else None


def across_section(analyses: Sequence[Analysis]) -> tuple[Section, ...]:
    """The section of a report; empty unless a side has at least three runs."""
    sides = [side for side in sides_of(analyses) if len(side.analyses) >= MIN_RUNS]
    if not sides:
        return ()
    blocks: list[Block] = [Table("Run-to-run variation", spread_table(sides), SPREAD_NOTE)]
    for other in sides[1:]:
        frame = effect_table(sides[0], other)
        if len(frame):
            blocks.append(Table(f"{other.label} (B) against {sides[0].label} (A)", frame, EFFECT_NOTE))
    return (Section("Across runs", tuple(blocks)),)

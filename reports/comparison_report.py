"""The report of a comparison: verdict, table of metrics, dot plot of pairs, and what was refused or overlooked."""

from collections.abc import Sequence

import numpy as np
import pandas as pd

from reports import plots
from reports.compare import LEAST_EFFECT, Comparison, MetricResult
from reports.decide import Decision
from reports.document import Block, Estimate, Facts, Plot, Report, Section, Table, Text, VerdictLine, format_number

WORDS = {
    Decision.REGRESSION: "Regression",
    Decision.INCONCLUSIVE: "Inconclusive",
    Decision.PASS: "Pass",
    Decision.IMPROVEMENT: "Improvement",
    Decision.NOT_MEASURED: "Could not measure",
}
UNGATED = {
    Decision.REGRESSION: "worse",
    Decision.INCONCLUSIVE: "open",
    Decision.PASS: "not worse",
    Decision.IMPROVEMENT: "better",
    Decision.NOT_MEASURED: "missing",
}
PAIRED_STATISTIC = "mean of ln(B / A) over pairs; Student bounds at Pocock's level, Holm's order over metrics"
STORED_STATISTIC = "difference of mean ln of the runs; Welch's bounds, Holm's order over metrics"
LEVELS = {Decision.NOT_MEASURED: "invalid"}


def build_comparison_report(
    comparison: Comparison, reproduce: Sequence[str] = (), of_runs: Sequence[Section] = ()
) -> Report:
    """The report of a comparison; `reproduce` are command lines that repeat it, `of_runs` what its runs say."""
    sections = [Section("Metrics", _metric_blocks(comparison))] if comparison.metrics else []
    if comparison.requirements:
        sections.append(Section("Requirements", (Table("", requirements_table(comparison)),)))
    sections.append(
        Section("How it was judged", (_design(comparison), *(Text(_noted(note)) for note in comparison.notes)))
    )
    sections += of_runs
    if reproduce:
        sections.append(Section("Repeat it", tuple(Text(line, is_code=True) for line in reproduce)))
    title = f"{comparison.label_b} against {comparison.label_a}"
    subtitle = " · ".join(filter(None, (comparison.size, comparison.setting)))
    return Report(title, subtitle, (verdict_line(comparison),), tuple(sections))


def _noted(note: str) -> str:
    """A note as a sentence."""
    return f"{note[:1].upper()}{note[1:].rstrip('.')}."


def verdict_line(comparison: Comparison) -> VerdictLine:
    """The verdict, the sentence behind it, and a reason per metric that is not a plain pass."""
    verdict = comparison.verdict
    if comparison.refusals:
        reasons = tuple(f"{refusal.message[:1].upper()}{refusal.message[1:]}." for refusal in comparison.refusals)
        return VerdictLine("invalid", WORDS[verdict], "The runs were not judged.", reasons)
    notable = [metric for metric in comparison.gated if metric.decision is not Decision.PASS]
    reasons = tuple(metric_sentence(metric) for metric in notable)
    reasons += tuple(
        f"Required {result.requirement}, measured {'nothing' if result.value is None else format_number(result.value)}."
        for result in comparison.requirements
        if not result.is_met
    )
    return VerdictLine(LEVELS.get(verdict, str(verdict)), WORDS[verdict], _sentence(comparison), reasons)


def _sentence(comparison: Comparison) -> str:
    names = ", ".join(metric.name for metric in comparison.gated if metric.decision is comparison.verdict)
    bound = _percent(comparison)
    match comparison.verdict:
        case Decision.REGRESSION:
            return f"B is worse than A in {names}, by {bound} % or more."
        case Decision.INCONCLUSIVE:
            return f"These runs neither show nor rule out a change of {bound} % in {names}."
        case Decision.IMPROVEMENT:
            return f"B is better than A in {names} and nowhere worse by {bound} %."
        case Decision.PASS:
            return f"No gated metric is worse by {bound} %."
        case Decision.NOT_MEASURED:
            return f"A gated metric is missing: {names}."


def _percent(comparison: Comparison) -> str:
    """The smallest effect of interest, as people write it."""
    return f"{100 * max(comparison.options.min_effect, LEAST_EFFECT):g}"


def metric_sentence(metric: MetricResult) -> str:
    """One metric's effect, interval and decision in a sentence."""
    if metric.decision is Decision.NOT_MEASURED:
        return f"{metric.name}: not measured in every run."
    text = f"{metric.name}: {change_text(metric)}, {metric.decision}."
    if metric.decision is Decision.INCONCLUSIVE:
        text += f" These runs could have shown {format_number(metric.smallest_effect)} {metric.change_unit}."
    return text


def change_text(metric: MetricResult) -> str:
    """`+4.20 % (+1.10 to +7.30)`."""
    change = metric.change
    if change.value != change.value:
        return "no pairs yet"
    value, lo, hi = (f"{each:+.2f}" for each in (change.value, change.lo, change.hi))
    return f"{value} {metric.change_unit} ({lo} to {hi})"


def metrics_table(comparison: Comparison) -> pd.DataFrame:
    """A row per metric: medians of both sides, change with its interval, decision, smallest effect shown."""
    return pd.DataFrame(
        {
            "metric": f"{metric.name} {metric.direction.mark}",
            "A": _shown(metric, metric.a),
            "B": _shown(metric, metric.b),
            "change of B": Estimate(metric.change.value, metric.change.lo, metric.change.hi, is_change=True),
            "unit": metric.change_unit,
            "decision": str(metric.decision) if metric.is_gated else f"{UNGATED[metric.decision]}, not gated",
            "could show": metric.smallest_effect,
        }
        for metric in comparison.metrics
    )


def _shown(metric: MetricResult, value: float | None) -> float | None:
    return None if value is None else 100 * value if metric.is_share else value


def requirements_table(comparison: Comparison) -> pd.DataFrame:
    """A row per fixed limit on side B."""
    return pd.DataFrame(
        {"requirement": str(each.requirement), "B, median": each.value, "met": "yes" if each.is_met else "no"}
        for each in comparison.requirements
    )


def pairs_frame(comparison: Comparison) -> pd.DataFrame:
    """Every pair's change of each metric, as people say it: metric, pair, change, worse (more than the limit)."""
    rows = []
    for metric in comparison.metrics:
        if metric.is_share:
            continue
        turn = -1.0 if metric.direction == "higher" else 1.0
        for number, d in enumerate(metric.d, 1):
            rows.append({"metric": metric.name, "pair": number, "change": 100 * np.expm1(turn * d), "worse": d > 0})
    return pd.DataFrame(rows, columns=["metric", "pair", "change", "worse"])


def _metric_blocks(comparison: Comparison) -> tuple[Block, ...]:
    over, looks = ("runs", "") if comparison.is_stored else ("pairs", " that hold over repeated looks")
    note = (
        f"Medians of each side; latencies in ms, shares in %. Change of B against A: the mean over {over}, with "
        f"bounds{looks}. Could show: the change these {over} show in four of five cases."
    )
    table = Table("", metrics_table(comparison), note)
    frame = pairs_frame(comparison)
    if not len(frame):
        return (table,)
    bound = 100 * max(comparison.options.min_effect, LEAST_EFFECT)
    metrics = frame["metric"].nunique()
    plot = Plot(
        "pairs",
        "Change of B in every pair",
        f"One dot a pair. The band is a change of {_percent(comparison)} %, below which nothing is called worse.",
        f"Dot plot of the percent change of B against A: {metrics} metrics, {comparison.num_pairs} pairs.",
        lambda size: plots.pair_dots(frame, bound, size),
        is_full_width=True,
    )
    return (table, plot)


def _design(comparison: Comparison) -> Facts:
    options = comparison.options
    first, last = options.looks[0], options.looks[-1]
    looked = f"after {first} pairs" if first == last else f"after each pair from {first} to {last}"
    if comparison.is_stored:
        looked = "once, after all runs"
    facts = (
        ("runs", comparison.size),
        ("looked", looked),
        ("gated", ", ".join(options.gated)),
        ("smallest effect", f"{_percent(comparison)} %; error rate {100 * options.error_points:g} points"),
        ("statistic", STORED_STATISTIC if comparison.is_stored else PAIRED_STATISTIC),
        ("exit code", str(comparison.exit_code)),
    )
    return Facts((("Design", facts),))

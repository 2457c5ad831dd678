"""The report of a comparison: verdict, metrics, pairs, notes, and a description of the runs."""

import math
from collections.abc import Sequence

import numpy as np
import pandas as pd

from reports.document import Block, Estimate, Facts, Plot, Report, Section, Table, Text, VerdictLine, format_number
from reports.gate.comparison import CLEAR_EFFECT, MIN_EFFECT, Comparison, MetricResult
from reports.gate.decide import GateDecision
from reports.gate.noise_split import components_table
from reports.gate.pairs_needed import pairs_needed
from reports.metrics.titles import limits_text, metric_heading, percent_title
from reports.pages.comparison_runs import DIFFERENCE
from reports.plots import comparison_plots

VERDICT_WORDS = {
    GateDecision.REGRESSION: "Regression",
    GateDecision.INCONCLUSIVE: "Inconclusive",
    GateDecision.PASS: "Pass",
    GateDecision.IMPROVEMENT: "Improvement",
    GateDecision.NOT_MEASURED: "Could not measure",
}
UNGATED_WORDS = {
    GateDecision.REGRESSION: "worse",
    GateDecision.INCONCLUSIVE: "inconclusive",
    GateDecision.PASS: "not worse",
    GateDecision.IMPROVEMENT: "better",
    GateDecision.NOT_MEASURED: "not measured",
}
PAIRED_STATISTIC = "mean of ln(B / A) over pairs; Student bounds at Pocock's level, Holm's order over metrics"
ADJUSTED_STATISTIC = (
    "intercept of ln(B / A) over pairs on the logarithm of the ratio of contention (least squares, one degree of "
    "freedom for the slope); Student bounds at Pocock's level, Holm's order over metrics"
)
STORED_STATISTIC = "difference of mean ln of the runs; Welch's bounds, Holm's order over metrics"
VERDICT_LEVELS = {GateDecision.NOT_MEASURED: "invalid"}


def build_comparison_report(
    comparison: Comparison, reproduce: Sequence[str] = (), of_runs: Sequence[Section] = ()
) -> Report:
    """The report of a comparison. reproduce: command lines that repeat it. of_runs: sections about its runs."""
    sections = [each for each in of_runs if each.title == DIFFERENCE]
    if comparison.metrics:
        sections.append(Section("Metrics", _metric_blocks(comparison)))
    if comparison.requirements:
        sections.append(Section("Requirements", (Table("", requirements_table(comparison)),)))
    sections += _noise_sections(comparison)
    sections.append(Section("Method", (_design(comparison), *(Text(_as_sentence(note)) for note in comparison.notes))))
    sections += [each for each in of_runs if each.title != DIFFERENCE]
    if reproduce:
        sections.append(Section("Reproduce", tuple(Text(line, is_code=True) for line in reproduce)))
    heading = f"{comparison.label_b} against {comparison.label_a}"
    subtitle = " · ".join(filter(None, (comparison.size, comparison.setting)))
    return Report(heading, subtitle, (verdict_line(comparison),), tuple(sections))


def _as_sentence(note: str) -> str:
    """The note with a capital letter and a full stop."""
    return f"{note[:1].upper()}{note[1:].rstrip('.')}."


def verdict_line(comparison: Comparison) -> VerdictLine:
    """The verdict, its sentence, and a reason for each gated metric with another decision than pass."""
    verdict = comparison.verdict
    if comparison.refusals:
        reasons = tuple(f"{refusal.message[:1].upper()}{refusal.message[1:]}." for refusal in comparison.refusals)
        return VerdictLine("invalid", VERDICT_WORDS[verdict], "The runs were not compared.", reasons)
    notable = [metric for metric in comparison.gated if metric.decision is not GateDecision.PASS]
    reasons = tuple(metric_sentence(metric) for metric in notable)
    reasons += tuple(
        f"Required {limits_text([str(result.requirement)])}, "
        f"measured {'nothing' if result.value is None else format_number(result.value)}."
        for result in comparison.requirements
        if not result.is_met
    )
    return VerdictLine(
        VERDICT_LEVELS.get(verdict, str(verdict)), VERDICT_WORDS[verdict], _sentence(comparison), reasons
    )


def _sentence(comparison: Comparison) -> str:
    found = [title(metric) for metric in comparison.gated if metric.decision is comparison.verdict]
    names = " and ".join(filter(None, (", ".join(found[:-1]), *found[-1:])))
    bound = _percent(comparison)
    match comparison.verdict:
        case GateDecision.REGRESSION:
            return f"B is worse than A in {names}, by {bound} % or more."
        case GateDecision.INCONCLUSIVE:
            sentence = f"These runs neither show nor exclude a change of {bound} % in {names}."
            needed = pairs_needed(comparison)
            return (
                sentence
                if needed is None
                else (
                    f"{sentence} With about {needed:,} pairs, 80 % of comparisons find a regression of "
                    f"{CLEAR_EFFECT * float(bound):g} %."
                )
            )
        case GateDecision.IMPROVEMENT:
            return f"B is better than A in {names}, and no gated metric is worse by {bound} %."
        case GateDecision.PASS:
            return f"No gated metric is worse by {bound} %."
        case GateDecision.NOT_MEASURED:
            return f"A gated metric was not measured: {names}."


def _percent(comparison: Comparison) -> str:
    """The smallest effect of interest, in percent."""
    return f"{100 * max(comparison.options.min_effect, MIN_EFFECT):g}"


def metric_sentence(metric: MetricResult) -> str:
    """A sentence with the effect, the interval and the decision of one metric."""
    if metric.decision is GateDecision.NOT_MEASURED:
        return f"{title(metric)}: not measured in every run."
    text = f"{title(metric)}: {change_text(metric)}, {metric.decision}."
    if metric.decision is GateDecision.INCONCLUSIVE and math.isfinite(metric.smallest_effect):
        size = f"{format_number(metric.smallest_effect)} {metric.change_unit}"
        text += f" A regression of {size} is found in 80 % of such comparisons."
    return text


def title(metric: MetricResult) -> str:
    """The title of a metric without its unit, for sentences: `TTFT p95`."""
    return metric_heading(metric.name)


def change_text(metric: MetricResult) -> str:
    """The change of a metric with its interval: `+4.2 % (+1.1 to +7.3)`."""
    change = _change(metric)
    if change.value != change.value:
        return "no pairs yet"
    return f"{change.text} {metric.change_unit} ({change.interval})"


def _change(metric: MetricResult) -> Estimate:
    return Estimate(metric.change.value, metric.change.lo, metric.change.hi, is_change=True)


def metrics_table(comparison: Comparison) -> pd.DataFrame:
    """A row per metric: medians of both sides, change with interval, regression that is found in 80 %, decision."""
    return pd.DataFrame(
        {
            "metric": _row_title(metric),
            "A": _shown(metric, metric.a),
            "B": _shown(metric, metric.b),
            "change of B": _change(metric),
            "found in 80 %": metric.smallest_effect,
            "unit of both": metric.change_unit,
            "decision": str(metric.decision) if metric.is_gated else f"{UNGATED_WORDS[metric.decision]}, not gated",
        }
        for metric in comparison.metrics
    )


def _row_title(metric: MetricResult) -> str:
    """The title of a metric with its unit and direction: `TTFT p95, ms ↓`. Fractions are in percent."""
    return f"{percent_title(metric.name)} {metric.direction.mark}"


def _shown(metric: MetricResult, value: float | None) -> float | None:
    return None if value is None else 100 * value if metric.is_fraction else value


def requirements_table(comparison: Comparison) -> pd.DataFrame:
    """A row per fixed limit on side B."""
    return pd.DataFrame(
        {
            "requirement": limits_text([str(each.requirement)]),
            "B, median": each.value,
            "met": "yes" if each.is_met else "no",
        }
        for each in comparison.requirements
    )


def pairs_frame(comparison: Comparison) -> pd.DataFrame:
    """The change of each metric in each pair: metric, pair, change in percent, worse."""
    rows = []
    for metric in comparison.metrics:
        if metric.is_fraction:
            continue
        sign = -1.0 if metric.direction == "higher" else 1.0
        for number, d in enumerate(metric.d, 1):
            rows.append({"metric": title(metric), "pair": number, "change": 100 * np.expm1(sign * d), "worse": d > 0})
    return pd.DataFrame(rows, columns=["metric", "pair", "change", "worse"])


def _metric_blocks(comparison: Comparison) -> tuple[Block, ...]:
    over, looks = ("runs", "") if comparison.is_stored else ("pairs", " that are valid over repeated looks")
    note = (
        f"Medians of each side; latencies in ms, fractions in %. Change of B against A: the mean over {over}, with "
        f"bounds{looks}. Found in 80 %: the regression that 80 % of comparisons find, with so many {over} and this "
        "noise."
    )
    table = Table("", metrics_table(comparison), note)
    decided, frame = _forest(comparison), pairs_frame(comparison)
    if not len(frame):
        return (*decided, table)
    bound = 100 * max(comparison.options.min_effect, MIN_EFFECT)
    metrics = frame["metric"].nunique()
    plot = Plot(
        "pairs",
        "Change of B in every pair",
        f"One dot per pair. The grey band is ±{_percent(comparison)} %, the smallest effect of interest.",
        f"Dot plot of the percent change of B against A: {metrics} metrics, {comparison.num_pairs} pairs.",
        lambda size: comparison_plots.pair_dots(frame, bound, size),
        is_full_width=True,
    )
    return (*decided, table, plot)


def forest_frame(comparison: Comparison) -> pd.DataFrame:
    """The change of each gated metric except fractions: name, value, lo, hi, worse, decided."""
    rows = []
    for metric in comparison.gated:
        change = metric.change
        if metric.is_fraction or not math.isfinite(change.value):
            continue
        lo, hi = (end if math.isfinite(end) else math.nan for end in (change.lo, change.hi))
        rows.append(
            {
                "name": f"{title(metric)} {metric.direction.mark}",
                "value": change.value,
                "lo": lo,
                "hi": hi,
                "worse": metric.decision is GateDecision.REGRESSION,
                "decided": metric.decision in (GateDecision.REGRESSION, GateDecision.IMPROVEMENT, GateDecision.PASS),
            }
        )
    return pd.DataFrame(rows)


def _forest(comparison: Comparison) -> tuple[Block, ...]:
    frame = forest_frame(comparison)
    if not len(frame):
        return ()
    bound = 100 * max(comparison.options.min_effect, MIN_EFFECT)
    changes = "; ".join(
        f"{title(metric)} {change_text(metric)}" for metric in comparison.gated if not metric.is_fraction
    )
    return (
        Plot(
            "forest",
            "Change of the gated metrics",
            f"Change of B with its bounds; red: worse, green: decided and not worse, grey: undecided. The band is "
            f"±{_percent(comparison)} %.",
            f"Forest plot of the change of B against A: {changes}.",
            lambda size: comparison_plots.forest(frame, bound, "%", size),
            is_full_width=True,
            height=0.28 + 0.1 * len(frame),
        ),
    )


NOISE_NOTE = (
    "Standard deviations in %; fractions in percentage points. Launch: between launches of one server. Drift: between "
    "the two halves of a pair. Within run: of one slice. Pair: of the change in one pair, here and in two separate "
    "runs of the same length. One value per pair of launches enters the test, so launch noise is part of every bound."
)
INTERLEAVED = (
    "both servers of a pair are launched once; slices alternate A B B A, and the next pair begins with B; the other "
    "server is idle; both slices of a slice pair send the same texts, which are new to both servers"
)


def _noise_sections(comparison: Comparison) -> list[Section]:
    """The components of the noise, from the slices of interleaved pairs."""
    if not comparison.noise:
        return []
    return [Section("Noise", (Table("", components_table(comparison.noise), NOISE_NOTE),))]


def _design(comparison: Comparison) -> Facts:
    options = comparison.options
    first, last = options.looks[0], options.looks[-1]
    tested = f"after {first} pairs" if first == last else f"after each pair from {first} to {last}"
    if comparison.is_stored:
        tested = "once, after all runs"
    facts = (
        ("runs", comparison.size),
        *((("order", INTERLEAVED),) if comparison.slices > 1 else ()),
        ("tested", tested),
        ("gated", ", ".join(map(metric_heading, options.gated))),
        ("smallest effect", f"{_percent(comparison)} %; error rate {100 * options.error_points:g} points"),
        ("statistic", _statistic(comparison)),
        ("exit code", str(comparison.exit_code)),
    )
    return Facts((("Design", facts),))


def _statistic(comparison: Comparison) -> str:
    if comparison.is_stored:
        return STORED_STATISTIC
    return ADJUSTED_STATISTIC if comparison.options.equal_contention else PAIRED_STATISTIC

"""A comparison for continuous integration: JUnit, GitHub annotations and summary, GitLab metrics, a comment.

The caller passes a `CiEnvironment`; this module does not read the environment.
"""

import math
import platform
import re
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from reports.document import format_number, legible_report
from reports.gate.comparison import MIN_EFFECT, Comparison, MetricResult
from reports.gate.decide import GateDecision
from reports.gate.history import LevelChange
from reports.gate.requirements import RequirementResult
from reports.pages.comparison_page import (
    build_comparison_report,
    change_text,
    metric_sentence,
    title,
    verdict_line,
)
from reports.pages.history_page import full_change_sentence
from reports.renderers import markdown
from reports.text import plain_text

MAX_ANNOTATIONS = 10
MAX_SUMMARY_BYTES = 1024 * 1024
COMMENT_MARKER = "<!-- tgi-bench compare -->"
NOTABLE_IMPROVEMENT = 5.0


@dataclass(frozen=True, slots=True)
class CiEnvironment:
    """The CI environment: whether it supports annotations, and GitHub's files if they are set."""

    is_github: bool = False
    step_summary: Path | None = None
    step_output: Path | None = None


def write_ci(comparison: Comparison, environment: CiEnvironment, reproduce: Sequence[str] = ()) -> str:
    """Append to the files of the environment. Returns annotations for standard output; empty outside GitHub."""
    if environment.step_summary is not None:
        _append(environment.step_summary, step_summary(comparison, reproduce))
    if environment.step_output is not None:
        _append(environment.step_output, step_output(comparison))
    return annotations(comparison) if environment.is_github else ""


def _append(path: Path, text: str) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.write(text)


def junit(comparison: Comparison, wall_s: float, finished: datetime | None = None) -> bytes:
    """JUnit XML: one suite with a case per gated metric and requirement. Measured values are properties of the suite.

    A failure is a regression or a missed requirement, a skipped case is inconclusive, and an error is a metric that was
    not measured. The common schemas (Ant, Jenkins) allow properties only in suites, only times without a zone, and
    require both outputs at the end.
    """
    name = _one_line(f"compare {comparison.label_b} against {comparison.label_a}")
    started = (finished or datetime.now(UTC)) - timedelta(seconds=wall_s)
    suite = ElementTree.Element(
        "testsuite",
        name=name,
        package="tgi-bench",
        id="0",
        timestamp=f"{started:%Y-%m-%dT%H:%M:%S}",
        hostname=_one_line(platform.node()) or "localhost",
    )
    properties = ElementTree.SubElement(suite, "properties")
    for metric in comparison.gated:
        _add_properties(properties, comparison, metric)
    cases = [
        *(_metric_case(suite, metric) for metric in comparison.gated),
        *(_requirement_case(suite, result) for result in comparison.requirements),
    ]
    for number, refusal in enumerate(comparison.refusals, 1):
        case = _case(suite, "compare", f"runs {number}")
        _outcome(case, "error", GateDecision.NOT_MEASURED, refusal.message)
        cases.append(case)
    for tag, attribute in (("failure", "failures"), ("error", "errors"), ("skipped", "skipped")):
        suite.set(attribute, str(sum(case.find(tag) is not None for case in cases)))
    suite.set("tests", str(len(cases)))
    suite.set("time", f"{wall_s:.3f}")
    if cases:
        cases[0].set("time", f"{wall_s:.3f}")
    for output in ("system-out", "system-err"):
        ElementTree.SubElement(suite, output)
    root = ElementTree.Element("testsuites")
    root.append(suite)
    ElementTree.indent(root)
    return bytes(ElementTree.tostring(root, encoding="utf-8", xml_declaration=True)) + b"\n"


CASE_TAGS = {
    GateDecision.REGRESSION: "failure",
    GateDecision.INCONCLUSIVE: "skipped",
    GateDecision.NOT_MEASURED: "error",
}


def _add_properties(properties: ElementTree.Element, comparison: Comparison, metric: MetricResult) -> None:
    measured = {
        "a": metric.a,
        "b": metric.b,
        "change": metric.change.value,
        "change_lo": metric.change.lo,
        "change_hi": metric.change.hi,
        "smallest_effect": metric.smallest_effect,
        "pairs": float(comparison.num_pairs),
    }
    for name, value in measured.items():
        text = "" if value is None else f"{value:.6g}"
        ElementTree.SubElement(properties, "property", name=f"{metric.name}.{name}", value=text)


def _metric_case(suite: ElementTree.Element, metric: MetricResult) -> ElementTree.Element:
    case = _case(suite, "compare", metric.name)
    tag = CASE_TAGS.get(metric.decision)
    if tag is not None:
        limit = f"limit {100 * metric.limit:.3g} {metric.change_unit}"
        _outcome(case, tag, metric.decision, f"{metric_sentence(metric)} {limit}.")
    return case


def _requirement_case(suite: ElementTree.Element, result: RequirementResult) -> ElementTree.Element:
    case = _case(suite, "require", str(result.requirement))
    if not result.is_met:
        value = "nothing" if result.value is None else format_number(result.value)
        _outcome(case, "failure", "requirement", f"required {result.requirement}, measured {value}")
    return case


def _case(suite: ElementTree.Element, kind: str, name: str) -> ElementTree.Element:
    return ElementTree.SubElement(suite, "testcase", classname=kind, name=_one_line(name), time="0")


def _outcome(case: ElementTree.Element, tag: str, kind: str, message: str) -> None:
    ElementTree.SubElement(case, tag, type=str(kind), message=plain_text(message))


def annotations(comparison: Comparison) -> str:
    """GitHub workflow commands: errors for regressions, warnings for undecided metrics, notices for improvements."""
    lines = [f"::error title=Performance gate::{_escape(refusal.message)}" for refusal in comparison.refusals]
    lines += _annotated(comparison, "error", "Performance regression", GateDecision.REGRESSION)
    for result in comparison.requirements:
        if not result.is_met:
            lines.append(f"::error title=Requirement missed::{_escape(str(result.requirement))}")
    errors = lines[:MAX_ANNOTATIONS]
    warnings = _annotated(comparison, "warning", "Performance inconclusive", GateDecision.INCONCLUSIVE)
    warnings += _annotated(comparison, "warning", "Performance not measured", GateDecision.NOT_MEASURED)
    warnings += _noise_warning(comparison)
    improved = [
        f"::notice title=Performance improvement::{_escape(metric_sentence(metric))}"
        for metric in comparison.gated
        if metric.decision is GateDecision.IMPROVEMENT and abs(metric.change.value) > NOTABLE_IMPROVEMENT
    ]
    every = [*errors, *warnings[:MAX_ANNOTATIONS], *improved[:MAX_ANNOTATIONS]]
    return "".join(f"{line}\n" for line in every)


def _noise_warning(comparison: Comparison) -> list[str]:
    """A warning if the noise is high in undecided metrics."""
    bound = 100 * max(comparison.options.min_effect, MIN_EFFECT)
    beyond = [
        f"{title(metric)} {format_number(metric.smallest_effect)} %"
        for metric in comparison.gated
        if metric.decision is GateDecision.INCONCLUSIVE
        and not metric.is_fraction
        and metric.is_noisy
        and math.isfinite(metric.smallest_effect)
    ]
    if not beyond:
        return []
    message = (
        f"`min_effect` is {bound:g} % but with {comparison.num_pairs} pairs and this noise, 80 % of comparisons find "
        f"only a regression of this size: {', '.join(beyond)}. Use longer runs, more pairs or a larger `min_effect`."
    )
    return [f"::warning title=Performance gate::{_escape(message)}"]


def change_annotations(changes: Sequence[LevelChange]) -> str:
    """GitHub workflow commands for changes in the history: warnings, and notices for improvements."""
    lines = []
    for change in changes:
        command = "warning" if change.is_worse else "notice"
        lines.append(f"::{command} title=Performance history::{_escape(full_change_sentence(change))}")
    return "".join(f"{line}\n" for line in lines[-MAX_ANNOTATIONS:])


def _annotated(comparison: Comparison, command: str, title: str, decision: GateDecision) -> list[str]:
    return [
        f"::{command} title={title}::{_escape(metric_sentence(metric))}"
        for metric in comparison.gated
        if metric.decision is decision
    ]


def _escape(message: str) -> str:
    """The data of a workflow command, escaped to one line.

    >>> _escape("100 %\\nworse")
    '100 %25%0Aworse'
    """
    return message.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def step_summary(comparison: Comparison, reproduce: Sequence[str] = ()) -> str:
    """Markdown for the page of the job, below 1 MiB: verdict, table, pairs as text, command lines."""
    report = markdown.render(legible_report(build_comparison_report(comparison, reproduce))).decode()
    without_figures = re.sub(r"^!\[.*\]\(figures/.*\)\n\n\*.*\*\n", _dots_block(comparison), report, flags=re.MULTILINE)
    content = without_figures.encode()
    if len(content) >= MAX_SUMMARY_BYTES:
        content = content[: MAX_SUMMARY_BYTES - 64] + b"\n\n(truncated at 1 MiB)\n"
    return content.decode(errors="ignore")


def _dots_block(comparison: Comparison) -> str:
    return f"```\n{dot_plot(comparison)}\n```\n".replace("\\", "\\\\")


def dot_plot(comparison: Comparison, columns: int = 41) -> str:
    """The pairs of each gated metric as text: a dot for one pair, a number for several pairs at the same place.

    `|` marks the place of no change.
    """
    lines = []
    width = max((len(title(metric)) for metric in comparison.gated), default=0)
    for metric in comparison.gated:
        if not metric.d:
            continue
        reach = max(*(abs(d) for d in metric.d), 2 * metric.limit)
        places = Counter(round((d / reach + 1) / 2 * (columns - 1)) for d in metric.d)
        cells = ["|" if place == columns // 2 else " " for place in range(columns)]
        for place, count in places.items():
            cells[place] = "•" if count == 1 else str(count) if count < 10 else "+"
        lines.append(f"{title(metric):<{width}}  better [{''.join(cells)}] worse  {change_text(metric)}")
    return "\n".join(lines)


def step_output(comparison: Comparison) -> str:
    """Lines for GitHub's step output: verdict, worst_metric, worst_effect."""
    worst = comparison.worst
    name, effect = ("", "") if worst is None else (worst.name, f"{worst.change.value:.4g}")
    return f"verdict={comparison.verdict}\nworst_metric={name}\nworst_effect={effect}\n"


def gitlab_metrics(comparison: Comparison) -> str:
    """GitLab's metrics report: `name value` lines in OpenMetrics text."""
    lines = []
    for metric in comparison.metrics:
        name = re.sub(r"[^a-zA-Z0-9_]", "_", metric.name)
        for side, value in (("a", metric.a), ("b", metric.b)):
            if value is not None:
                lines.append(f'tgi_bench_{name}{{side="{side}"}} {value:.6g}')
    return "".join(f"{line}\n" for line in lines)


def comment(comparison: Comparison, reproduce: Sequence[str] = ()) -> str:
    """Markdown for a comment, with a hidden marker by which a bot finds the comment to update it."""
    line = verdict_line(comparison)
    return f"{COMMENT_MARKER}\n<!-- verdict: {line.level} -->\n{step_summary(comparison, reproduce)}"


def _one_line(value: str) -> str:
    """The text on one line, without spaces at its ends."""
    return " ".join(plain_text(value).split())

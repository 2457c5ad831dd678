"""The report of a sweep or a search: load points, curve, knee, and the highest load within the objectives."""

import dataclasses
import math
import shlex
from collections.abc import Sequence

import pandas as pd

from reports.document import Block, Estimate, Report, Section, Table, Text, VerdictLine, format_number
from reports.metrics.summary import Analysis
from reports.metrics.sweep import LoadPoint, SloDecision, Sweep
from reports.pages.run_pages import run_link, runs_section
from reports.pages.sections.facts import load_sentence, run_facts, start_time
from reports.pages.sections.latency_tables import UNSUPPORTED, scaled
from reports.pages.sections.objectives import UNCERTAIN, marked_statistic, objective_results, statistic
from reports.pages.sections.request_tables import failed_requests
from reports.pages.sections.time_breakdown import time_section
from reports.pages.sweep_figures import (
    CURVES,
    LATENCIES,
    attainment_plot,
    latency_of_curve,
    latency_plots,
    load_text,
    load_unit,
    throughput_plots,
)
from reports.stats.capacity import Capacity


def build_sweep_report(sweep: Sweep) -> Report:
    """The report of a sweep or a search."""
    manifest = sweep.points[0].first.run.manifest
    model = manifest.model or "unknown model"
    loads = f"{len(sweep.points)} loads from {sweep.points[0].load:g} to {sweep.points[-1].load:g} {load_unit(sweep)}"
    word = "Search" if sweep.search else "Sweep"
    sections = (
        Section("Summary", _summary(sweep)),
        *time_section([point.first.named(load_text(sweep, point.load)) for point in sweep.points]),
        Section("Setup", (run_facts(_without_load(sweep)), Text(_order(sweep)))),
        runs_section(_runs(sweep)),
        *(() if not sweep.command else (Section("Reproduce", (Text(shlex.join(sweep.command), is_code=True),)),)),
    )
    title = point_label(sweep) or f"{word} over {sweep.quantity}"
    subtitle = " · ".join((str(model), load_sentence(manifest).split(",")[0], loads, start_time(manifest)))
    return Report(title, subtitle, (verdict(sweep),), sections)


def _runs(sweep: Sweep) -> list[tuple[str, Analysis]]:
    """Every run with its load; several runs of a load are numbered."""
    found = []
    for point in sweep.points:
        for number, analysis in enumerate(point.analyses, 1):
            suffix = f", run {number}" if len(point.analyses) > 1 else ""
            found.append((load_text(sweep, point.load) + suffix, analysis))
    return found


def linked_points(sweep: Sweep) -> pd.DataFrame:
    """The table of the points; each load links to the page of its first run."""
    table = points_table(sweep)
    loads = zip(table[load_unit(sweep)], sweep.points, strict=True)
    table[load_unit(sweep)] = pd.Series(
        [run_link(text, point.first.run.directory) for text, point in loads], dtype=object
    )
    return table


def _without_load(sweep: Sweep) -> Analysis:
    """The first point's analysis, without the facts that differ between points."""
    analysis = sweep.points[0].first
    manifest = analysis.run.manifest
    config = {name: value for name, value in manifest.config.items() if name != sweep.quantity}
    bare = dataclasses.replace(manifest, label="", slots=None, config=config)
    return dataclasses.replace(analysis, run=dataclasses.replace(analysis.run, manifest=bare))


def point_label(sweep: Sweep) -> str:
    """The configured label of the runs, or an empty text: without one, a point has its load as label."""
    label = sweep.points[0].first.run.manifest.label
    return "" if label == f"{sweep.quantity} {sweep.points[0].load:g}" else label


def verdict(sweep: Sweep) -> VerdictLine:
    """The verdict on all points, with the reasons of the invalid ones."""
    reasons = tuple(
        f"{load_text(sweep, point.load)}: {reason['message']}"
        for point in sweep.invalid
        for analysis in point.analyses
        for reason in analysis.summary["verdict"]["reasons"]
        if reason["level"] == "invalid"
    )
    level = "invalid" if reasons else "valid" if sweep.search is None else sweep.search[0]
    sentences = [_answer(sweep) if sweep.search is None else sweep.search[1]]
    knee = sweep.knee
    if knee is not None:
        speed = _speed(knee).text
        sentences.append(f"The knee is at {load_text(sweep, knee.load)} with {speed} output tokens/s.")
    if sweep.has_objectives and sweep.search is None:
        sentences.append(_within_sentence(sweep))
    if sweep.search is None and _still_grows(sweep):
        sentences.append(f"The server is not saturated: try more than {load_text(sweep, sweep.points[-1].load)}.")
    return VerdictLine(level, _word(level, has_reasons=bool(reasons)), " ".join(sentences), reasons)


def _word(level: str, *, has_reasons: bool) -> str:
    if has_reasons:
        return "Some points are not valid measurements"
    words = {"inconclusive": "Inconclusive", "invalid": "Objectives missed at every load"}
    return words.get(level, "Valid measurements")


def _answer(sweep: Sweep) -> str:
    """The numbers at the best load: the highest load within the objectives, else the load with the most tokens/s."""
    best = sweep.within or max(sweep.points, key=lambda point: point.value("output_tokens_per_s") or 0.0)
    parts = [f"{_speed(best).text} output tokens/s"]
    curve = latency_of_curve(sweep)
    found = latency(best, curve)
    if found is not None:
        parts.append(f"{CURVES[curve]} {found.text if isinstance(found, Estimate) else format_number(found)} ms")
    return f"{load_text(sweep, best.load)}: {', '.join(parts)}{_objectives_of(best)}."


def _speed(point: LoadPoint) -> Estimate:
    """The output tokens/s of the point's first run."""
    return scaled(point.first.summary["rates"]["output_tokens_per_s"], 1.0)


def _objectives_of(point: LoadPoint) -> str:
    """Whether a point meets every objective, or the objectives that it misses; empty without a decision."""
    judged = [each for each in objective_results(point.first) if each.is_met is not None]
    missed = [each.text for each in judged if not each.is_met]
    if missed:
        return f"; missed: {'; '.join(missed)}"
    if not judged:
        return ""
    if all(each.is_supported for each in judged):
        return "; all objectives met"
    return f"; all objectives met in this run, but {UNCERTAIN}"


def _still_grows(sweep: Sweep) -> bool:
    """Whether the intervals of the last two points show that throughput still grows with load."""
    if len(sweep.points) < 2 or sweep.points[-1].is_overloaded:
        return False
    before, last = (point.first.summary["rates"]["output_tokens_per_s"] for point in sweep.points[-2:])
    return before["hi"] is not None and last["lo"] is not None and bool(last["lo"] > before["hi"])


def _within_sentence(sweep: Sweep) -> str:
    found, target = sweep.within, f"{100 * sweep.target:g} % of requests within the objectives"
    if found is None:
        return f"No load reached {target}."
    if found is sweep.points[-1]:
        return f"Even the highest load, {load_text(sweep, found.load)}, reached {target}."
    return f"{load_text(sweep, found.load)} is the last load that reached {target}."


SLO_DECISION_TEXT = {
    SloDecision.WITHIN: "within",
    SloDecision.BEYOND: "beyond",
    SloDecision.UNDECIDED: "undecided",
    None: "",
}


def points_table(sweep: Sweep) -> pd.DataFrame:
    """A row per load point: throughput, latencies, failures, and the SLO decision."""
    return pd.DataFrame(_row(sweep, point) for point in sweep.points)


def _row(sweep: Sweep, point: LoadPoint) -> dict[str, object]:
    summary = point.first.summary
    rates = {name: scaled(summary["rates"][name], 1.0) for name in RATES}
    row: dict[str, object] = {
        load_unit(sweep): f"{point.load:g}",
        "Output tokens/s ↑": rates["output_tokens_per_s"],
        "Requests/s ↑": rates["requests_per_s"].value,
        **{f"{title}, ms ↓": latency(point, name) for title, name in LATENCIES.items()},
        "failed ↓": f"{failed_requests(point.first):,} of {sum(summary['counts'].values()):,}",
    }
    attainment = point.attainment
    if attainment is not None:
        lo, hi = (None if math.isnan(bound) else 100 * bound for bound in (attainment.lo, attainment.hi))
        row["met, %"] = Estimate(100 * attainment.value, lo, hi, is_supported=lo is not None)
        row["objectives"] = "overloaded" if point.is_overloaded else SLO_DECISION_TEXT[point.slo_decision(sweep.target)]
    if sweep.invalid:
        row["measurement"] = "valid" if point.is_valid else "invalid"
    return row


def latency(point: LoadPoint, name: str) -> Estimate | float | None:
    """A latency of the point's first run; an unsupported value has its mark."""
    return marked_statistic(point.first, name)


INTERVALS_NOTE = (
    f"Beside or below a value: its 95 % interval. The page of a run has those of the other values. {UNSUPPORTED}"
)
RATES = ("output_tokens_per_s", "requests_per_s")


def _note(sweep: Sweep) -> str:
    runs = sum(len(point.analyses) for point in sweep.points)
    note = f"{runs} runs, each in its own directory; a load links to the page of its run. {INTERVALS_NOTE}"
    if runs > len(sweep.points):
        note += " For a load with several runs, the attainment is that of all its runs."
    return note


def _order(sweep: Sweep) -> str:
    return "Order of measurement: " + ", ".join(f"{load:g}" for load in sweep.order) + "." if sweep.order else ""


def _summary(sweep: Sweep) -> tuple[Block, ...]:
    """The figures of the answer, the table, and the other figures."""
    answer, other = throughput_plots(sweep), attainment_plot(sweep)
    if sweep.search is not None and other:
        answer, other = (*other, *answer[:1]), answer[1:]
    return (*answer, Table("", linked_points(sweep), _note(sweep)), *other, *latency_plots(sweep))


def sweep_json(sweep: Sweep) -> dict[str, object]:
    """The content of `sweep.json`."""
    return {
        "quantity": sweep.quantity,
        "target": sweep.target,
        "capacity": _capacity_json(sweep.capacity),
        "knee": sweep.knee.load if sweep.knee else None,
        "highest_within": sweep.within.load if sweep.within else None,
        "points": [_point_json(sweep, point) for point in sweep.points],
    }


def _is_supported(point: LoadPoint, name: str) -> bool:
    found = statistic(point.first, name)
    return found is None or found.value is None or found.is_supported


def _capacity_json(capacity: Capacity | None) -> dict[str, float | None] | None:
    """The load at which attainment equals the target, with its 95 % interval; None if the sweep is not a search."""
    if capacity is None:
        return None
    return {name: _finite(getattr(capacity.interval, name)) for name in ("value", "lo", "hi")}


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _point_json(sweep: Sweep, point: LoadPoint) -> dict[str, object]:
    attainment = point.attainment
    names: Sequence[str] = (*RATES, *LATENCIES.values(), "error_rate")
    return {
        "load": point.load,
        "is_valid": point.is_valid,
        "runs": [str(each.run.directory.name) for each in point.analyses if each.run.directory],
        "metrics": {name: point.value(name) for name in names},
        "unsupported": [name for name in names if not _is_supported(point, name)],
        "attainment": None
        if attainment is None
        else {name: _finite(getattr(attainment, name)) for name in ("value", "lo", "hi")},
        "is_overloaded": point.is_overloaded,
        "standing": None if attainment is None else str(point.slo_decision(sweep.target)),
    }

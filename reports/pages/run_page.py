"""The report of one or several runs."""

import shlex
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from reports.document import (
    Block,
    Facts,
    Plot,
    Report,
    Section,
    Table,
    Text,
    VerdictLine,
    about,
    format_number,
    format_percent,
)
from reports.metrics.checks.findings import finding_messages, is_overloaded
from reports.metrics.checks.overload import MAX_REFUSED
from reports.metrics.replicas import replicas_table
from reports.metrics.requests.per_request import primary_latency
from reports.metrics.server.server_replicas import server_replicas_table
from reports.metrics.summary import Analysis
from reports.pages.sections import health, latency_tables, request_tables, run_figures, run_tables
from reports.pages.sections.across_runs import across_section
from reports.pages.sections.adapters import adapters_section
from reports.pages.sections.facts import facts_of_runs, load_sentence, start_time
from reports.pages.sections.objectives import objectives_table, statistic
from reports.pages.sections.run_summary import summary_blocks
from reports.pages.sections.speculation import speculation_section
from reports.pages.sections.structured import structured_section
from reports.pages.sections.time_breakdown import time_section
from reports.plots import run_plots
from reports.text import legible


def build_run_report(analyses: Sequence[Analysis]) -> Report:
    """The report of analysed runs."""
    assert analyses, "a report needs a run"
    across, title = across_section(analyses), _title(analyses)
    analyses = _with_unique_labels(analyses)
    sections = (
        Section("Summary", summary_blocks(analyses)),
        *across,
        Section("Throughput", _throughput_blocks(analyses)),
        Section("Latency", _latency_blocks(analyses)),
        Section("Requests", _request_blocks(analyses)),
        *_objective_section(analyses),
        *structured_section(analyses),
        *adapters_section(analyses),
        *speculation_section(analyses),
        *_replica_section(analyses),
        *_server_section(analyses),
        *time_section(analyses),
        Section(
            "Load generator", (Table("", run_tables.generator_table(analyses)), *health.generator_blocks(analyses))
        ),
        Section("Setup", facts_of_runs(analyses)),
        Section("Reproduce", _repeat_blocks(analyses), is_closed=True),
        Section("Definitions", (Table("", run_tables.definitions_table()), Text(READING)), is_closed=True),
    )
    return Report(title, _subtitle(analyses), _verdicts(analyses), sections)


def _with_unique_labels(analyses: Sequence[Analysis]) -> list[Analysis]:
    """The runs with legible labels; equal labels are numbered, because tables have a column per label."""
    counts = Counter(analysis.label for analysis in analyses)
    seen: Counter[str] = Counter()
    labelled = []
    for analysis in analyses:
        seen[analysis.label] += 1
        label = legible(analysis.label)
        labelled.append(analysis.named(f"{label} #{seen[analysis.label]}" if counts[analysis.label] > 1 else label))
    return labelled


READING = (
    "Intervals are 95 %: from the autocorrelation of the requests for latencies, by moving-block bootstrap for gaps, "
    "from the requests for rates of an open loop, by batch means for those of a closed loop, by Wilson for fractions. "
    "Requests in one queue depend on each other: a value marked ~ has too few independent requests for an interval. "
    "Latencies are those of requests that started in the measurement window; rates count events inside it."
)


def _title(analyses: Sequence[Analysis]) -> str:
    """The different labels."""
    return " · ".join(dict.fromkeys(analysis.label for analysis in analyses))


def _subtitle(analyses: Sequence[Analysis]) -> str:
    manifests = [analysis.run.manifest for analysis in analyses]
    models = [each.model or "unknown model" for each in manifests]
    first, *_, last = sorted(manifests * 2, key=lambda each: each.started_at)
    times = dict.fromkeys((start_time(first), start_time(last)))
    parts = (_distinct(models, "models"), _distinct(map(load_sentence, manifests), "loads"), " to ".join(times))
    return " · ".join(part for part in parts if part)


def _distinct(values: Iterable[str], plural: str) -> str:
    """The different values of several runs; only their number if there are more than three."""
    found = dict.fromkeys(values)
    return "; ".join(found) if len(found) <= 3 else f"{len(found)} {plural}"


WORDS = {"valid": "Valid run", "degraded": "Degraded run", "invalid": "Not a valid measurement"}


def _verdicts(analyses: Sequence[Analysis]) -> tuple[VerdictLine, ...]:
    """A verdict for each run that is not simply valid, and one for all valid runs."""
    valid = [each for each in analyses if not _has_findings(each)]
    if len(valid) < 2:
        return tuple(_verdict(each, analyses) for each in analyses)
    doubtful = (_verdict(each, analyses) for each in analyses if _has_findings(each))
    return (*doubtful, VerdictLine("valid", f"{len(valid)} valid runs", _best_of(valid)))


def _has_findings(analysis: Analysis) -> bool:
    verdict = analysis.summary["verdict"]
    return bool(verdict["status"] != "valid" or verdict["reasons"] or finding_messages(analysis.summary))


BEST_OF = (("output_tokens_per_s", "Most output tokens/s", "{}"), ("ttft_p95_ms", "Lowest TTFT p95", "{} ms"))


def _best_of(analyses: Sequence[Analysis]) -> str:
    """The run with the most output tokens/s and that with the lowest TTFT, with their values."""
    parts = []
    for name, text, form in BEST_OF:
        sign = -1 if name.endswith("_ms") else 1
        found = [(each, statistic(each, name)) for each in analyses]
        known = [(sign * value.value, each.label, value) for each, value in found if value and value.value is not None]
        if known:
            _, label, value = max(known, key=lambda each: each[:2])
            parts.append(f"{text}: {label}, {form.format(value.text)}.")
    return " ".join(parts)


def _verdict(analysis: Analysis, analyses: Sequence[Analysis]) -> VerdictLine:
    verdict = analysis.summary["verdict"]
    reasons = tuple(_sentence(reason["message"]) for reason in verdict["reasons"])
    label = analysis.label if len(analyses) > 1 else ""
    caution = "Use these numbers for orientation only, not for a decision. " if verdict["status"] == "invalid" else ""
    messages = finding_messages(analysis.summary)
    if is_overloaded(analysis.summary):
        messages = [each for each in messages if not each.startswith("overloaded:")]
    word = ", ".join((WORDS[verdict["status"]], *messages))
    if is_overloaded(analysis.summary):
        word = f"{_overload(analysis.summary['overload'])}. {word}"
    return VerdictLine(_level(analysis), word, caution + _headline(analysis), reasons, label)


MAX_FAILED = 0.02
"""Largest share of failed requests of a run whose first line is not a warning."""


def _level(analysis: Analysis) -> str:
    """The colour of the first line: a valid measurement of an overloaded or failing server is a warning."""
    status: str = analysis.summary["verdict"]["status"]
    total = sum(analysis.summary["counts"].values())
    is_failing = request_tables.failed_requests(analysis) > MAX_FAILED * total
    return "warning" if status == "valid" and (is_failing or is_overloaded(analysis.summary)) else status


def _overload(overload: Mapping[str, Any]) -> str:
    """The overload in a few words: the share of the refused requests, or growing latencies, and the rates."""
    refused, rates = overload["refused"], (overload["arrivals_per_s"], overload["completions_per_s"])
    cause = f"{format_percent(refused)} of requests refused" if refused > MAX_REFUSED else "latencies grow with time"
    arrivals, completions = (format_number(each) for each in rates)
    return f"Overloaded server: {cause}, arrivals {arrivals}/s, completions {completions}/s"


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:] + "."


def _headline(analysis: Analysis) -> str:
    """The main results in one sentence; empty if no request has an answer."""
    rates, metrics = analysis.summary["rates"], analysis.summary["metrics"]
    parts = []
    if rates["output_tokens_per_s"]["value"]:
        speed, users = (latency_tables.scaled(rates[name], 1.0) for name in ("output_tokens_per_s", "concurrency_mean"))
        parts.append(f"{speed.text} output tokens/s with {users.text} requests in flight on average")
    ttft = metrics[primary_latency("ttft_s", analysis.run.manifest.is_open_loop)]
    if ttft["count"]:
        median, p95 = (_duration(ttft["percentiles"][p]["value"], _mark(ttft, p)) for p in ("p50", "p95"))
        parts.append(f"TTFT is {median} at the median and {p95} at the 95th percentile")
    # Failed requests are a finding, which the line begins with.
    if not request_tables.failed_requests(analysis):
        parts.append(f"none of {sum(analysis.summary['counts'].values()):,} requests failed")
    return _sentence("; ".join(parts)) if parts else ""


def _mark(metric: Mapping[str, Any], name: str) -> str:
    """The mark of an unsupported percentile, as the tile and the tables have it."""
    found = latency_tables.percentile(metric, name)
    return "" if found.is_supported else found.text[:1]


def _duration(seconds: float, mark: str = "") -> str:
    """A duration in milliseconds, or in seconds from ten seconds on."""
    return f"{mark}{format_number(seconds)} s" if seconds >= 10 else f"{mark}{format_number(1e3 * seconds)} ms"


def _throughput_blocks(analyses: Sequence[Analysis]) -> tuple[Block, ...]:
    frame = run_figures.timelines(analyses)
    plot = Plot(
        "load_over_time",
        "Requests in flight and TTFT over time",
        f"Crosses: failed requests. TTFT is that of requests that started then. {run_figures.shade_note(analyses)}",
        "Two line charts over the run: requests in flight with failures, and TTFT p50 and p95 in milliseconds.",
        lambda size: run_plots.load_timeline(frame, run_figures.windows_of(analyses), size),
        is_full_width=True,
        height=1.1,
    )
    return (Table("", run_tables.rates_table(analyses), "Value with its 95 % interval."), plot)


def _latency_blocks(analyses: Sequence[Analysis]) -> tuple[Block, ...]:
    blocks: list[Block] = []
    for analysis in analyses:
        title = analysis.label if len(analyses) > 1 else ""
        blocks.append(
            Table(
                title,
                latency_tables.latency_table(analysis),
                f"Mean and percentiles with 95 % intervals. {latency_tables.UNSUPPORTED} `needs`: about how many "
                "requests at this load give an interval, or an interval that is narrower than the value.",
            )
        )
        adjusted = latency_tables.adjusted_table(analysis)
        if len(adjusted):
            heading = "With failed requests as infinite latencies" + (f", {title}" if title else "")
            blocks.append(Table(heading, adjusted, "Each failed request counts as ∞."))
    blocks += run_figures.latency_blocks(analyses)
    return tuple(blocks)


ABANDONED_NOTE = (
    "Abandoned requests count in no latency and in no objective; their tokens count as output. If the server drops "
    "them, it contains about as many requests as are in flight."
)


def _request_blocks(analyses: Sequence[Analysis]) -> tuple[Block, ...]:
    errors = request_tables.error_table(analyses)
    causes = (Table("Errors", errors),) if len(errors) else ()
    abandoned = request_tables.abandoned_table(analyses)
    return (
        Table("Status", request_tables.status_table(analyses)),
        *causes,
        *((Table("Clients that left", abandoned, ABANDONED_NOTE),) if len(abandoned) else ()),
        Table("Actual lengths", request_tables.lengths_table(analyses)),
        Table("Finish reasons", request_tables.finish_table(analyses)),
    )


def _objective_section(analyses: Sequence[Analysis]) -> tuple[Section, ...]:
    blocks: list[Block] = []
    for analysis in analyses:
        frame = objectives_table(analysis)
        if len(frame):
            note = _attainment_note(analysis.summary["slo"]["attainment"])
            blocks.append(Table(analysis.label if len(analyses) > 1 else "", frame, note))
    return (Section("Objectives", tuple(blocks)),) if blocks else ()


def _attainment_note(share: Mapping[str, float | None]) -> str:
    """A sentence with the share of requests that meet every objective, and its interval or the requests it needs."""
    value, lo, hi = share["value"], share["lo"], share["hi"]
    if value is None:
        return ""
    needed = share.get("needed")
    if lo is None or hi is None:
        needs = f", about {about(int(needed)):,} are needed" if needed else ""
        reason = f"unsupported: too few requests for an interval{needs}"
    else:
        reason = f"{100 * lo:.1f}–{100 * hi:.1f} %"
    return f"{format_percent(value)} of requests meet every objective ({reason})."


def _replica_section(analyses: Sequence[Analysis]) -> tuple[Section, ...]:
    """A table for each run over several URLs."""
    found = ((analysis, replicas_table(analysis.measured)) for analysis in analyses)
    blocks = tuple(
        Table(each.label if len(analyses) > 1 else "", frame, REPLICAS_NOTE) for each, frame in found if len(frame)
    )
    return (Section("Replicas", blocks),) if blocks else ()


REPLICAS_NOTE = f"Requests that started in the window, by the replica that received them. {latency_tables.ORIGIN}"


def _server_section(analyses: Sequence[Analysis]) -> tuple[Section, ...]:
    blocks: list[Block] = []
    for analysis in analyses:
        suffix = f"-{analysis.run.manifest.run_id}" if len(analyses) > 1 else ""
        blocks += health.server_plot(analysis, f"server{suffix}")
        frame = run_tables.server_table(analysis)
        if len(frame):
            caption = "Scraped from the server."
            each = server_replicas_table(analysis.run.server_metrics, analysis.measured.window)
            if len(each):
                caption = "Scraped from every replica: counts are sums, fractions are means."
            blocks.append(Table(analysis.label if len(analyses) > 1 else "", frame, caption))
            if len(each):
                blocks.append(Table("By replica", each, "Means over the window, and the change of counters."))
    return (Section("Server metrics", tuple(blocks)),) if blocks else ()


def _repeat_blocks(analyses: Sequence[Analysis]) -> tuple[Block, ...]:
    blocks: list[Block] = []
    for analysis in analyses:
        manifest = analysis.run.manifest
        if manifest.command:
            blocks.append(Text(shlex.join(manifest.command), is_code=True))
        hashes = {"run": manifest.run_id, "workload": manifest.workload_hash, "schedule": manifest.schedule_hash}
        hashes |= {"tokenizer": manifest.tokenizer_hash}
        facts = tuple((name, value) for name, value in hashes.items() if value)
        versions = tuple((name, str(version)) for name, version in manifest.libraries.items())
        blocks.append(Facts((("Identity", facts), ("Libraries", versions))))
    return tuple(blocks)

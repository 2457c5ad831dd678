"""What a report of one or several runs says, in order; `write_report` puts it on disk with its figures."""

import shlex
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from reports import figures, health, plots, tables
from reports.across_runs import across_section
from reports.document import Block, Facts, Plot, Report, Section, Table, Text, Tiles, VerdictLine, format_number
from reports.facts import facts_of_runs, load_sentence, start_time
from reports.legible import legible, legible_report
from reports.renderers import csv, html, json, markdown
from reports.results import SUMMARY_FILE, RunResult, finish_run, load_run, replace_file, write_json
from reports.summary import Analysis
from reports.time_split import time_section


@dataclass(frozen=True, slots=True)
class ReportPaths:
    """Where a report was written."""

    html: Path
    markdown: Path
    figures: tuple[Path, ...]
    others: tuple[Path, ...] = ()


def write_report(run_directories: Sequence[Path], out: Path, extra_formats: Sequence[str] = ()) -> ReportPaths:
    """Finish and summarize the runs, and write report.html, report.md and figures/ to `out`.

    `extra_formats`: csv, json. Raises RunDirectoryError for a directory that cannot be read.
    """
    analyses = []
    for directory in run_directories:
        finish_run(directory)
        analysis = Analysis.of(load_run(directory))
        write_json(directory / SUMMARY_FILE, analysis.summary)
        analyses.append(analysis)
    return write_built(build_from(analyses), out, extra_formats)


def write_built(report: Report, out: Path, extra_formats: Sequence[str] = ()) -> ReportPaths:
    """Write a built report: both documents, every figure as PNG and SVG, and the extra formats."""
    out.mkdir(parents=True, exist_ok=True)
    report = legible_report(report)
    drawn = figures.draw_all(report)
    paths = figures.write_all(drawn, out / "figures")
    replace_file(out / "report.html", html.render(report, drawn))
    replace_file(out / "report.md", markdown.render(report))
    others = []
    for name, renderer in (("csv", csv), ("json", json)):
        if name in extra_formats:
            replace_file(out / f"report.{name}", renderer.render(report))
            others.append(out / f"report.{name}")
    return ReportPaths(out / "report.html", out / "report.md", tuple(paths), tuple(others))


def build_report(runs: Sequence[RunResult]) -> Report:
    """The report of runs, in order."""
    return build_from([Analysis.of(run) for run in runs])


def build_from(analyses: Sequence[Analysis]) -> Report:
    """`build_report` for runs that are analysed already."""
    assert analyses, "a report needs a run"
    across, title = across_section(analyses), _title(analyses)
    analyses = _told_apart(analyses)
    sections = (
        Section("Summary", _summary_blocks(analyses)),
        Section("What was run", facts_of_runs(analyses)),
        *across,
        Section("Throughput", _throughput_blocks(analyses)),
        Section("Latency", _latency_blocks(analyses)),
        Section("Requests", _request_blocks(analyses)),
        *_objective_section(analyses),
        *_server_section(analyses),
        *time_section(analyses),
        Section("Load generator", (Table("", tables.generator_table(analyses)), *health.generator_blocks(analyses))),
        Section("Repeat it", _repeat_blocks(analyses), is_closed=True),
        Section("Definitions", (Table("", tables.definitions_table()), Text(READING)), is_closed=True),
    )
    return Report(title, _subtitle(analyses), tuple(_verdict(analysis, analyses) for analysis in analyses), sections)


def _told_apart(analyses: Sequence[Analysis]) -> list[Analysis]:
    """The same runs with legible labels, those that share one numbered: tables have a column per label."""
    counts = Counter(analysis.label for analysis in analyses)
    seen: Counter[str] = Counter()
    told = []
    for analysis in analyses:
        seen[analysis.label] += 1
        label = legible(analysis.label)
        told.append(analysis.named(f"{label} #{seen[analysis.label]}" if counts[analysis.label] > 1 else label))
    return told


READING = (
    "Intervals are 95 %: moving-block bootstrap over requests for percentiles, batch means for rates, Wilson for "
    "shares. A percentile marked ~ has too few values to be bounded from both sides. Latencies belong to the requests "
    "that started in the measurement window; rates count what happened inside it."
)


def _title(analyses: Sequence[Analysis]) -> str:
    """The labels, each once."""
    return " · ".join(dict.fromkeys(analysis.label for analysis in analyses))


def _subtitle(analyses: Sequence[Analysis]) -> str:
    manifest = analyses[0].run.manifest
    model = (manifest.target.get("info") or {}).get("model_id") or "unknown model"
    return " · ".join(
        part for part in (str(model), load_sentence(analyses[0].run.manifest), start_time(manifest)) if part
    )


WORDS = {"valid": "Valid run", "degraded": "Degraded run", "invalid": "Not a valid measurement"}


def _verdict(analysis: Analysis, analyses: Sequence[Analysis]) -> VerdictLine:
    verdict = analysis.summary["verdict"]
    reasons = tuple(_sentence(reason["message"]) for reason in verdict["reasons"])
    label = analysis.label if len(analyses) > 1 else ""
    caution = "These numbers are for orientation, not for judging. " if verdict["status"] == "invalid" else ""
    return VerdictLine(verdict["status"], WORDS[verdict["status"]], caution + _headline(analysis), reasons, label)


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:] + "."


def _headline(analysis: Analysis) -> str:
    """What a reader would tell a colleague, in one sentence."""
    rates, metrics = analysis.summary["rates"], analysis.summary["metrics"]
    parts = []
    if rates["output_tokens_per_s"]["value"]:
        speed, users = rates["output_tokens_per_s"]["value"], rates["concurrency_mean"]["value"] or 0
        parts.append(
            f"{format_number(speed)} output tokens/s with {format_number(users)} requests in flight on average"
        )
    ttft = metrics["ttft_co_s" if analysis.run.manifest.is_open_loop else "ttft_s"]
    if ttft["count"]:
        half, most = (_duration(ttft["percentiles"][p]["value"]) for p in ("p50", "p95"))
        parts.append(f"the first token came within {half} for half of the requests and within {most} for 95 %")
    failed, total = tables.failed_requests(analysis), sum(analysis.summary["counts"].values())
    parts.append(f"{failed:,} of {total:,} requests failed" if failed else f"none of {total:,} requests failed")
    return _sentence("; ".join(parts))


def _duration(seconds: float) -> str:
    """Milliseconds, or seconds from ten of them on."""
    return f"{format_number(seconds)} s" if seconds >= 10 else f"{format_number(1e3 * seconds)} ms"


def _summary_blocks(analyses: Sequence[Analysis]) -> tuple[Block, ...]:
    table = Table("", tables.summary_table(analyses), _summary_note(analyses))
    if len(analyses) > 1:
        return (table, Table("", tables.totals_table(analyses)))
    [analysis] = analyses
    rates = analysis.summary["rates"]
    failed, total = tables.failed_requests(analysis), sum(analysis.summary["counts"].values())
    tiles = (
        ("Requests", format_number(rates["requests_per_s"]["value"] or 0), "per s ↑"),
        ("Output", format_number(rates["output_tokens_per_s"]["value"] or 0), "tokens/s ↑"),
        ("Failed requests", f"{failed:,}", "↓"),
        ("Requests measured", f"{total:,}", ""),
    )
    return (table, Tiles(tiles))


def _summary_note(analyses: Sequence[Analysis]) -> str:
    loops = {analysis.run.manifest.is_open_loop for analysis in analyses}
    since = "the intended start (open loop)" if True in loops else "the moment it was sent (closed loop)"
    if len(loops) > 1:
        since = "the intended start in an open loop, from the sending in a closed one"
    count = sum(sum(analysis.summary["counts"].values()) for analysis in analyses)
    length = analyses[0].measured.window.length_s
    return f"TTFT and E2E count from {since}. {count:,} requests, window of {format_number(length)} s."


def _throughput_blocks(analyses: Sequence[Analysis]) -> tuple[Block, ...]:
    frame = pd.concat([figures.timeline_frame(analysis) for analysis in analyses], ignore_index=True)
    windows = _windows(analyses)
    plot = Plot(
        "timeline",
        "Throughput and requests in flight",
        "Per second of the run. Grey parts are not measured.",
        _timeline_alt(analyses),
        lambda size: plots.timeline(frame, windows, size),
        is_full_width=True,
    )
    return (plot, Table("", tables.rates_table(analyses), "Value with its 95 % interval."))


def _windows(analyses: Sequence[Analysis]) -> list[tuple[float, float]]:
    return [(analysis.measured.window.start_s, analysis.measured.window.end_s) for analysis in analyses]


def _timeline_alt(analyses: Sequence[Analysis]) -> str:
    parts = []
    for analysis in analyses:
        rates = analysis.summary["rates"]
        speed, most = (format_number(rates[name]["value"] or 0) for name in ("output_tokens_per_s", "concurrency_max"))
        parts.append(f"{analysis.label}: {speed} output tokens/s on average, at most {most} in flight")
    what = "Two line charts over the run's seconds, output tokens per second and requests in flight."
    return f"{what} {'; '.join(parts)}."


def _latency_blocks(analyses: Sequence[Analysis]) -> tuple[Block, ...]:
    blocks: list[Block] = []
    for analysis in analyses:
        title = analysis.label if len(analyses) > 1 else ""
        blocks.append(
            Table(
                title, tables.latency_table(analysis), "Percentiles with 95 % intervals. ~: too few values to bound it."
            )
        )
        adjusted = tables.adjusted_table(analysis)
        if len(adjusted):
            what = "With failures counted as never answered" + (f", {title}" if title else "")
            blocks.append(Table(what, adjusted, "Each failed request enters as ∞."))
    blocks += figures.latency_plots(analyses)
    return tuple(blocks)


def _request_blocks(analyses: Sequence[Analysis]) -> tuple[Block, ...]:
    errors = tables.error_table(analyses)
    causes = (Table("Causes of failure", errors),) if len(errors) else ()
    return (
        Table("How they ended", tables.status_table(analyses)),
        *causes,
        Table("Realised lengths", tables.lengths_table(analyses)),
        Table("Finish reasons", tables.finish_table(analyses)),
    )


def _objective_section(analyses: Sequence[Analysis]) -> tuple[Section, ...]:
    blocks: list[Block] = []
    for analysis in analyses:
        frame = tables.objectives_table(analysis)
        if len(frame):
            found = analysis.summary["slo"]["attainment"]
            note = (
                ""
                if found["value"] is None
                else f"{found['value']:.1%} of requests meet every objective ({found['lo']:.1%}–{found['hi']:.1%})."
            )
            blocks.append(Table(analysis.label if len(analyses) > 1 else "", frame, note))
    return (Section("Objectives", tuple(blocks)),) if blocks else ()


def _server_section(analyses: Sequence[Analysis]) -> tuple[Section, ...]:
    blocks: list[Block] = []
    for analysis in analyses:
        suffix = f"-{analysis.run.manifest.run_id}" if len(analyses) > 1 else ""
        blocks += health.server_plot(analysis, f"server{suffix}")
        frame = tables.server_table(analysis)
        if len(frame):
            blocks.append(
                Table(analysis.label if len(analyses) > 1 else "", frame, "Scraped from the server's own metrics.")
            )
    return (Section("Server's own view", tuple(blocks)),) if blocks else ()


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

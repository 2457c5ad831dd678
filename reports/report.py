"""What a report of one or several runs says, in order; `write_report` puts it on disk with its figures."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from reports import figures, plots, tables
from reports.document import Block, Facts, Plot, Report, Section, Table, Text, Tiles, VerdictLine, format_number
from reports.renderers import csv, html, json, markdown
from reports.results import SUMMARY_FILE, RunResult, finish_run, load_run, replace_file, write_json
from reports.summary import Analysis


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
    sections = (
        Section("Summary", _summary_blocks(analyses)),
        Section("What was run", tuple(_facts(analysis) for analysis in analyses)),
        Section("Throughput", _throughput_blocks(analyses)),
        Section("Latency", _latency_blocks(analyses)),
        Section("Requests", _request_blocks(analyses)),
        *_objective_section(analyses),
        *_server_section(analyses),
        Section("Load generator", (Table("", tables.generator_table(analyses)),)),
        Section("Repeat it", _repeat_blocks(analyses), is_closed=True),
        Section("Definitions", (Table("", tables.definitions_table()), Text(READING)), is_closed=True),
    )
    return Report(
        _title(analyses), _subtitle(analyses), tuple(_verdict(analysis, analyses) for analysis in analyses), sections
    )


READING = (
    "Intervals are 95 %: moving-block bootstrap over requests for percentiles, batch means for rates, Wilson for "
    "shares. A percentile marked ~ has too few values to be bounded from both sides. Latencies belong to the requests "
    "that started in the measurement window; rates count what happened inside it."
)


def _title(analyses: Sequence[Analysis]) -> str:
    return analyses[0].label if len(analyses) == 1 else " · ".join(analysis.label for analysis in analyses)


def _subtitle(analyses: Sequence[Analysis]) -> str:
    manifest = analyses[0].run.manifest
    model = (manifest.target.get("info") or {}).get("model_id") or "unknown model"
    return " · ".join(part for part in (str(model), _load_sentence(analyses[0]), manifest.started_at) if part)


def _load_sentence(analysis: Analysis) -> str:
    manifest, config = analysis.run.manifest, analysis.run.manifest.config
    if manifest.mode == "closed":
        users = manifest.slots or config.get("concurrency")
        return f"closed loop, {users} users" if users else "closed loop"
    rate = config.get("rate")
    return f"open loop, {manifest.mode}" + (f", {rate:g} requests/s" if isinstance(rate, int | float) else "")


WORDS = {"valid": "Valid run", "degraded": "Degraded run", "invalid": "Not a valid measurement"}


def _verdict(analysis: Analysis, analyses: Sequence[Analysis]) -> VerdictLine:
    verdict = analysis.summary["verdict"]
    reasons = tuple(_sentence(reason["message"]) for reason in verdict["reasons"])
    label = analysis.label if len(analyses) > 1 else ""
    return VerdictLine(verdict["status"], WORDS[verdict["status"]], _headline(analysis), reasons, label)


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
        half, most = (format_number(1e3 * ttft["percentiles"][p]["value"]) for p in ("p50", "p95"))
        parts.append(f"the first token came within {half} ms for half of the requests and within {most} ms for 95 %")
    failed, total = tables.failed_requests(analysis), sum(analysis.summary["counts"].values())
    parts.append(f"{failed:,} of {total:,} requests failed" if failed else f"none of {total:,} requests failed")
    return _sentence("; ".join(parts))


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
    since = "the intended start (open loop)" if analyses[0].run.manifest.is_open_loop else "the moment it was sent"
    count = sum(sum(analysis.summary["counts"].values()) for analysis in analyses)
    length = analyses[0].measured.window.length_s
    return f"TTFT and E2E count from {since}. {count:,} requests, window of {format_number(length)} s."


def _facts(analysis: Analysis) -> Facts:
    manifest, window = analysis.run.manifest, analysis.summary["window"]
    info: dict[str, Any] = manifest.target.get("info") or {}
    config, machine = manifest.config, manifest.machine
    clipped = manifest.clipped.get("requests", 0)
    memory = machine.get("memory_bytes")
    groups = (
        (
            f"Server{f' · {analysis.label}' if analysis.run.manifest.label else ''}",
            {
                "model": info.get("model_id"),
                "precision, device": _joined(info.get("model_dtype"), info.get("model_device_type")),
                "version": _joined(info.get("version"), info.get("sha")),
                "address": manifest.target.get("url"),
                "API": manifest.target.get("api"),
                "limits": _limits(info),
                "attention": _attention(info),
                "launched with": " ".join(map(str, manifest.target.get("launch_argv") or [])) or None,
                "chosen by us": " ".join(map(str, manifest.target.get("launch_chosen") or [])) or None,
            },
        ),
        (
            "Load",
            {
                "mode": _load_sentence(analysis),
                "workload": config.get("workload"),
                "input tokens": config.get("input_tokens"),
                "output tokens": config.get("output_tokens"),
                "length control": manifest.length_control,
                "clipped": f"{clipped:,} requests, {sum(manifest.clipped.values()) - clipped:,} tokens"
                if clipped
                else "none",
                "prefix cache": manifest.prefix_cache,
                "seed": manifest.seed,
                "window": f"{window['start_s']:.1f} s to {window['end_s']:.1f} s (warm-up: {window['warmup_rule']})",
                "stopped by": manifest.stop_reason,
            },
        ),
        (
            "Machine",
            {
                "system": machine.get("os"),
                "CPU": _joined(
                    machine.get("cpu"), f"{machine['cpu_count']} cores" if machine.get("cpu_count") else None
                ),
                "memory": f"{memory / 2**30:.1f} GiB" if memory else None,
                "accelerator": manifest.target.get("accelerator"),
                "started": manifest.started_at,
                "tgi-bench": _joined(manifest.version, manifest.revision),
                "Python": manifest.python,
                "workers": manifest.workers,
                "notes": manifest.notes,
            },
        ),
    )
    return Facts(
        tuple(
            (title, tuple((name, str(value)) for name, value in facts.items() if value not in (None, "")))
            for title, facts in groups
        )
    )


def _joined(*parts: Any) -> str | None:
    return ", ".join(str(part) for part in parts if part) or None


def _limits(info: dict[str, Any]) -> str | None:
    names = (
        ("max_concurrent_requests", "requests"),
        ("max_input_tokens", "input"),
        ("max_total_tokens", "total tokens"),
    )
    return _joined(*(f"{info[name]:,} {title}" for name, title in names if isinstance(info.get(name), int)))


def _attention(info: dict[str, Any]) -> str | None:
    chosen = (info.get("engine") or {}).get("attention")
    if isinstance(chosen, dict):
        return _joined(*(f"{phase}: {kernel}" for phase, kernel in chosen.items()))
    return None if chosen is None else str(chosen)


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
        blocks += figures.server_plot(analysis, f"server{suffix}")
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
            blocks.append(Text(" ".join(manifest.command), is_code=True))
        hashes = {"run": manifest.run_id, "workload": manifest.workload_hash, "schedule": manifest.schedule_hash}
        hashes |= {"tokenizer": manifest.tokenizer_hash}
        facts = tuple((name, value) for name, value in hashes.items() if value)
        versions = tuple((name, str(version)) for name, version in manifest.libraries.items())
        blocks.append(Facts((("Identity", facts), ("Libraries", versions))))
    return tuple(blocks)

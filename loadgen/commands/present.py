"""Output of finished runs: summary and report files, exports, and the table in the terminal."""

import dataclasses
import json
import numbers
import sys
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from loadgen.errors import UsageError
from loadgen.program import COULD_NOT_MEASURE
from reports.document import Estimate, Link, format_number, format_percent
from reports.metrics.checks.findings import finding_messages, latencies_grow
from reports.metrics.summary import Analysis, analyse_run
from reports.pages.run_page import build_run_report
from reports.pages.run_pages import way_up
from reports.pages.sections import latency_tables
from reports.pages.sections.objectives import objectives_table
from reports.pages.sections.request_tables import failure_causes
from reports.pages.sections.structured import KINDS
from reports.renderers.write import write_report
from reports.run_schema import NOT_FAILED, Status
from reports.run_store import RunDirectoryError
from reports.text import legible

NOTHING = "-"
COLUMNS = 80


def show_runs(directories: Sequence[Path], out: Path, *, is_json: bool) -> int:
    """Finish, summarize and report runs, and print the summary. Returns the exit code of the first verdict.

    Raises UsageError for a directory that is not a run.
    """
    try:
        analyses = [analyse_run(directory) for directory in directories]
    except RunDirectoryError as error:
        raise UsageError(str(error)) from error
    report = write_report(dataclasses.replace(build_run_report(analyses), up=way_up(out)), out)
    summaries = [analysis.summary for analysis in analyses]
    if is_json:
        print(json.dumps(summaries[0] if len(summaries) == 1 else summaries, indent=2, allow_nan=False))
    else:
        print(legible(render_summary(analyses)))
    print(f"report: {report.html}", file=sys.stderr)
    return COULD_NOT_MEASURE if summaries[0]["verdict"]["status"] == "invalid" else 0


def export_runs(directories: Sequence[Path], formats: Sequence[str]) -> None:
    """Write exports into run directories."""
    if not formats:
        return
    from reports.export import export_run

    for directory in directories:
        for path in export_run(directory, formats):
            print(f"export: {path}", file=sys.stderr)


def render_summary(analyses: Sequence[Analysis]) -> str:
    """Verdict, latencies and totals of runs, as text."""
    parts = ["\n".join(_verdict(analysis, len(analyses) > 1) for analysis in analyses)]
    notes = textwrap.fill(latency_tables.unsupported_note(analyses), COLUMNS)
    parts.append("\n".join((render_table(latency_tables.summary_table(analyses)), *([notes] if notes else []))))
    parts.append("\n".join(_totals(analysis, len(analyses) > 1) for analysis in analyses))
    parts += [objectives for analysis in analyses if (objectives := _objectives(analysis, len(analyses) > 1))]
    return "\n\n".join(parts)


def _verdict(analysis: Analysis, is_one_of_many: bool) -> str:
    verdict = analysis.summary["verdict"]
    head = f"{analysis.label}: {verdict['status']}" if is_one_of_many else f"{verdict['status']} run {analysis.label}"
    head = ", ".join((head, *finding_messages(analysis.summary)))
    return "\n".join([head, *(f"  {reason['level']}: {reason['message']}" for reason in verdict["reasons"])])


def _totals(analysis: Analysis, is_one_of_many: bool) -> str:
    summary = analysis.summary
    window, rates, counts = summary["window"], summary["rates"], summary["counts"]
    failed = {status: count for status, count in counts.items() if status not in NOT_FAILED and count}
    left = counts.get(Status.ABANDONED, 0)
    listed = f" ({', '.join(f'{count:,} {status}' for status, count in failed.items())})" if failed else ""
    rows = [
        ("requests/s", _value(rates["requests_per_s"]["value"])),
        ("output tokens/s", _value(rates["output_tokens_per_s"]["value"])),
        ("requests", f"{sum(counts.values()):,} started in the window, {len(analysis.run.records):,} in all"),
        ("failed", f"{sum(failed.values()):,}{listed}"),
        *_first_cause(analysis),
        *_structured(summary["structured"]),
        *([("clients left", f"{left}, as planned")] if left else []),
        ("window", f"{window['end_s'] - window['start_s']:.1f} s, ended by {window['stop_reason'] or 'a crash'}"),
        *([("latencies", "grow with time: the server is overloaded")] if latencies_grow(summary) else []),
        *_cost(analysis),
        *_cached(summary["cached"]),
        *_clipped(analysis),
    ]
    title = [analysis.label] if is_one_of_many else []
    return "\n".join([*title, *(f"{name:<16} {value}" for name, value in rows)])


def _first_cause(analysis: Analysis) -> list[tuple[str, str]]:
    """The most frequent cause of failures, as text of the server; nothing without failures."""
    causes = failure_causes(analysis)
    most = max(causes, key=lambda row: row["requests"], default=None)
    if most is None:
        return []
    lines = textwrap.wrap(legible(str(most["cause"])), COLUMNS - 17)
    return [("most often", ("\n" + 17 * " ").join(lines))]


def _structured(rows: Sequence[Mapping[str, Any]]) -> list[tuple[str, str]]:
    """The valid fraction of each kind of structured answer, with its interval."""
    found = [(row, latency_tables.scaled(row["validity"], 100.0)) for row in rows if row.get("validity")]
    return [
        (
            KINDS.get(row["kind"], row["kind"]),
            f"{valid.text} % valid ({valid.interval or 'too few for an interval'}) of {row['requests']:,} answers",
        )
        for row, valid in found
        if valid.value is not None
    ]


def _objectives(analysis: Analysis, is_one_of_many: bool) -> str:
    """The objectives of a run with their decisions; empty without any."""
    frame = objectives_table(analysis)
    title = [analysis.label] if is_one_of_many else []
    return "\n".join([*title, render_table(frame)]) if len(frame) else ""


def _cost(analysis: Analysis) -> list[tuple[str, str]]:
    """The cost of a million output tokens with its interval, in the currency of the price; nothing without a price."""
    found = latency_tables.scaled(analysis.summary["rates"]["cost_per_mtok"], 1.0)
    price = analysis.run.manifest.price_per_hour
    if price is None or found.value is None:
        return []
    return [("cost", f"{found} per million output tokens, at {price:g} per hour")]


def _cached(cached: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The measured share of cached prompt tokens, and the planned one; nothing for a run without prompt tokens."""
    measured, planned = (
        "unknown" if cached[name] is None else format_percent(cached[name]) for name in ("measured", "planned")
    )
    known = cached["measured"] is not None or cached["planned"] is not None
    return [("cached", f"{measured} of prompt tokens ({planned} planned)")] if known else []


def _clipped(analysis: Analysis) -> list[tuple[str, str]]:
    """Lengths clipped to the server's limits; shown for traces even if nothing was clipped."""
    manifest = analysis.run.manifest
    clipped = manifest.clipped
    if clipped.get("requests"):
        lost = f"{clipped['input_tokens']} input and {clipped['output_tokens']} output tokens"
        return [("clipped", f"{clipped['requests']} requests to the server's limits, by {lost}")]
    return [("clipped", "none: every request fits the server's limits")] if manifest.config.get("trace_file") else []


def render_table(frame: pd.DataFrame) -> str:
    """A frame with aligned columns: the first to the left, numbers to the right.

    A table that is wider than a terminal has headings of several lines, and intervals are left out from the left.
    """
    names = [[str(name)] for name in frame.columns]
    columns = [[_value(value) for value in frame[name]] for name in frame.columns]
    if _width(names, columns) > COLUMNS:
        names = [_stacked(name, cells) for [name], cells in zip(names, columns, strict=True)]
    for index, column in enumerate(frame.columns):
        if _width(names, columns) > COLUMNS and any(isinstance(value, Estimate) for value in frame[column]):
            columns[index] = [value.text if isinstance(value, Estimate) else _value(value) for value in frame[column]]
            names[index] = _stacked(str(column), columns[index])
    height = max(map(len, names))
    padded = [[*[""] * (height - len(lines)), *lines, *cells] for lines, cells in zip(names, columns, strict=True)]
    widths = [max(map(len, cells)) for cells in padded]
    rows = zip(*padded, strict=True)
    return "\n".join(
        "  ".join(
            (row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)))
        ).rstrip()
        for row in rows
    )


def _width(names: Sequence[Sequence[str]], columns: Sequence[Sequence[str]]) -> int:
    return sum(max(map(len, (*lines, *cells))) + 2 for lines, cells in zip(names, columns, strict=True)) - 2


def _stacked(name: str, cells: Sequence[str]) -> list[str]:
    """A heading on as many lines as its cells are wide; a word is not broken."""
    width = max(map(len, (*name.split(), *cells)))
    return textwrap.wrap(name, width)


def _value(value: Any) -> str:
    if value is None or value != value:
        return NOTHING
    if isinstance(value, str | Estimate | Link):
        return str(value)
    return format_number(int(value) if isinstance(value, numbers.Integral) else float(value))

"""The first section of a run's report: headline numbers, the throughput over time, and the summary table."""

from collections.abc import Mapping, Sequence
from typing import Any

from reports.document import Block, Plot, Table, Tile, Tiles, format_duration, format_number, format_percent
from reports.metrics.checks.findings import latencies_grow
from reports.metrics.requests.per_request import primary_latency
from reports.metrics.summary import Analysis
from reports.pages.sections import latency_tables, request_tables, run_figures, run_tables
from reports.pages.sections.objectives import ObjectiveResult, objective_results
from reports.plots import run_plots


def summary_blocks(analyses: Sequence[Analysis]) -> tuple[Block, ...]:
    """Tiles of one run, or a column per run; then the timeline and the latencies."""
    first: Block = (
        Tiles(_tiles(analyses[0])) if len(analyses) == 1 else Table("", run_tables.totals_table(analyses), TOTALS_NOTE)
    )
    k6 = run_tables.k6_table(analyses)
    as_k6 = (Table("As in TGI's first load test", k6),) if len(k6) else ()
    return (first, _timeline(analyses), Table("", latency_tables.summary_table(analyses), _note(analyses)), *as_k6)


TOTALS_NOTE = (
    "In brackets: the 95 % interval of the run; ~ and ≥ mark values without one. In %: the change against the first "
    "run. Runs also differ by chance: see `tgi-bench compare`."
)


def _tiles(analysis: Analysis) -> tuple[Tile, ...]:
    failed, total = request_tables.failed_requests(analysis), sum(analysis.summary["counts"].values())
    failures = format_percent(failed / total) if failed else ""
    return (
        _rate(analysis, "output_tokens_per_s", "Output tokens/s"),
        _rate(analysis, "requests_per_s", "Requests/s"),
        _latency(analysis, "ttft_s", "TTFT", ("p50", "p95", "p99")),
        _latency(analysis, "tpot_s", "TPOT", ("p50", "p95")),
        Tile("Failed", f"{failed:,}", f"of {total:,} ↓", (failures,) if failures else (), is_bad=failed > 0),
        objectives_tile(objective_results(analysis)),
        *_cached(analysis.summary["cached"]),
    )


def _rate(analysis: Analysis, name: str, title: str) -> Tile:
    found = latency_tables.scaled(analysis.summary["rates"][name], 1.0)
    details = found.interval if found.needed is None else f"{found.interval} completions"
    return Tile(title, found.text, "↑", (details,) if details else ())


def _latency(analysis: Analysis, name: str, title: str, percentiles: Sequence[str]) -> Tile:
    metric = analysis.summary["metrics"][primary_latency(name, analysis.run.manifest.is_open_loop)]
    values = " · ".join(latency_tables.percentile(metric, each).text for each in percentiles)
    return Tile(title, values, "ms ↓", (" · ".join(percentiles),))


def objectives_tile(results: Sequence[ObjectiveResult]) -> Tile:
    """The number of objectives missed or not certain, with the target, the value and the decision of each."""
    if not results:
        return Tile("Objectives", "none", "", ("set with --slo",))
    details = tuple(each.sentence for each in results)
    judged = [each for each in results if each.is_met is not None]
    if not judged:
        return Tile("Objectives", details[0].partition(": ")[2], "", details)
    missed = sum(each.is_met is False and each.is_supported for each in judged)
    undecided = sum(not each.is_supported for each in judged)
    counts = ((missed, "missed"), (undecided, "not certain"))
    if len(judged) == 1:
        word = next((name for count, name in counts if count), "met")
        return Tile("Objective", word, "", details, is_bad=missed > 0)
    words = ", ".join(f"{count} {name}" for count, name in counts if count)
    return Tile("Objectives", words or "all met", f"of {len(judged)}" if words else "", details, is_bad=missed > 0)


def _cached(cached: Mapping[str, Any]) -> tuple[Tile, ...]:
    measured, planned = cached["measured"], cached["planned"]
    if measured is None and planned is None:
        return ()
    value = "unknown" if measured is None else format_percent(measured)
    return (
        Tile("Cached prompt tokens", value, "", () if planned is None else (f"{format_percent(planned)} planned",)),
    )


def _timeline(analyses: Sequence[Analysis]) -> Plot:
    frame = run_figures.timelines(analyses)
    bin_s = frame["bin_s"].max()
    per = "second" if bin_s == 1 else f"{bin_s:g} seconds"
    return Plot(
        "timeline",
        "Output tokens/s over time",
        f"Per {per} of the run. {run_figures.shade_note(analyses)}",
        _timeline_alt(analyses),
        lambda size: run_plots.timeline(frame, run_figures.windows_of(analyses), size),
        is_full_width=True,
        height=0.55,
    )


def _timeline_alt(analyses: Sequence[Analysis]) -> str:
    parts = []
    for analysis in analyses:
        rates = analysis.summary["rates"]
        speed, top = (format_number(rates[name]["value"] or 0) for name in ("output_tokens_per_s", "concurrency_max"))
        parts.append(f"{analysis.label}: {speed} output tokens/s on average, at most {top} in flight")
    return f"Line chart of output tokens per second over the run. {'; '.join(parts)}."


def _note(analyses: Sequence[Analysis]) -> str:
    loops = {analysis.run.manifest.is_open_loop for analysis in analyses}
    since = "the intended start (open loop)" if True in loops else "the send (closed loop)"
    if len(loops) > 1:
        since = "the intended start in an open loop, from the send in a closed loop"
    count = sum(sum(analysis.summary["counts"].values()) for analysis in analyses)
    length = f", window of {format_duration(analyses[0].measured.window.length_s)}" if len(analyses) == 1 else ""
    unsupported = latency_tables.unsupported_note(analyses)
    note = f"TTFT and E2E count from {since}. {count:,} requests{length}. {unsupported}".strip()
    growing = [analysis.label for analysis in analyses if latencies_grow(analysis.summary)]
    if not growing:
        return note
    named = f" of {', '.join(growing)}" if len(analyses) > 1 else ""
    return (
        f"{note} Latencies{named} grow with time: the server is overloaded, and they depend on the length of the run."
    )

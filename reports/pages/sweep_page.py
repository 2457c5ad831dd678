"""The report of a sweep or a search: load points, curve, knee, and the highest load within the objectives."""

import dataclasses
import math
import shlex
from collections.abc import Sequence

import numpy as np
import pandas as pd

from reports.document import Block, Estimate, Plot, Report, Section, Table, Text, VerdictLine, format_number
from reports.metrics.requests.per_request import request_metric_of
from reports.metrics.summary import Analysis
from reports.metrics.sweep import LoadPoint, SloDecision, Sweep
from reports.pages.run_pages import run_link, runs_section
from reports.pages.sections.facts import load_sentence, run_facts, start_time
from reports.pages.sections.latency_tables import scaled
from reports.pages.sections.objectives import objective_results, statistic
from reports.pages.sections.request_tables import failed_requests
from reports.pages.sections.time_section import time_section
from reports.plots import sweep_plots
from reports.stats.capacity import NEAR, Capacity

LOAD_NAMES = {"concurrency": "users", "rate": "requests/s"}


def build_sweep_report(sweep: Sweep) -> Report:
    """The report of a sweep or a search."""
    manifest = sweep.points[0].first.run.manifest
    model = (manifest.target.get("info") or {}).get("model_id") or "unknown model"
    loads = f"{len(sweep.points)} loads from {sweep.points[0].load:g} to {sweep.points[-1].load:g} {_unit(sweep)}"
    word = "Search" if sweep.search else "Sweep"
    sections = (
        Section("Summary", _summary(sweep)),
        *time_section([point.first.named(_load(sweep, point.load)) for point in sweep.points]),
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
            found.append((_load(sweep, point.load) + suffix, analysis))
    return found


def linked_points(sweep: Sweep) -> pd.DataFrame:
    """The table of the points; each load links to the page of its first run."""
    table = points_table(sweep)
    loads = zip(table[_unit(sweep)], sweep.points, strict=True)
    table[_unit(sweep)] = pd.Series([run_link(text, point.first.run.directory) for text, point in loads], dtype=object)
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
        f"{_load(sweep, point.load)}: {reason['message']}"
        for point in sweep.invalid
        for analysis in point.analyses
        for reason in analysis.summary["verdict"]["reasons"]
        if reason["level"] == "invalid"
    )
    level = "invalid" if reasons else "valid" if sweep.search is None else sweep.search[0]
    sentences = [_answer(sweep) if sweep.search is None else sweep.search[1]]
    knee = sweep.knee
    if knee is not None:
        speed = format_number(knee.value("output_tokens_per_s") or 0.0)
        sentences.append(f"The knee is at {_load(sweep, knee.load)} with {speed} output tokens/s.")
    if sweep.has_objectives and sweep.search is None:
        sentences.append(_within_sentence(sweep))
    if sweep.search is None and _still_grows(sweep):
        sentences.append(f"The server is not saturated: try more than {_load(sweep, sweep.points[-1].load)}.")
    return VerdictLine(level, _word(level, has_reasons=bool(reasons)), " ".join(sentences), reasons)


def _word(level: str, *, has_reasons: bool) -> str:
    if has_reasons:
        return "Some points are not valid measurements"
    words = {"inconclusive": "Inconclusive", "invalid": "Objectives missed at every load"}
    return words.get(level, "Valid measurements")


def _answer(sweep: Sweep) -> str:
    """The numbers at the best load: the highest load within the objectives, else the load with the most tokens/s."""
    best = sweep.within or max(sweep.points, key=lambda point: point.value("output_tokens_per_s") or 0.0)
    parts = [f"{format_number(best.value('output_tokens_per_s') or 0.0)} output tokens/s"]
    curve = _curve(sweep)
    latency = best.value(curve)
    if latency is not None:
        parts.append(f"{CURVES[curve]} {format_number(latency)} ms")
    return f"{_load(sweep, best.load)}: {', '.join(parts)}{_objectives_of(best)}."


def _objectives_of(point: LoadPoint) -> str:
    """Whether a point meets every objective, or the objectives that it misses; empty without a decision."""
    judged = [each for each in objective_results(point.first) if each.is_met is not None]
    missed = [each.text for each in judged if not each.is_met]
    if missed:
        return f"; missed: {'; '.join(missed)}"
    if not judged:
        return ""
    return "; all objectives met" + ("" if all(each.is_supported for each in judged) else ", undecided")


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
        return f"Even the highest load, {_load(sweep, found.load)}, reached {target}."
    return f"{_load(sweep, found.load)} is the last load that reached {target}."


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
        _unit(sweep): f"{point.load:g}",
        "Output tokens/s ↑": rates["output_tokens_per_s"],
        "Requests/s ↑": rates["requests_per_s"].value,
        **{f"{title}, ms ↓": point.value(name) for title, name in LATENCIES.items()},
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


RATES = ("output_tokens_per_s", "requests_per_s")
LATENCIES = {"TTFT p50": "ttft_p50_ms", "TTFT p95": "ttft_p95_ms", "TPOT p50": "tpot_p50_ms", "E2E p95": "e2e_p95_ms"}


def _note(sweep: Sweep) -> str:
    runs = sum(len(point.analyses) for point in sweep.points)
    note = f"{runs} runs, each in its own directory; a load links to the page of its run. Values with 95 % intervals."
    if runs > len(sweep.points):
        note += " For a load with several runs, the attainment is that of all its runs."
    return note


def _order(sweep: Sweep) -> str:
    return "Order of measurement: " + ", ".join(f"{load:g}" for load in sweep.order) + "." if sweep.order else ""


def _load(sweep: Sweep, load: float) -> str:
    """A load with its unit: `1 user`, `16 users`, `2.5 requests/s`."""
    unit = _unit(sweep)
    return f"{load:g} {unit.removesuffix('s') if unit == 'users' and load == 1 else unit}"


def _unit(sweep: Sweep) -> str:
    return LOAD_NAMES[sweep.quantity]


def _summary(sweep: Sweep) -> tuple[Block, ...]:
    """The figures of the answer, the table, and the other figures."""
    answer, other = _throughput_plots(sweep), _attainment_plot(sweep)
    if sweep.search is not None and other:
        answer, other = (*other, *answer[:1]), answer[1:]
    return (*answer, Table("", linked_points(sweep), _note(sweep)), *other, *_latency_plots(sweep))


def _attainment_plot(sweep: Sweep) -> tuple[Block, ...]:
    """The attainment over load; for a search with the fitted curve and the interval of the capacity."""
    points = attainment_frame(sweep)
    if len(points) < 2:
        return ()
    curve = pd.DataFrame() if sweep.capacity is None else curve_frame(sweep.capacity)
    interval = None if sweep.capacity is None else sweep.capacity.interval
    caption = (
        f"Dots: requests within the objectives, with 95 % intervals. Dashed: the target, {100 * sweep.target:g} %."
    )
    if points["is_overloaded"].any():
        caption += " Hollow dots: overloaded, so beyond the capacity at any share."
    if len(curve):
        caption += " Line: the fitted curve with its 95 % band."
    if interval is not None and math.isfinite(interval.hi - interval.lo):
        caption += " Grey: the 95 % interval of the capacity."
    alt = f"Chart of requests within the objectives in percent against {_unit(sweep)}, with the target."
    return (
        Plot(
            "attainment_by_load",
            "Objectives met against load",
            caption,
            alt,
            lambda size: sweep_plots.attainment(points, curve, 100 * sweep.target, interval, _unit(sweep), size),
        ),
    )


def _throughput_plots(sweep: Sweep) -> tuple[Block, ...]:
    frame = sweep_frame(sweep)
    if len(frame) < 2:
        return ()
    unit = _unit(sweep)
    title, objective_ms = _quantity(sweep)
    curve = f"Line chart of {title} in milliseconds against output tokens per second, one dot per load."
    line = "" if objective_ms is None else " Dashed: the objective."
    rise = f"Line chart of output tokens per second against {unit}."
    caption = f"Numbers are {unit}. Hollow dots: not a valid measurement.{line}"
    return (
        Plot(
            "throughput_latency",
            "Throughput against latency",
            caption,
            curve,
            lambda size: sweep_plots.throughput_latency(frame, title, objective_ms, size),
        ),
        Plot(
            "throughput_by_load",
            "Throughput against load",
            "The band is the 95 % interval.",
            rise,
            lambda size: sweep_plots.against_load(frame, unit, size),
        ),
    )


CURVES = {"ttft_p95_ms": "TTFT p95", "e2e_p95_ms": "E2E p95"}


def _curve(sweep: Sweep) -> str:
    """The latency of the curve: TTFT, or E2E without streaming."""
    return next(
        (name for name in CURVES if any(point.value(name) is not None for point in sweep.points)), "ttft_p95_ms"
    )


def _quantity(sweep: Sweep) -> tuple[str, float | None]:
    """The title of the curve's latency, and its objective in ms; None without one."""
    name = _curve(sweep)
    manifest = sweep.points[0].first.run.manifest
    for objective in manifest.objectives:
        if objective.get("max") is not None and request_metric_of(
            objective["metric"], manifest.is_open_loop
        ) == request_metric_of(name, manifest.is_open_loop):
            scale = 1.0 if objective["metric"].endswith("_ms") else 1e3
            return CURVES[name], scale * objective["max"]
    return CURVES[name], None


def sweep_frame(sweep: Sweep) -> pd.DataFrame:
    """One row per point with both values: load, output_tokens_per_s, lo, hi, value_ms, lo_ms, hi_ms, marks, text."""
    knee, curve = sweep.knee, _curve(sweep)
    rows = []
    for point in sweep.points:
        rate, latency = point.first.summary["rates"]["output_tokens_per_s"], point.value(curve)
        if rate["value"] is None or latency is None:
            continue
        found = statistic(point.first, curve)
        ends = {"lo": rate["lo"], "hi": rate["hi"]}
        ends |= {"lo_ms": found and found.lo, "hi_ms": found and found.hi}
        marks = {"is_knee": point is knee, "is_highest_within": point is sweep.within, "is_valid": point.is_valid}
        text = f"{_load(sweep, point.load)}: {format_number(rate['value'])} output tokens/s, "
        text += f"{CURVES[curve]} {format_number(latency)} ms"
        row = {"load": point.load, "output_tokens_per_s": rate["value"], "value_ms": latency}
        rows.append(
            row | {name: math.nan if end is None else end for name, end in ends.items()} | marks | {"text": text}
        )
    return pd.DataFrame(rows)


def _latency_plots(sweep: Sweep) -> tuple[Block, ...]:
    """Every latency against load, and the speed of one request against that of the server."""
    frame = pd.DataFrame({"load": [point.load for point in sweep.points]})
    for title, name in LATENCIES.items():
        values = pd.Series([point.value(name) for point in sweep.points], dtype=float)
        if values.notna().all() and (values > 0).all():
            frame[title] = values
    names = [title for title in LATENCIES if title in frame and title != "TTFT p50"]
    if len(frame) < 2 or not names:
        return ()
    unit = _unit(sweep)
    blocks: list[Block] = [
        Plot(
            "latency_by_load",
            "Latency against load",
            "One line per latency, on a logarithmic axis.",
            f"Line chart of {', '.join(names)} in milliseconds against {unit}.",
            lambda size: sweep_plots.latencies_by_load(frame, names, unit, size),
        )
    ]
    if "TPOT p50" in frame:
        speeds = frame.assign(
            output_tokens_per_s=[point.value("output_tokens_per_s") or math.nan for point in sweep.points],
            per_user=1e3 / frame["TPOT p50"],
        ).dropna()
        speeds["text"] = [
            f"{_load(sweep, load)}: {format_number(per_user)} tokens/s of one request, {format_number(total)} in total"
            for load, per_user, total in speeds[["load", "per_user", "output_tokens_per_s"]].to_numpy().tolist()
        ]
        blocks.append(
            Plot(
                "speed_per_user",
                "Speed of one request against throughput",
                f"1 / TPOT p50 against output tokens/s. Numbers are {unit}.",
                "Line chart of tokens per second of one request against output tokens per second, one dot per load.",
                lambda size: sweep_plots.speed_per_user(speeds, size),
            )
        )
    return tuple(blocks)


def attainment_frame(sweep: Sweep) -> pd.DataFrame:
    """A row per load with a known share: load, value, lo, hi (in percent) and is_overloaded."""
    rows = []
    for point in sweep.points:
        share = point.attainment
        if share is not None and not math.isnan(share.value):
            values = {name: 100 * getattr(share, name) for name in ("value", "lo", "hi")}
            rows.append({"load": point.load, **values, "is_overloaded": point.is_overloaded})
    return pd.DataFrame(rows)


def curve_frame(capacity: Capacity) -> pd.DataFrame:
    """The fitted attainment over load in percent with its band; empty without a fit."""
    fit = capacity.fit
    loads = [run.load for run in capacity.runs if run.has_share]
    if fit is None or not capacity.is_resolved:
        return pd.DataFrame(columns=["load", "value", "lo", "hi"])
    near = [load for load in loads if NEAR[0] <= load / fit.capacity.value <= NEAR[1]] or loads
    grid = np.linspace(min(near), max(near), 61)
    shares = [fit.attainment(float(load)) for load in grid]
    return pd.DataFrame(
        {"load": grid, **{name: [100 * getattr(share, name) for share in shares] for name in ("value", "lo", "hi")}}
    )


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
        "attainment": None
        if attainment is None
        else {name: _finite(getattr(attainment, name)) for name in ("value", "lo", "hi")},
        "is_overloaded": point.is_overloaded,
        "standing": None if attainment is None else str(point.slo_decision(sweep.target)),
    }

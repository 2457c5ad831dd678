"""The figures of a sweep or a search: attainment, throughput and latencies over load."""

import math

import numpy as np
import pandas as pd

from reports.document import Block, Plot, format_number
from reports.metrics.requests.per_request import request_metric_of
from reports.metrics.sweep import Sweep
from reports.pages.sections.objectives import statistic
from reports.plots import sweep_plots
from reports.stats.capacity import NEAR, Capacity

LOAD_NAMES = {"concurrency": "users", "rate": "requests/s"}
LATENCIES = {"TTFT p50": "ttft_p50_ms", "TTFT p95": "ttft_p95_ms", "TPOT p50": "tpot_p50_ms", "E2E p95": "e2e_p95_ms"}


def attainment_plot(sweep: Sweep) -> tuple[Block, ...]:
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
    alt = f"Chart of requests within the objectives in percent against {load_unit(sweep)}, with the target."
    return (
        Plot(
            "attainment_by_load",
            "Objectives met against load",
            caption,
            alt,
            lambda size: sweep_plots.attainment(points, curve, 100 * sweep.target, interval, load_unit(sweep), size),
        ),
    )


def throughput_plots(sweep: Sweep) -> tuple[Block, ...]:
    frame = sweep_frame(sweep)
    if len(frame) < 2:
        return ()
    unit = load_unit(sweep)
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


def latency_of_curve(sweep: Sweep) -> str:
    """The latency of the curve: TTFT, or E2E without streaming."""
    return next(
        (name for name in CURVES if any(point.value(name) is not None for point in sweep.points)), "ttft_p95_ms"
    )


def _quantity(sweep: Sweep) -> tuple[str, float | None]:
    """The title of the curve's latency, and its objective in ms; None without one."""
    name = latency_of_curve(sweep)
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
    knee, curve = sweep.knee, latency_of_curve(sweep)
    rows = []
    for point in sweep.points:
        rate, latency = point.first.summary["rates"]["output_tokens_per_s"], point.value(curve)
        if rate["value"] is None or latency is None:
            continue
        found = statistic(point.first, curve)
        ends = {"lo": rate["lo"], "hi": rate["hi"]}
        ends |= {"lo_ms": found and found.lo, "hi_ms": found and found.hi}
        marks = {"is_knee": point is knee, "is_highest_within": point is sweep.within, "is_valid": point.is_valid}
        text = f"{load_text(sweep, point.load)}: {format_number(rate['value'])} output tokens/s, "
        text += f"{CURVES[curve]} {format_number(latency)} ms"
        row = {"load": point.load, "output_tokens_per_s": rate["value"], "value_ms": latency}
        rows.append(
            row | {name: math.nan if end is None else end for name, end in ends.items()} | marks | {"text": text}
        )
    return pd.DataFrame(rows)


def latency_plots(sweep: Sweep) -> tuple[Block, ...]:
    """Every latency against load, and the speed of one request against that of the server."""
    frame = pd.DataFrame({"load": [point.load for point in sweep.points]})
    for title, name in LATENCIES.items():
        values = pd.Series([point.value(name) for point in sweep.points], dtype=float)
        if values.notna().all() and (values > 0).all():
            frame[title] = values
    names = [title for title in LATENCIES if title in frame and title != "TTFT p50"]
    if len(frame) < 2 or not names:
        return ()
    unit = load_unit(sweep)
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
            f"{load_text(sweep, load)}: {format_number(own)} tokens/s of one request, {format_number(total)} in total"
            for load, own, total in speeds[["load", "per_user", "output_tokens_per_s"]].to_numpy().tolist()
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


def load_text(sweep: Sweep, load: float) -> str:
    """A load with its unit: `1 user`, `16 users`, `2.5 requests/s`."""
    unit = load_unit(sweep)
    return f"{load:g} {unit.removesuffix('s') if unit == 'users' and load == 1 else unit}"


def load_unit(sweep: Sweep) -> str:
    return LOAD_NAMES[sweep.quantity]

"""Server gauges and load-generator health over the run."""

from collections.abc import Sequence
from typing import Any

import pandas as pd

from reports.document import Block, Plot, Table
from reports.metrics.server.server_series import gauge_series, ratio_series
from reports.metrics.summary import Analysis
from reports.plots import telemetry_plots

GAUGES = (
    ("requests inside the server", "running", "batch_size", 1.0),
    ("requests inside the server", "waiting", "queue_size", 1.0),
    ("token budget of the batch", "tokens", "batch_tokens", 1.0),
    ("KV cache or token budget in use, %", "in use", "cache_usage", 100.0),
)
"""The lines of the server's figure: panel, name of the line, server metric, scale."""
PREFIX_PANEL = "prompt tokens found in the prefix cache, %"
GENERATOR_COLUMNS = {
    "cpu_share": ("CPU, %", 100.0),
    "loop_lag_p99_s": ("event-loop lag p99, ms", 1e3),
    "loop_lag_max_s": ("longest event-loop block, ms", 1e3),
    "gc_pause_max_s": ("longest garbage collection, ms", 1e3),
    "rss_bytes": ("memory, MiB", 2.0**-20),
}
CPU_BOUND, LAG_FRACTION = 70.0, 0.25
"""A run is degraded above this CPU use (percent) and above this loop lag (fraction of the median gap)."""


def gauges_frame(analysis: Analysis) -> pd.DataFrame:
    """The scraped gauges of the server: panel, name, t_s, value. Panels without samples are left out."""
    rows = analysis.run.server_metrics
    frames = []
    for panel, name, metric, scale in GAUGES:
        times, values = gauge_series(rows, metric)
        if times:
            frames.append(pd.DataFrame({"panel": panel, "name": name, "t_s": times, "value": values}))
            frames[-1]["value"] *= scale
    times, values = ratio_series(rows, "prefix_hits")
    if any(values):
        frames.append(pd.DataFrame({"panel": PREFIX_PANEL, "name": "found", "t_s": times, "value": values}))
        frames[-1]["value"] *= 100.0
    return pd.concat(frames, ignore_index=True) if frames else pd.DataFrame(columns=["panel", "name", "t_s", "value"])


def server_plot(analysis: Analysis, name: str) -> list[Block]:
    """A figure of queue, batch, KV cache and prefix hits, from the server's metrics; empty if it was not scraped."""
    frame = gauges_frame(analysis)
    if not len(frame):
        return []
    window = analysis.measured.window
    last_s = max(float(frame["t_s"].max()), window.end_s)
    means = ", ".join(f"{each} {group['value'].mean():.3g}" for each, group in frame.groupby("name", sort=False))
    panels = "; ".join(dict.fromkeys(frame["panel"]))
    alt = f"Line charts over the run's seconds, as scraped from the server: {panels}. Means: {means}."
    caption = f"{analysis.label}: scraped from the server. Grey: outside the measurement window."
    span = (window.start_s, window.end_s)
    return [
        Plot(
            name,
            "Inside the server",
            caption,
            alt,
            lambda size: telemetry_plots.panels(frame, span, last_s, size),
            is_full_width=True,
            height=max(1.0, 0.42 * frame["panel"].nunique()),
        )
    ]


def worker_table(analyses: Sequence[Analysis]) -> pd.DataFrame:
    """A row per worker with its measurements of itself; empty if no run had several workers."""
    rows = []
    for analysis in analyses:
        found = analysis.run.client.get("workers") or []
        for worker in found if len(found) > 1 else ():
            row: dict[str, Any] = {"worker": str(worker.get("worker", ""))}
            row |= {
                title: None if worker.get(name) is None else scale * float(worker[name])
                for name, (title, scale) in GENERATOR_COLUMNS.items()
            }
            rows.append(({"run": analysis.label} if len(analyses) > 1 else {}) | row)
    return pd.DataFrame(rows).dropna(axis=1, how="all") if rows else pd.DataFrame()


def workers_frame(analysis: Analysis) -> pd.DataFrame:
    """One row per worker and second: worker, t_s, cpu_percent, lag_ms."""
    series = pd.DataFrame(analysis.run.timeseries)
    if not {"t_s", "cpu_share", "loop_lag_max_s"} <= set(series.columns):
        return pd.DataFrame(columns=["worker", "t_s", "cpu_percent", "lag_ms"])
    worker = series["worker"].fillna(0) if "worker" in series else 0
    frame = pd.DataFrame({"worker": worker, "t_s": series["t_s"]})
    frame = frame.assign(cpu_percent=100 * series["cpu_share"], lag_ms=1e3 * series["loop_lag_max_s"])
    return frame.dropna().astype(float).sort_values(["worker", "t_s"])


def generator_blocks(analyses: Sequence[Analysis]) -> tuple[Block, ...]:
    """A figure over time for each run with data, and a table if there were several workers."""
    blocks: list[Block] = []
    for analysis in analyses:
        frame = workers_frame(analysis)
        if len(frame) > 1:
            suffix = f"-{analysis.run.manifest.run_id}" if len(analyses) > 1 else ""
            blocks.append(_worker_plot(analysis, frame, f"generator{suffix}"))
    table = worker_table(analyses)
    if len(table):
        blocks.append(Table("Each worker", table, "Measured by each worker over the run. ↓ lower is better."))
    return tuple(blocks)


def _worker_plot(analysis: Analysis, frame: pd.DataFrame, name: str) -> Plot:
    window = analysis.measured.window
    lag_ms = 1e3 * LAG_FRACTION * (analysis.summary["client"]["gap_median_s"] or float("inf"))
    count = frame["worker"].nunique()
    source = "the load generator" if count == 1 else f"{count} workers"
    maxima = f"at most {frame['cpu_percent'].max():.0f} % CPU and {frame['lag_ms'].max():.3g} ms lag"
    span = (window.start_s, window.end_s)
    return Plot(
        name,
        "Load generator health",
        f"{analysis.label}: {source}, per second. Dashed: the bound above which a run is degraded.",
        f"Line charts of CPU use and loop lag of {source} over the run's seconds: {maxima}.",
        lambda size: telemetry_plots.workers(frame, (CPU_BOUND, lag_ms), span, size),
        is_full_width=True,
    )

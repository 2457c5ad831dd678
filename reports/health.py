"""Server and load generator over the run: gauges on the run's clock, and each worker's own health."""

from collections.abc import Sequence
from typing import Any

import pandas as pd

from reports import health_plots
from reports.document import Block, Plot, Table
from reports.server import gauge_series, share_series
from reports.summary import Analysis

# Panels of the server's figure, and the gauge behind each line: panel, line, meaning, scale.
GAUGES = (
    ("requests inside the server", "running", "batch_size", 1.0),
    ("requests inside the server", "waiting", "queue_size", 1.0),
    ("tokens the batch may grow to", "tokens", "batch_tokens", 1.0),
    ("KV cache or token budget in use, %", "in use", "cache_usage", 100.0),
)
PREFIX_PANEL = "prompt tokens found in the prefix cache, %"
GENERATOR_COLUMNS = {
    "cpu_share": ("CPU, %", 100.0),
    "loop_lag_p99_s": ("loop lag p99, ms", 1e3),
    "loop_lag_max_s": ("longest loop gap, ms", 1e3),
    "gc_pause_max_s": ("longest collection, ms", 1e3),
    "rss_bytes": ("memory, MiB", 2.0**-20),
}
# Where a run counts as degraded by a worker's CPU (percent) and by the share of the median gap its loop lags.
CPU_BOUND, LAG_SHARE = 70.0, 0.25


def gauges_frame(analysis: Analysis) -> pd.DataFrame:
    """What was scraped of the server: panel, name, t_s, value; a panel without samples is left out."""
    rows = analysis.run.server_metrics
    frames = []
    for panel, name, meaning, scale in GAUGES:
        times, values = gauge_series(rows, meaning)
        if times:
            frames.append(pd.DataFrame({"panel": panel, "name": name, "t_s": times, "value": values}))
            frames[-1]["value"] *= scale
    times, values = share_series(rows, "prefix_hits")
    if any(values):
        frames.append(pd.DataFrame({"panel": PREFIX_PANEL, "name": "found", "t_s": times, "value": values}))
        frames[-1]["value"] *= 100.0
    return pd.concat(frames, ignore_index=True) if frames else pd.DataFrame(columns=["panel", "name", "t_s", "value"])


def server_plot(analysis: Analysis, name: str) -> list[Block]:
    """Queue, batch, KV cache and prefix hits as the server reports them; nothing where it was not scraped."""
    frame = gauges_frame(analysis)
    if not len(frame):
        return []
    window = analysis.measured.window
    last_s = max(float(frame["t_s"].max()), window.end_s)
    means = ", ".join(f"{each} {group['value'].mean():.3g}" for each, group in frame.groupby("name", sort=False))
    panels = "; ".join(dict.fromkeys(frame["panel"]))
    alt = f"Line charts over the run's seconds, as scraped from the server: {panels}. Means: {means}."
    caption = f"{analysis.label}: scraped from the server, on the same clock as the load. Grey parts are not measured."
    span = (window.start_s, window.end_s)
    return [
        Plot(
            name,
            "Inside the server",
            caption,
            alt,
            lambda size: health_plots.panels(frame, span, last_s, size),
            is_full_width=True,
            height=max(1.0, 0.42 * frame["panel"].nunique()),
        )
    ]


def worker_table(analyses: Sequence[Analysis]) -> pd.DataFrame:
    """A row per worker with what it measured of itself; empty where no run had several."""
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
    """Each worker's seconds: worker, t_s, cpu_percent, lag_ms."""
    series = pd.DataFrame(analysis.run.timeseries)
    if not {"t_s", "cpu_share", "loop_lag_max_s"} <= set(series.columns):
        return pd.DataFrame(columns=["worker", "t_s", "cpu_percent", "lag_ms"])
    worker = series["worker"].fillna(0) if "worker" in series else 0
    frame = pd.DataFrame({"worker": worker, "t_s": series["t_s"]})
    frame = frame.assign(cpu_percent=100 * series["cpu_share"], lag_ms=1e3 * series["loop_lag_max_s"])
    return frame.dropna().astype(float).sort_values(["worker", "t_s"])


def generator_blocks(analyses: Sequence[Analysis]) -> tuple[Block, ...]:
    """Per worker: a figure over time of every run that has one, and a table where there were several."""
    blocks: list[Block] = []
    for analysis in analyses:
        frame = workers_frame(analysis)
        if len(frame) > 1:
            suffix = f"-{analysis.run.manifest.run_id}" if len(analyses) > 1 else ""
            blocks.append(_worker_plot(analysis, frame, f"generator{suffix}"))
    table = worker_table(analyses)
    if len(table):
        blocks.append(Table("Each worker", table, "Measured by the worker itself over the run. ↓ less is better."))
    return tuple(blocks)


def _worker_plot(analysis: Analysis, frame: pd.DataFrame, name: str) -> Plot:
    window = analysis.measured.window
    lag_ms = 1e3 * LAG_SHARE * (analysis.summary["client"]["gap_median_s"] or float("inf"))
    count = frame["worker"].nunique()
    who = "the load generator" if count == 1 else f"{count} workers"
    most = f"at most {frame['cpu_percent'].max():.0f} % CPU and {frame['lag_ms'].max():.3g} ms lag"
    span = (window.start_s, window.end_s)
    return Plot(
        name,
        "The load generator's own health",
        f"{analysis.label}: {who}, per second. Dashed: where the run would count as degraded.",
        f"Line charts of CPU share and loop lag of {who} over the run's seconds: {most}.",
        lambda size: health_plots.workers(frame, (CPU_BOUND, lag_ms), span, size),
        is_full_width=True,
    )

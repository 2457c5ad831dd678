"""The figures of latencies in a run's report, and their frames."""

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import numpy.typing as npt
import pandas as pd

from reports.document import Block, Plot, format_number
from reports.metrics.requests.per_request import primary_latency
from reports.metrics.requests.pooled_metrics import POOLED
from reports.metrics.summary import Analysis
from reports.pages.sections.across_runs import values_of
from reports.plots import box_plots, latency_plots, request_plots
from reports.run_schema import NOT_FAILED, Status
from reports.stats.estimators import sorted_quantiles

ECDF_POINTS = 400
MIN_BINS, MAX_BINS = 10, 400
SHORT_BINS_S = (1.0, 0.5, 0.2, 0.1, 0.05, 0.02, 0.01)
MAX_HEAT_MAPS = 3
MIN_REQUESTS_FOR_HEAT_MAP = 20


def timeline_frame(analysis: Analysis) -> pd.DataFrame:
    """A row per bin of the run: run, t_s, bin_s, output_tokens_per_s, in_flight, ttft_p50_ms, ttft_p95_ms, failed.

    A bin is one second long; it is longer in a run of more than MAX_BINS seconds, and shorter in a run of fewer than
    MIN_BINS seconds.
    """
    measured = analysis.measured
    requests = measured.requests
    ends = requests["t_end_ns"].max() / 1e9
    last = max(measured.window.end_s, float(ends) if ends == ends else 0.0, SHORT_BINS_S[-1])
    shorter_s = next((each for each in SHORT_BINS_S if last >= MIN_BINS * each), SHORT_BINS_S[-1])
    bin_s = max(shorter_s, np.ceil(last / MAX_BINS)) if last > MAX_BINS else shorter_s
    edges = bin_s * np.arange(np.floor(last / bin_s) + 2)
    tokens = measured.events.tokens_between(0.0, float(edges[-1]), len(edges) - 1)
    column = primary_latency("ttft_s", analysis.run.manifest.is_open_loop)
    bins = np.searchsorted(edges, requests["start_s"], side="right") - 1
    ttft = (1e3 * requests[column].astype(float)).groupby(bins)
    failed = (~requests["status"].isin((*NOT_FAILED, Status.CANCELLED))).groupby(bins).sum()
    places = np.arange(len(edges) - 1)
    return pd.DataFrame(
        {
            "run": analysis.label,
            "t_s": edges[:-1],
            "bin_s": bin_s,
            "output_tokens_per_s": tokens / bin_s,
            "in_flight": measured.concurrency.means(edges),
            "ttft_p50_ms": ttft.quantile(0.5).reindex(places).to_numpy(dtype=np.float64),
            "ttft_p95_ms": ttft.quantile(0.95).reindex(places).to_numpy(dtype=np.float64),
            "failed": failed.reindex(places, fill_value=0).to_numpy(dtype=np.int64),
        }
    )


def timelines(analyses: Sequence[Analysis]) -> pd.DataFrame:
    """The timelines of several runs in one frame."""
    return pd.concat([timeline_frame(analysis) for analysis in analyses], ignore_index=True)


def windows_of(analyses: Sequence[Analysis]) -> list[tuple[float, float]]:
    """Start and end of each run's measurement window, in seconds."""
    return [(analysis.measured.window.start_s, analysis.measured.window.end_s) for analysis in analyses]


def distribution_frame(label: str, values_s: npt.NDArray[np.float64]) -> pd.DataFrame:
    """An empirical distribution of about ECDF_POINTS points, exact at the labelled percentiles.

    Returns run, fraction, value_ms.
    """
    even = np.linspace(0, 1, min(len(values_s), ECDF_POINTS))
    fraction = np.union1d(even, np.array(latency_plots.MARKED_PERCENTILES) / 100)
    return pd.DataFrame(
        {"run": label, "fraction": fraction, "value_ms": 1e3 * sorted_quantiles(np.sort(values_s), fraction)}
    )


def request_points(analysis: Analysis, column: str, against: str, only_measured: bool = True) -> pd.DataFrame:
    """A row per request with both values: run, `against`, value_ms. In an open loop, TTFT and E2E are from schedule."""
    column = primary_latency(column, analysis.run.manifest.is_open_loop)
    rows = analysis.measured.population if only_measured else analysis.measured.requests
    rows = rows[[against, column]].dropna()
    return pd.DataFrame({"run": analysis.label, against: rows[against], "value_ms": 1e3 * rows[column]})


def latency_blocks(analyses: Sequence[Analysis]) -> list[Block]:
    """Distributions of TTFT, gaps and TPOT; TTFT and E2E against lengths; TTFT over time. Only figures with data."""
    blocks: list[Block] = []
    distributions = {
        "ttft": ("TTFT", lambda analysis: values_of(analysis, "ttft_s")),
        "gaps": ("gap between events", lambda analysis: POOLED[0].function(analysis.measured)[0]),
        "tpot": ("TPOT", lambda analysis: values_of(analysis, "tpot_s")),
    }
    titles = {"ttft": "Time to first token", "gaps": "Gaps between token events", "tpot": "Time per output token"}
    if len(analyses) > 1:
        blocks += _boxes(analyses)
    for name, (quantity, values) in distributions.items():
        blocks += _distribution_plot(name, titles[name], quantity, analyses, values)
    blocks += _length_plot(
        "ttft_by_prompt", "TTFT against prompt length", "TTFT", "ttft_s", "prompt length", "input_tokens", analyses
    )
    blocks += _length_plot(
        "e2e_by_output", "E2E against output length", "E2E", "e2e_s", "output length", "output_tokens", analyses
    )
    blocks += _drift_plot("ttft_s", analyses)
    for analysis in analyses[:MAX_HEAT_MAPS]:
        blocks += _heat_map(analysis, "ttft_s", "TTFT") + _heat_map(analysis, "e2e_s", "E2E")
    return blocks


BOXES = {"ttft_s": ("ttft_boxes", "TTFT"), "tpot_s": ("tpot_boxes", "TPOT")}


def _boxes(analyses: Sequence[Analysis]) -> list[Block]:
    """A box for each run and latency."""
    blocks: list[Block] = []
    for column, (name, quantity) in BOXES.items():
        frame = box_frame(analyses, column)
        if len(frame) > 1:
            medians = ", ".join(f"{row.run} {format_number(float(str(row.p50)))} ms" for row in frame.itertuples())
            alt = f"Box plot of {quantity} of each run on one axis. Medians: {medians}."
            blocks.append(
                Plot(
                    name,
                    f"{quantity} of each run",
                    "Requests that started in the window.",
                    alt,
                    partial(box_plots.boxes, frame, quantity),
                    height=max(0.6, 0.35 + 0.12 * len(frame)),
                )
            )
    return blocks


def box_frame(analyses: Sequence[Analysis], column: str) -> pd.DataFrame:
    """One row per run with a latency: run, count, p5, p25, p50, p75 and p95 in ms."""
    rows = []
    for analysis in analyses:
        values = np.sort(values_of(analysis, column))
        if len(values):
            shares = np.array(box_plots.PERCENTILES) / 100
            found = zip(box_plots.PERCENTILES, 1e3 * sorted_quantiles(values, shares), strict=True)
            rows.append({"run": analysis.label, "count": len(values), **{f"p{p}": float(each) for p, each in found}})
    return pd.DataFrame(rows)


def heat_map_frame(analysis: Analysis, column: str) -> pd.DataFrame:
    """One row per request with both lengths and a latency: input_tokens, output_tokens, value_ms."""
    column = primary_latency(column, analysis.run.manifest.is_open_loop)
    rows = analysis.measured.population[["input_tokens", "output_tokens", column]].dropna()
    return rows.assign(value_ms=1e3 * rows[column]).drop(columns=column)


def _heat_map(analysis: Analysis, column: str, quantity: str) -> list[Block]:
    frame = heat_map_frame(analysis, column)
    if (
        len(frame) < MIN_REQUESTS_FOR_HEAT_MAP
        or frame["input_tokens"].nunique() < 2
        or frame["output_tokens"].nunique() < 2
    ):
        return []
    wide = request_plots.cells(frame)
    slowest = wide.nlargest(1, "value_ms").to_dict("records")[0]
    alt = (
        f"Heat map of median {quantity} by input and output tokens. Slowest: "
        f"{format_number(slowest['value_ms'])} ms at {slowest['column_name']} input and {slowest['row_name']} output."
    )
    caption = (
        f"{analysis.label}: {len(frame):,} requests; all rows, and all columns, have about equal numbers of requests. "
        "↓ lower is better."
    )
    title = f"{quantity} by input and output length"
    return [
        Plot(
            f"{quantity.lower()}_by_lengths-{analysis.run.manifest.run_id}",
            title,
            caption,
            alt,
            lambda size: request_plots.heat_map(request_plots.cells(frame, 4) if size.is_narrow else wide, size),
        )
    ]


def shade_note(analyses: Sequence[Analysis]) -> str:
    return f"Grey: outside {'the measurement window' if len(analyses) == 1 else 'every measurement window'}."


def _distribution_plot(
    name: str,
    title: str,
    quantity: str,
    analyses: Sequence[Analysis],
    values: Callable[[Analysis], npt.NDArray[np.float64]],
) -> list[Block]:
    series = {analysis.label: found for analysis in analyses if len(found := values(analysis)) > 1}
    if not series:
        return []
    frame = pd.concat([distribution_frame(label, found) for label, found in series.items()], ignore_index=True)
    frame = frame[frame["value_ms"] > 0]
    if not len(frame):
        return []
    counts = "; ".join(_counted(label, found, len(series) > 1) for label, found in series.items())
    medians = ", ".join(f"{label}: median {format_number(1e3 * float(np.median(v)))} ms" for label, v in series.items())
    alt = f"Cumulative distribution of {quantity} on a logarithmic axis. {medians}."
    return [Plot(name, title, counts, alt, lambda size: latency_plots.distribution(frame, quantity, size))]


def _counted(label: str, values: npt.NDArray[np.float64], has_label: bool) -> str:
    text = f"{len(values):,} values, mean {format_number(1e3 * float(values.mean()))} ms"
    return f"{label}: {text}" if has_label else f"{text}."


def _length_plot(
    name: str, title: str, quantity: str, column: str, length: str, against: str, analyses: Sequence[Analysis]
) -> list[Block]:
    frame = pd.concat([request_points(analysis, column, against) for analysis in analyses], ignore_index=True)
    frame = frame.rename(columns={against: "tokens"})
    if frame["tokens"].nunique() < 2:
        return []
    caption = f"{len(frame):,} requests; the line joins the medians of ten length groups."
    alt = f"Scatter of {quantity} in milliseconds against {length} in tokens, one dot per request, with a median line."
    return [Plot(name, title, caption, alt, lambda size: latency_plots.against_length(frame, quantity, length, size))]


def _drift_plot(column: str, analyses: Sequence[Analysis]) -> list[Block]:
    points = [request_points(analysis, column, "start_s", only_measured=False) for analysis in analyses]
    frame = pd.concat(points, ignore_index=True).rename(columns={"start_s": "t_s"})
    if len(frame) < 2:
        return []
    windows = windows_of(analyses)
    alt = "Scatter of TTFT in milliseconds against the start of each request in seconds."
    caption = f"Each request by its start. {shade_note(analyses)}"
    return [
        Plot(
            "ttft_over_time",
            "TTFT over time",
            caption,
            alt,
            lambda size: latency_plots.over_time(frame, "TTFT", windows, size),
        )
    ]

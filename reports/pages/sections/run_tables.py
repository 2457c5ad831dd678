"""Tables of whole runs: the server's metrics, the load generator's own, and the definitions of all metrics."""

from collections.abc import Sequence
from typing import Any

import pandas as pd

from reports.document import Estimate, format_duration
from reports.metrics.named_metrics import METRICS
from reports.metrics.requests.per_request import Direction, primary_latency
from reports.metrics.run_metrics import PER_RUN
from reports.metrics.server.server_metrics import SERVER_METRICS
from reports.metrics.summary import Analysis
from reports.pages.sections.facts import load_sentence
from reports.pages.sections.latency_tables import percentile, scaled
from reports.pages.sections.request_tables import failed_requests

# Metrics of a run that are whole numbers.
COUNTS = ("concurrency_p50", "concurrency_max")
K6_PROFILE = "bloom-k6"
K6_PERCENTILES = {"med": "p50", "p(90)": "p90", "p(95)": "p95"}


def k6_table(analyses: Sequence[Analysis]) -> pd.DataFrame:
    """The table of TGI's first load test: a row per run of its profile, E2E in seconds and requests/s."""
    rows = []
    for analysis in analyses:
        metric = analysis.summary["metrics"]["e2e_s"]
        if analysis.run.manifest.config.get("profile") == K6_PROFILE and metric["count"]:
            percentiles = {title: metric["percentiles"][p]["value"] for title, p in K6_PERCENTILES.items()}
            columns = {"avg": metric["mean"], "min": metric["min"], "max": metric["max"], **percentiles}
            row = {name: columns[name] for name in ("avg", "min", "med", "max", "p(90)", "p(95)")}
            rows.append(
                {"E2E, s ↓": analysis.label, **row, "RPS ↑": analysis.summary["rates"]["requests_per_s"]["value"]}
            )
    return pd.DataFrame(rows)


def totals_table(analyses: Sequence[Analysis]) -> pd.DataFrame:
    """A column per run: rates and latencies with intervals and changes against the first run, failures, load."""
    columns = [_totals(analysis, None if analysis is analyses[0] else analyses[0]) for analysis in analyses]
    labels = [analysis.label for analysis in analyses]
    rows = [[name, *(own[name] for own in columns)] for name in columns[0]]
    return pd.DataFrame(rows, columns=["", *labels])


TOTAL_RATES = {"output_tokens_per_s": "Output tokens/s ↑", "requests_per_s": "Requests/s ↑"}
TOTAL_LATENCIES = {"ttft_s": "TTFT", "tpot_s": "TPOT"}


def _totals(analysis: Analysis, first: Analysis | None) -> dict[str, str | None]:
    """The values of one run by name."""
    own, window = analysis.summary, analysis.measured.window
    found = {
        title: with_change(
            scaled(own["rates"][name], 1.0), None if first is None else first.summary["rates"][name]["value"]
        )
        for name, title in TOTAL_RATES.items()
    }
    for name, title in TOTAL_LATENCIES.items():
        for stat in ("p50", "p95"):
            before = None if first is None else _primary_percentile(first, name, stat).value
            found[f"{title} {stat}, ms ↓"] = with_change(_primary_percentile(analysis, name, stat), before)
    return found | {
        "Failed ↓": f"{failed_requests(analysis):,} of {sum(own['counts'].values()):,}",
        "Load": load_sentence(analysis.run.manifest),
        "Window": format_duration(window.length_s),
        "Drain limit": None if window.drain_s is None else format_duration(window.drain_s),
    }


def _primary_percentile(analysis: Analysis, name: str, stat: str) -> Estimate:
    column = primary_latency(name, analysis.run.manifest.is_open_loop)
    return percentile(analysis.summary["metrics"][column], stat)


def with_change(own: Estimate, before: float | None) -> str | None:
    """A value with its interval and its change in percent. An unsupported value has its mark and no interval.

    >>> with_change(Estimate(110.0, 104.2, 116.4), 100.0), with_change(Estimate(97.0, is_supported=False), 100.0)
    ('110 (104–116), +10.0 %', '~97.0, −3.0 %')
    >>> with_change(Estimate(5.0, 4.81, 5.17), None), with_change(Estimate(None), 1.0)
    ('5.00 (4.81–5.17)', None)
    >>> with_change(Estimate(9.483, 8.51, 10.84), None), with_change(Estimate(0.31, 0.0, 12.4), None)
    ('9.5 (8.5–10.8)', '0.310 (0–12)')
    """
    if own.value is None:
        return None
    text = own.even_text if own.is_supported else own.text
    if not before:
        return text
    change = f"{100 * (own.value / before - 1):+,.1f}".replace("-", "\N{MINUS SIGN}")
    return f"{text}, {change} %"


def rates_table(analyses: Sequence[Analysis]) -> pd.DataFrame:
    """Every metric of the whole run with its 95 % interval, unit and better direction."""
    rows = []
    for metric in PER_RUN:
        found = [analysis.summary["rates"][metric.name] for analysis in analyses]
        if all(each["value"] is None for each in found):
            continue
        scale, unit = (100.0, "%") if metric.unit == "fraction" else (1.0, metric.unit)
        row: dict[str, Any] = {"metric": metric.title}
        for analysis, each in zip(analyses, found, strict=True):
            is_count = metric.name in COUNTS and each["value"] is not None
            row[_column(analysis, analyses)] = round(each["value"]) if is_count else scaled(each, scale)
        rows.append(row | {"unit": unit, "better": _better(metric.direction)})
    return pd.DataFrame(rows)


def _column(analysis: Analysis, analyses: Sequence[Analysis]) -> str:
    return analysis.label if len(analyses) > 1 else "value (95 % interval)"


def _better(direction: Direction) -> str:
    return {"lower": "↓ lower", "higher": "↑ higher", "none": ""}[direction]


def server_table(analysis: Analysis) -> pd.DataFrame:
    """The server's metrics over the window, with the client's mean if both exist."""
    client_metrics = {"ttft_s": "ttft_s", "tpot_s": "tpot_s", "gap_s": "gap_s", "request_duration_s": "e2e_s"}
    rows = []
    for metric in SERVER_METRICS:
        found = analysis.summary["server"].get(metric.name)
        if found is None:
            continue
        scale, unit = {"s": (1e3, "ms"), "fraction": (100.0, "%")}.get(metric.unit, (1.0, metric.unit))
        p95 = (found.get("percentiles") or {}).get("p95")
        client_mean = (
            analysis.summary["metrics"][client_metrics[metric.name]]["mean"] if metric.name in client_metrics else None
        )
        rows.append(
            {
                "server metric": metric.title,
                "mean": scale * found["mean"] if "mean" in found else None,
                "p95 (bucket)": None if p95 is None else scaled(p95, scale),
                "max": None if found.get("max") is None else scale * found["max"],
                "over the window": found.get("change", found.get("count")),
                "client mean": None if client_mean is None else 1e3 * client_mean,
                "unit": unit,
                "series": found["series"],
            }
        )
    frame = pd.DataFrame(rows)
    return frame.dropna(axis=1, how="all") if len(frame) else frame


def generator_table(analyses: Sequence[Analysis]) -> pd.DataFrame:
    """The load generator's measurements of itself, with the bounds beyond which a run is degraded."""
    rows = []
    for name, title, scale, unit, bound in GENERATOR:
        values = [analysis.summary["client"].get(name) for analysis in analyses]
        if all(value is None for value in values):
            continue
        row: dict[str, Any] = {"generator": title}
        for analysis, value in zip(analyses, values, strict=True):
            row[analysis.label if len(analyses) > 1 else "value"] = _whole(value, scale)
        rows.append(row | {"unit": unit, "degraded if": bound})
    return pd.DataFrame(rows)


def _whole(value: float | None, scale: float) -> float | None:
    return value if value is None or isinstance(value, int) else scale * value


GENERATOR = (
    ("sent_over_offered", "sent / offered requests", 100.0, "%", "below 99 %"),
    ("schedule_lag_p99_s", "schedule lag, p99", 1e3, "ms", "above 5 ms or 5 % of median TTFT"),
    ("loop_lag_p99_s", "event-loop lag, p99", 1e3, "ms", "above 25 % of the median gap, if times are read times"),
    ("read_late_p99_s", "latest read after arrival in a request, p99", 1e3, "ms", ""),
    ("loop_lag_max_s", "longest event-loop block", 1e3, "ms", "above 1 s"),
    ("cpu_share_max", "CPU of the busiest worker", 100.0, "%", "above 70 %"),
    ("gc_pause_max_s", "longest garbage collection", 1e3, "ms", ""),
    ("open_files_share", "open files, of the limit", 100.0, "%", ""),
    ("local_ports", "local ports for connections", 1.0, "ports", ""),
    ("coalesced_share", "events that arrived coalesced", 100.0, "%", ""),
    ("coalesced_gaps_share", "gaps inside one read, counted as 0", 100.0, "%", "above 1 % with late reads"),
    ("coalesced_within_max_s", "longest time within which such events arrived", 1e3, "ms", ""),
    ("token_mismatch_median", "token count mismatch, median", 100.0, "%", "above 2 %"),
    ("completions", "completions in the window", 1.0, "requests", "none"),
    ("server_requests", "requests counted by the server", 1.0, "requests", "not the client's count"),
    ("lost_workers", "workers lost", 1.0, "workers", "any"),
    ("client_errors", "client errors", 1.0, "requests", "any"),
)


def definitions_table() -> pd.DataFrame:
    """Title, name, unit and formula of each metric."""
    return pd.DataFrame(
        {"metric": metric.title, "name": metric.name, "unit": metric.unit, "formula": metric.formula}
        for metric in METRICS
        if not metric.name.startswith("srv_")
    )

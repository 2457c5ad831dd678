"""Tables of metrics: each function takes analysed runs and returns a frame of text, numbers and `Estimate`s.

Tables of requests are in `request_tables.py`.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from reports.document import Estimate, about, format_duration, format_number
from reports.metrics.named_metrics import METRICS
from reports.metrics.requests.per_request import CORRECTED, Direction, primary_latency
from reports.metrics.run_metrics import PER_RUN
from reports.metrics.server.server_metrics import SERVER_METRICS
from reports.metrics.summary import Analysis
from reports.pages.sections.facts import load_sentence
from reports.pages.sections.request_tables import failed_requests

# Rows of the summary table, by their key in `summary["metrics"]`.
HEADLINE = (
    ("ttft_s", "TTFT"),
    ("tpot_s", "TPOT"),
    ("gap_s", "Gap"),
    ("e2e_s", "E2E"),
    ("srv_queue_s", "Queue time, server"),
)
# Metrics of a run that are whole numbers.
COUNTS = ("concurrency_p50", "concurrency_max")
LATENCIES = (
    ("ttft_s", "TTFT"),
    ("ttft_co_s", "TTFT from schedule"),
    ("ttfat_s", "Time to first answer"),
    ("tpot_s", "TPOT"),
    ("gap_s", "Gap"),
    ("itl_s", "ITL"),
    ("max_gap_s", "Longest gap"),
    ("e2e_s", "E2E"),
    ("e2e_co_s", "E2E from schedule"),
    ("ntpot_s", "Normalized latency"),
)


def summary_table(analyses: Sequence[Analysis]) -> pd.DataFrame:
    """The summary table in the form of k6: a row per metric (and run), avg, min, med, max, p(90), p(95) in ms."""
    rows = []
    for name, title in HEADLINE:
        for analysis in analyses:
            metric = analysis.summary["metrics"][primary_latency(name, analysis.run.manifest.is_open_loop)]
            if not metric["count"]:
                if name == "srv_queue_s" and (queue := analysis.summary["server"].get("queue_s")):
                    rows.append(_row(title, analysis, analyses, {"avg": 1e3 * queue["mean"]}))
                continue
            values = {
                "avg": marked(_mean(metric)),
                "min": 1e3 * metric["min"],
                "max": marked(_max(metric)),
                **{title: marked(percentile(metric, p)) for p, title in SUMMARY_PERCENTILES.items()},
            }
            rows.append(_row(title, analysis, analyses, values))
    columns = ["ms, ↓ better", *(["run"] if len(analyses) > 1 else []), "avg", "min", "med", "max", "p(90)", "p(95)"]
    return pd.DataFrame(rows, columns=columns)


def marked(estimate: Estimate) -> Estimate | float | None:
    """The value without its interval; an unsupported value has its mark."""
    return (
        estimate.value
        if estimate.is_supported
        else Estimate(estimate.value, is_supported=False, is_high=estimate.is_high)
    )


def _row(title: str, analysis: Analysis, analyses: Sequence[Analysis], values: Mapping[str, Any]) -> dict[str, Any]:
    return {"ms, ↓ better": title, **({"run": analysis.label} if len(analyses) > 1 else {}), **values}


K6_PROFILE = "bloom-k6"


def k6_table(analyses: Sequence[Analysis]) -> pd.DataFrame:
    """The table of TGI's first load test: a row per run of its profile, E2E in seconds and requests/s."""
    rows = []
    for analysis in analyses:
        metric = analysis.summary["metrics"]["e2e_s"]
        if analysis.run.manifest.config.get("profile") == K6_PROFILE and metric["count"]:
            percentiles = {title: metric["percentiles"][p]["value"] for p, title in SUMMARY_PERCENTILES.items()}
            columns = {"avg": metric["mean"], "min": metric["min"], "max": metric["max"], **percentiles}
            row = {name: columns[name] for name in ("avg", "min", "med", "max", "p(90)", "p(95)")}
            rows.append(
                {"E2E, s ↓": analysis.label, **row, "RPS ↑": analysis.summary["rates"]["requests_per_s"]["value"]}
            )
    return pd.DataFrame(rows)


def totals_table(analyses: Sequence[Analysis]) -> pd.DataFrame:
    """A column per run: rates and latencies with the change against the first run, failures, load, window, drain."""
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
            own["rates"][name]["value"], None if first is None else first.summary["rates"][name]["value"]
        )
        for name, title in TOTAL_RATES.items()
    }
    for name, title in TOTAL_LATENCIES.items():
        for stat in ("p50", "p95"):
            before = None if first is None else _primary_percentile(first, name, stat).value
            found[f"{title} {stat}, ms ↓"] = with_change(_primary_percentile(analysis, name, stat).value, before)
    return found | {
        "Failed ↓": f"{failed_requests(analysis):,} of {sum(own['counts'].values()):,}",
        "Load": load_sentence(analysis.run.manifest),
        "Window": format_duration(window.length_s),
        "Drain limit": None if window.drain_s is None else format_duration(window.drain_s),
    }


def _primary_percentile(analysis: Analysis, name: str, stat: str) -> Estimate:
    column = primary_latency(name, analysis.run.manifest.is_open_loop)
    return percentile(analysis.summary["metrics"][column], stat)


def with_change(value: float | None, before: float | None) -> str | None:
    """A value with its change in percent.

    >>> with_change(110.0, 100.0), with_change(97.0, 100.0), with_change(5.0, None)
    ('110 (+10.0 %)', '97.0 (−3.0 %)', '5.00')
    """
    if value is None:
        return None
    if not before:
        return format_number(value)
    change = f"{100 * (value / before - 1):+,.1f}".replace("-", "\N{MINUS SIGN}")
    return f"{format_number(value)} ({change} %)"


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


def scaled(found: Mapping[str, Any], scale: float, *, is_high: bool = False) -> Estimate:
    value, lo, hi = (None if found[name] is None else scale * found[name] for name in ("value", "lo", "hi"))
    needed = found.get("needed")
    is_bound = bool(found.get("at_least"))
    # An interval can also be missing for other reasons than too few requests.
    is_supported = found.get("supported", lo is not None or needed is None) and not is_bound
    return Estimate(value, lo, hi, is_supported, needed=needed, is_high=is_high or is_bound)


def percentile(metric: Mapping[str, Any], name: str) -> Estimate:
    """A percentile of a latency in ms."""
    return scaled(metric["percentiles"][name], 1e3, is_high=name in HIGH_PERCENTILES)


def _mean(metric: Mapping[str, Any]) -> Estimate:
    """The mean of a latency in ms."""
    interval = metric.get("mean_interval", NO_INTERVAL)
    return scaled({"value": metric["mean"], "at_least": metric.get("at_least"), **interval}, 1e3)


def _max(metric: Mapping[str, Any]) -> Estimate:
    """The largest latency in ms; a lower bound if a request was cut off."""
    return scaled({"value": metric["max"], "at_least": metric.get("at_least"), **NO_INTERVAL}, 1e3)


HIGH_PERCENTILES = ("p90", "p95", "p99", "p99.9")
NO_INTERVAL: Mapping[str, Any] = {"lo": None, "hi": None, "needed": None}


def latency_table(analysis: Analysis) -> pd.DataFrame:
    """Every latency in ms: count, missing, mean, and percentiles with 95 % intervals."""
    rows = []
    for name, title in _shown_latencies(analysis):
        metric = analysis.summary["metrics"][name]
        shown = {p: percentile(metric, p) for p in ("p50", "p90", "p95", "p99")}
        counts = {"count": metric["count"], "missing": metric["missing"]}
        row = {"ms, ↓ better": title, **counts, "mean": _mean(metric), **shown, "max": marked(_max(metric))}
        rows.append(row)
    return pd.DataFrame(rows)


def unsupported_note(analyses: Sequence[Analysis]) -> str:
    """The unsupported values of the summary table and the requests that they need; empty if all are supported."""
    parts = []
    for name, title in HEADLINE:
        for analysis in analyses:
            metric = analysis.summary["metrics"][primary_latency(name, analysis.run.manifest.is_open_loop)]
            shown = {"avg": _mean(metric)} | {title: percentile(metric, p) for p, title in SUMMARY_PERCENTILES.items()}
            needs = {about(each.needed) for each in shown.values() if not each.is_supported and each.needed}
            names = [title for title, each in shown.items() if not each.is_supported and each.needed]
            if metric["count"] and names:
                label = f" of {analysis.label}" if len(analyses) > 1 else ""
                span = "–".join(f"{each:,}" for each in sorted({min(needs), max(needs)}))
                parts.append(f"{title}{label} {', '.join(names)}: about {span}")
    if not parts:
        return ""
    return f"{UNSUPPORTED} Requests at this load for an interval: {'; '.join(parts)}."


UNSUPPORTED = "~ and ≥ mark values that are unsupported: too few requests for a 95 % interval."
SUMMARY_PERCENTILES = {"p50": "med", "p90": "p(90)", "p95": "p(95)"}


def _shown_latencies(analysis: Analysis) -> list[tuple[str, str]]:
    """The latencies that have values and do not repeat another row.

    Rows are equal in these cases: without reasoning, the first answer is the first token; with one token per event, ITL
    is the gap; in a closed loop, the intended start is the send. In an open loop, the titles name the origin.
    """
    metrics, is_open_loop = analysis.summary["metrics"], analysis.run.manifest.is_open_loop
    repeats = {"ttfat_s": "ttft_s", "itl_s": "gap_s"}
    corrected = () if is_open_loop else tuple(CORRECTED.values())
    return [
        (name, f"{title} from send" if is_open_loop and name in CORRECTED else title)
        for name, title in LATENCIES
        if metrics[name]["count"]
        and name not in corrected
        and not (name in repeats and metrics[name]["percentiles"] == metrics[repeats[name]]["percentiles"])
    ]


def adjusted_table(analysis: Analysis) -> pd.DataFrame:
    """Latency percentiles in ms if failed requests count as infinitely slow; empty without failures."""
    if not failed_requests(analysis):
        return pd.DataFrame()
    rows = []
    for name, title in _shown_latencies(analysis):
        adjusted = analysis.summary["metrics"][name]["adjusted"]
        if adjusted is not None:
            shown = {p: "∞" if adjusted[p] is None else 1e3 * adjusted[p] for p in ("p50", "p90", "p95", "p99")}
            rows.append({"ms, ↓ better": title, **shown})
    return pd.DataFrame(rows)


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

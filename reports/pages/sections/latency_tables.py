"""Tables of latencies: each function takes analysed runs and returns a frame of text, numbers and `Estimate`s.

Tables of requests are in `request_tables.py`.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from reports.document import Estimate, about
from reports.metrics.requests.per_request import CORRECTED, primary_latency
from reports.metrics.summary import Analysis
from reports.pages.sections.request_tables import failed_requests

# Rows of the summary table, by their key in `summary["metrics"]`.
HEADLINE = (
    ("ttft_s", "TTFT"),
    ("tpot_s", "TPOT"),
    ("gap_s", "Gap"),
    ("e2e_s", "E2E"),
    ("srv_queue_s", "Queue time, server"),
)
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
    """The summary table: a row per metric (and run), percentiles, mean, min and max in ms. A phone shows the first."""
    rows = []
    for name, title in HEADLINE:
        for analysis in analyses:
            metric = analysis.summary["metrics"][primary_latency(name, analysis.run.manifest.is_open_loop)]
            if not metric["count"]:
                if name == "srv_queue_s" and (queue := analysis.summary["server"].get("queue_s")):
                    rows.append(_row(title, analysis, analyses, {"mean": 1e3 * queue["mean"]}))
                continue
            values = {
                **{p: marked(percentile(metric, p)) for p in SUMMARY_PERCENTILES},
                "mean": marked(_mean(metric)),
                "min": 1e3 * metric["min"],
                "max": marked(_max(metric)),
            }
            rows.append(_row(title, analysis, analyses, values))
    columns = ["ms, ↓ better", *(["run"] if len(analyses) > 1 else []), *SUMMARY_PERCENTILES, "mean", "min", "max"]
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


def group_percentile(row: Mapping[str, Any], latency: str, name: str) -> Estimate | None:
    """A percentile of a latency in ms, of a row of `adapters` or `structured` in a summary; None without one."""
    value = row[f"{latency}_{name}"]
    if value is None:
        return None
    bounds = row[f"{latency}_{name}_interval"]
    return scaled({"value": value, **bounds}, 1e3, is_high=name in HIGH_PERCENTILES)


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
    """Every latency in ms: percentiles and mean with 95 % intervals, max, count, missing."""
    rows = []
    for name, title in _shown_latencies(analysis):
        metric = analysis.summary["metrics"][name]
        shown = {p: percentile(metric, p) for p in ("p50", "p90", "p95", "p99")}
        counts = {"count": metric["count"], "missing": metric["missing"]}
        rows.append({"ms, ↓ better": title, **shown, "mean": _mean(metric), "max": marked(_max(metric)), **counts})
    return pd.DataFrame(rows)


def unsupported_note(analyses: Sequence[Analysis]) -> str:
    """The unsupported values of the summary table and the requests that they need; empty if all are supported."""
    found: dict[tuple[str, str, str], list[str]] = {}
    for name, title in HEADLINE:
        for analysis in analyses:
            metric = analysis.summary["metrics"][primary_latency(name, analysis.run.manifest.is_open_loop)]
            shown = {each: percentile(metric, each) for each in SUMMARY_PERCENTILES} | {"mean": _mean(metric)}
            needs = {about(each.needed) for each in shown.values() if not each.is_supported and each.needed}
            names = [title for title, each in shown.items() if not each.is_supported and each.needed]
            if metric["count"] and names:
                label = f" of {analysis.label}" if len(analyses) > 1 else ""
                span = "–".join(f"{each:,}" for each in sorted({min(needs), max(needs)}))
                found.setdefault((label, "" if len(names) == len(shown) else f" {', '.join(names)}", span), []).append(
                    title
                )
    if not found:
        return ""
    parts = (f"{', '.join(titles)}{names}{label}: about {span}" for (label, names, span), titles in found.items())
    return f"{UNSUPPORTED} Requests at this load for an interval: {'; '.join(parts)}."


ORIGIN = "TTFT and E2E count from the intended start in an open loop, from the send in a closed loop."
UNSUPPORTED = "~ and ≥ mark values that are unsupported: too few requests for a 95 % interval."
SUMMARY_PERCENTILES = ("p50", "p90", "p95")


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

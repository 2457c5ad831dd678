"""Tables: one function each, analysed runs in, `DataFrame` out. Cells are text, numbers or `Estimate`s."""

from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from reports.document import Estimate
from reports.metrics import METRICS, PER_RUN
from reports.per_request import Direction
from reports.records import Status
from reports.server import SERVER_METRICS
from reports.summary import Analysis

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
CORRECTED = {"ttft_s": "ttft_co_s", "e2e_s": "e2e_co_s"}
STATUS_TEXT = {
    Status.OK: "complete",
    Status.CONNECT_ERROR: "no connection, or it broke before the headers",
    Status.TIMEOUT: "a time limit passed",
    Status.OVERLOADED: "refused with 429",
    Status.HTTP_4XX: "another 4xx",
    Status.HTTP_5XX: "a 5xx",
    Status.STREAM_ERROR: "error inside the stream",
    Status.TRUNCATED: "ended without a finish",
    Status.BAD_PAYLOAD: "unreadable JSON or fields",
    Status.PROTOCOL_ERROR: "not a response of this API",
    Status.CANCELLED: "cancelled by the generator",
    Status.UNFINISHED: "still running at the drain limit",
    Status.CLIENT_ERROR: "failed inside the generator",
}


def summary_table(analyses: Sequence[Analysis]) -> pd.DataFrame:
    """The table that k6 users know: a row per metric (and run), avg, min, med, max, p(90), p(95) in milliseconds."""
    rows = []
    for name, title in HEADLINE:
        for analysis in analyses:
            metric = analysis.summary["metrics"][_primary(name, analysis)]
            if not metric["count"]:
                if name == "srv_queue_s" and (queue := analysis.summary["server"].get("queue_s")):
                    rows.append(_row(title, analysis, analyses, {"avg": 1e3 * queue["mean"]}))
                continue
            percentiles = metric["percentiles"]
            values = {
                "avg": 1e3 * metric["mean"],
                "min": 1e3 * metric["min"],
                "med": 1e3 * percentiles["p50"]["value"],
                "max": 1e3 * metric["max"],
                "p(90)": 1e3 * percentiles["p90"]["value"],
                "p(95)": 1e3 * percentiles["p95"]["value"],
            }
            rows.append(_row(title, analysis, analyses, values))
    columns = ["ms, ↓ better", *(["run"] if len(analyses) > 1 else []), "avg", "min", "med", "max", "p(90)", "p(95)"]
    return pd.DataFrame(rows, columns=columns)


def _primary(name: str, analysis: Analysis) -> str:
    """The corrected latency where the load was open loop."""
    return CORRECTED.get(name, name) if analysis.run.manifest.is_open_loop else name


def _row(title: str, analysis: Analysis, analyses: Sequence[Analysis], values: Mapping[str, Any]) -> dict[str, Any]:
    return {"ms, ↓ better": title, **({"run": analysis.label} if len(analyses) > 1 else {}), **values}


def totals_table(analyses: Sequence[Analysis]) -> pd.DataFrame:
    """Below the summary table, with several runs: RPS, tokens/s, failed requests and count per run."""
    return pd.DataFrame(
        {
            "run": analysis.label,
            "requests/s ↑": analysis.summary["rates"]["requests_per_s"]["value"],
            "output tokens/s ↑": analysis.summary["rates"]["output_tokens_per_s"]["value"],
            "failed ↓": failed_requests(analysis),
            "requests": sum(analysis.summary["counts"].values()),
        }
        for analysis in analyses
    )


def failed_requests(analysis: Analysis) -> int:
    """Requests started in the window that did not end ok."""
    return sum(count for status, count in analysis.summary["counts"].items() if status != Status.OK)


def rates_table(analyses: Sequence[Analysis]) -> pd.DataFrame:
    """Every metric of the whole run with its 95 % interval, unit and better direction."""
    rows = []
    for metric in PER_RUN:
        found = [analysis.summary["rates"][metric.name] for analysis in analyses]
        if all(each["value"] is None for each in found):
            continue
        scale, unit = (100.0, "%") if metric.unit == "share" else (1.0, metric.unit)
        row: dict[str, Any] = {"metric": metric.title}
        for analysis, each in zip(analyses, found, strict=True):
            row[_column(analysis, analyses)] = _scaled(each, scale)
        rows.append(row | {"unit": unit, "better": _better(metric.direction)})
    return pd.DataFrame(rows)


def _column(analysis: Analysis, analyses: Sequence[Analysis]) -> str:
    return analysis.label if len(analyses) > 1 else "value (95 % interval)"


def _better(direction: Direction) -> str:
    return {"lower": "↓ lower", "higher": "↑ higher", "none": ""}[direction]


def _scaled(found: Mapping[str, Any], scale: float) -> Estimate:
    value, lo, hi = (None if found[name] is None else scale * found[name] for name in ("value", "lo", "hi"))
    return Estimate(value, lo, hi, found.get("supported", True))


def latency_table(analysis: Analysis) -> pd.DataFrame:
    """Every latency in ms: count, missing, mean, and percentiles with their 95 % intervals."""
    rows = []
    for name, title in _told(analysis):
        metric = analysis.summary["metrics"][name]
        shown = {p: _scaled(metric["percentiles"][p], 1e3) for p in ("p50", "p90", "p95", "p99")}
        counts = {"count": metric["count"], "missing": metric["missing"]}
        rows.append(
            {"ms, ↓ better": title, **counts, "mean": 1e3 * metric["mean"], **shown, "max": 1e3 * metric["max"]}
        )
    return pd.DataFrame(rows)


def _told(analysis: Analysis) -> list[tuple[str, str]]:
    """The latencies worth a row: those that have values and say more than the row they would repeat.

    Without reasoning the first answer is the first token; with one token an event, ITL is the gap; in a closed loop the
    intended start is the sending.
    """
    metrics = analysis.summary["metrics"]
    repeats = {"ttfat_s": "ttft_s", "itl_s": "gap_s"}
    corrected = () if analysis.run.manifest.is_open_loop else tuple(CORRECTED.values())
    return [
        (name, title)
        for name, title in LATENCIES
        if metrics[name]["count"]
        and name not in corrected
        and not (name in repeats and metrics[name]["percentiles"] == metrics[repeats[name]]["percentiles"])
    ]


def adjusted_table(analysis: Analysis) -> pd.DataFrame:
    """Latency percentiles with every failed request at plus infinity, in ms; empty where nothing failed."""
    if not failed_requests(analysis):
        return pd.DataFrame()
    rows = []
    for name, title in _told(analysis):
        adjusted = analysis.summary["metrics"][name]["adjusted"]
        if adjusted is not None:
            shown = {p: "∞" if adjusted[p] is None else 1e3 * adjusted[p] for p in ("p50", "p90", "p95", "p99")}
            rows.append({"ms, ↓ better": title, **shown})
    return pd.DataFrame(rows)


def status_table(analyses: Sequence[Analysis]) -> pd.DataFrame:
    """How requests ended: a row per status that occurred."""
    rows = []
    for status in Status:
        counts = [analysis.summary["counts"][status] for analysis in analyses]
        if any(counts) or status is Status.OK:
            row: dict[str, Any] = {"status": str(status), "meaning": STATUS_TEXT[status]}
            for analysis, count in zip(analyses, counts, strict=True):
                row[analysis.label if len(analyses) > 1 else "requests"] = count
                if len(analyses) == 1:
                    row["share, %"] = 100 * count / max(sum(analysis.summary["counts"].values()), 1)
            rows.append(row)
    return pd.DataFrame(rows)


def error_table(analyses: Sequence[Analysis]) -> pd.DataFrame:
    """The causes of failures and the phase each struck in; empty where nothing failed."""
    rows = []
    for analysis in analyses:
        failed = analysis.measured.population
        failed = failed[failed["status"] != Status.OK]
        kinds = failed.assign(error_type=failed["error_type"].fillna("unknown")).groupby(
            ["status", "error_type"], sort=False
        )
        for (status, cause), group in kinds:
            phase, _, what = str(cause).rpartition("/")
            row = {"status": str(status), "phase": phase or "unknown", "cause": what, "requests": len(group)}
            rows.append(({"run": analysis.label} if len(analyses) > 1 else {}) | row)
    return pd.DataFrame(rows)


def lengths_table(analyses: Sequence[Analysis]) -> pd.DataFrame:
    """The realised lengths in tokens."""
    titles = {"input_tokens": "input", "cached_input_tokens": "of it cached", "output_tokens": "output"}
    rows = []
    for name, title in titles.items():
        for analysis in analyses:
            found = analysis.summary["workload"]["lengths"][name]
            if not found["count"] or (name == "cached_input_tokens" and not found["max"]):
                continue
            percentiles = found["percentiles"]
            row = {"tokens": title, **({"run": analysis.label} if len(analyses) > 1 else {}), "mean": found["mean"]}
            row |= {
                "min": int(found["min"]),
                "med": percentiles["p50"],
                "p(95)": percentiles["p95"],
                "max": int(found["max"]),
            }
            rows.append(row)
    return pd.DataFrame(rows)


def finish_table(analyses: Sequence[Analysis]) -> pd.DataFrame:
    """Finish reasons and how often each occurred."""
    reasons = list(dict.fromkeys(r for analysis in analyses for r in analysis.summary["workload"]["finish_reasons"]))
    return pd.DataFrame(
        {"finish reason": reason}
        | {
            analysis.label if len(analyses) > 1 else "requests": analysis.summary["workload"]["finish_reasons"].get(
                reason, 0
            )
            for analysis in analyses
        }
        for reason in reasons
    )


def objectives_table(analysis: Analysis) -> pd.DataFrame:
    """Each objective, and how many requests missed it first."""
    slo = analysis.summary["slo"]
    rows = []
    for objective in slo["objectives"]:
        bounds = [
            f"{sign} {objective[key]:g}" for key, sign in (("max", "≤"), ("min", "≥")) if objective.get(key) is not None
        ]
        missed = slo["first_violated"].get(objective["metric"])
        rows.append(
            {
                "objective": f"{objective['metric']} {' and '.join(bounds)}",
                "first missed by": "judged over the run" if missed is None else missed,
            }
        )
    return pd.DataFrame(rows)


def server_table(analysis: Analysis) -> pd.DataFrame:
    """What the server measured over the window, and the client's figure beside it where both exist."""
    ours = {"ttft_s": "ttft_s", "tpot_s": "tpot_s", "gap_s": "gap_s", "request_duration_s": "e2e_s"}
    rows = []
    for metric in SERVER_METRICS:
        found = analysis.summary["server"].get(metric.name)
        if found is None:
            continue
        scale, unit = {"s": (1e3, "ms"), "share": (100.0, "%")}.get(metric.unit, (1.0, metric.unit))
        p95 = (found.get("percentiles") or {}).get("p95")
        mine = analysis.summary["metrics"][ours[metric.name]]["mean"] if metric.name in ours else None
        rows.append(
            {
                "server metric": metric.title,
                "mean": scale * found["mean"] if "mean" in found else None,
                "p95 (its bucket)": None if p95 is None else _scaled(p95, scale),
                "max": None if found.get("max") is None else scale * found["max"],
                "over the window": found.get("change", found.get("count")),
                "client's mean": None if mine is None else 1e3 * mine,
                "unit": unit,
                "series": found["series"],
            }
        )
    frame = pd.DataFrame(rows)
    return frame.dropna(axis=1, how="all") if len(frame) else frame


def generator_table(analyses: Sequence[Analysis]) -> pd.DataFrame:
    """What the load generator measured of itself, with the bounds that judge it."""
    rows = []
    for name, title, scale, unit, bound in GENERATOR:
        values = [analysis.summary["client"].get(name) for analysis in analyses]
        if all(value is None for value in values):
            continue
        row: dict[str, Any] = {"generator": title}
        for analysis, value in zip(analyses, values, strict=True):
            row[analysis.label if len(analyses) > 1 else "value"] = _whole(value, scale)
        rows.append(row | {"unit": unit, "degraded beyond": bound})
    return pd.DataFrame(rows)


def _whole(value: float | None, scale: float) -> float | None:
    return value if value is None or isinstance(value, int) else scale * value


GENERATOR = (
    ("sent_over_offered", "sent / offered requests", 100.0, "%", "99 %"),
    ("schedule_lag_p99_s", "schedule lag, p99", 1e3, "ms", "5 ms or 5 % of median TTFT"),
    ("loop_lag_p99_s", "loop lag, p99", 1e3, "ms", "25 % of the median gap"),
    ("loop_lag_max_s", "longest loop gap", 1e3, "ms", "1 s"),
    ("cpu_share_max", "CPU of the busiest worker", 100.0, "%", "70 %"),
    ("gc_pause_max_s", "longest garbage collection", 1e3, "ms", ""),
    ("open_files_share", "open files, of those allowed", 100.0, "%", ""),
    ("local_ports", "local ports for connections", 1.0, "ports", ""),
    ("coalesced_share", "events that arrived coalesced", 100.0, "%", ""),
    ("token_mismatch_median", "token count mismatch, median", 100.0, "%", "2 %"),
    ("completions", "completions in the window", 1.0, "requests", "100"),
    ("server_requests", "requests the server counted", 1.0, "requests", "any difference"),
    ("lost_workers", "workers lost", 1.0, "workers", "any"),
    ("client_errors", "client errors", 1.0, "requests", "any"),
)


def definitions_table() -> pd.DataFrame:
    """Name and formula of each metric."""
    return pd.DataFrame(
        {"metric": metric.title, "name": metric.name, "unit": metric.unit, "formula": metric.formula}
        for metric in METRICS
        if not metric.name.startswith("srv_")
    )

"""Tables of the requests of runs: status, departures, errors, lengths, finish reasons."""

from collections.abc import Sequence
from typing import Any

import pandas as pd

from reports.metrics.summary import Analysis
from reports.run_schema import NOT_FAILED, Status

STATUS_TEXT = {
    Status.OK: "complete",
    Status.CONNECT_ERROR: "connection failed, or broke before the headers",
    Status.TIMEOUT: "time limit exceeded",
    Status.OVERLOADED: "rejected with status 429",
    Status.HTTP_4XX: "other 4xx status",
    Status.HTTP_5XX: "5xx status",
    Status.STREAM_ERROR: "error inside the stream",
    Status.TRUNCATED: "ended without a finish reason",
    Status.BAD_PAYLOAD: "unreadable JSON or fields",
    Status.PROTOCOL_ERROR: "not a response of this API",
    Status.CANCELLED: "cancelled by the generator",
    Status.UNFINISHED: "still running at the drain limit",
    Status.CLIENT_ERROR: "failed inside the generator",
    Status.ABANDONED: "the client left as planned (--cancel)",
}


def failed_requests(analysis: Analysis) -> int:
    """The number of requests in the window that failed."""
    return sum(count for status, count in analysis.summary["counts"].items() if status not in NOT_FAILED)


def status_table(analyses: Sequence[Analysis]) -> pd.DataFrame:
    """A row per status that occurred."""
    rows = []
    for status in Status:
        counts = [analysis.summary["counts"][status] for analysis in analyses]
        if any(counts) or status is Status.OK:
            row: dict[str, Any] = {"status": str(status), "meaning": STATUS_TEXT[status]}
            for analysis, count in zip(analyses, counts, strict=True):
                row[analysis.label if len(analyses) > 1 else "requests"] = count
                if len(analyses) == 1:
                    row["fraction, %"] = 100 * count / max(sum(analysis.summary["counts"].values()), 1)
            rows.append(row)
    return pd.DataFrame(rows)


def abandoned_table(analyses: Sequence[Analysis]) -> pd.DataFrame:
    """A row per run with abandoned requests: their number, the tokens received, and requests inside the server."""
    rows = []
    for analysis in analyses:
        found = analysis.summary.get("abandoned")
        if found is not None:
            row = {
                "left": found["requests"],
                "of all, %": 100 * found["fraction"],
                "tokens received, mean": found["tokens_mean"],
                "in flight, mean": found["in_flight"],
                "inside the server, mean": found["in_server"],
            }
            rows.append(({"run": analysis.label} if len(analyses) > 1 else {}) | row)
    return pd.DataFrame(rows).dropna(axis=1, how="all")


def error_table(analyses: Sequence[Analysis]) -> pd.DataFrame:
    """A row per status and cause of failures, with the phase; empty without failures."""
    return pd.DataFrame([
        ({"run": analysis.label} if len(analyses) > 1 else {}) | row
        for analysis in analyses
        for row in failure_causes(analysis)
    ])  # fmt: skip


def failure_causes(analysis: Analysis) -> list[dict[str, Any]]:
    """Status, phase, cause and number of failed requests. Of causes that differ only in numbers, the first is shown."""
    failed = analysis.measured.population
    failed = failed[~failed["status"].isin(NOT_FAILED)]
    causes = failed["error_type"].fillna("unknown/unknown").astype(str)
    kinds = failed.assign(error_type=causes, kind=causes.str.replace(r"\d+", "0", regex=True))
    rows = []
    for (status, _), group in kinds.groupby(["status", "kind"], sort=False):
        phase, _, cause = str(group["error_type"].iloc[0]).partition("/")
        rows.append({"status": str(status), "phase": phase, "cause": cause, "requests": len(group)})
    return rows


def lengths_table(analyses: Sequence[Analysis]) -> pd.DataFrame:
    """The actual lengths in tokens, and images per request."""
    titles = {
        **{"input_tokens": "input", "cached_input_tokens": "input, cached", "output_tokens": "output"},
        "images": "images per request",
    }
    rows = []
    for name, title in titles.items():
        for analysis in analyses:
            found = analysis.summary["workload"]["lengths"].get(name) or {"count": 0}
            if not found["count"] or (name in ("cached_input_tokens", "images") and not found["max"]):
                continue
            percentiles = found["percentiles"]
            row: dict[str, object] = {"tokens": title, **({"run": analysis.label} if len(analyses) > 1 else {})}
            row |= {
                "p50": percentiles["p50"],
                "p95": percentiles["p95"],
                "mean": found["mean"],
                "min": int(found["min"]),
                "max": int(found["max"]),
            }
            rows.append(row)
    return pd.DataFrame(rows)


def finish_table(analyses: Sequence[Analysis]) -> pd.DataFrame:
    """The number of responses by finish reason."""
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

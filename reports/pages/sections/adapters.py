"""The section on adapters: requests, failures and latencies of each."""

from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from reports.document import Section, Table
from reports.metrics.summary import Analysis
from reports.pages.sections.latency_tables import ORIGIN, UNSUPPORTED, group_percentile

BASE = "base model"
NOTE = (
    "Requests that started in the window, by the adapter that they named; latencies of complete answers with 95 % "
    f"intervals. {ORIGIN} – marks too few requests for the percentile. {UNSUPPORTED} Rows share the server's batches, "
    "so a slow adapter delays the others: compare with a run without adapters for their cost."
)
TITLES = (("ttft_s", "TTFT"), ("tpot_s", "TPOT"), ("e2e_s", "E2E"))


def adapters_section(analyses: Sequence[Analysis]) -> tuple[Section, ...]:
    """A table for each run whose requests name adapters."""
    blocks = tuple(
        Table(analysis.label if len(analyses) > 1 else "", adapters_table(rows), NOTE)
        for analysis in analyses
        if (rows := analysis.summary.get("adapters"))
    )
    return (Section("Adapters", blocks),) if blocks else ()


def adapters_table(rows: Sequence[Mapping[str, Any]]) -> pd.DataFrame:
    """A row per adapter."""
    total = max(1, sum(row["requests"] for row in rows))
    return pd.DataFrame([_row(row, total) for row in rows], dtype=object).dropna(axis=1, how="all")


def _row(row: Mapping[str, Any], total: int) -> dict[str, Any]:
    shown: dict[str, Any] = {
        "adapter": BASE if row["adapter"] is None else row["adapter"],
        "requests": row["requests"],
        "of all, %": 100 * row["requests"] / total,
        "failed ↓": row["failed"],
        "output tokens": row["output_tokens"],
    }
    for name, title in TITLES:
        for percentile in (50, 95):
            shown[f"{title} p{percentile}, ms ↓"] = group_percentile(row, name, f"p{percentile}")
    return shown

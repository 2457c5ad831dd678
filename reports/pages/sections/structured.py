"""The section on structured answers: validity and latencies of each kind, and of the unconstrained answers."""

from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from reports.document import Estimate, Section, Table
from reports.metrics.summary import Analysis
from reports.pages.sections.latency_tables import ORIGIN, UNSUPPORTED, group_percentile, scaled

KINDS = {None: "unconstrained", "schema": "JSON schema", "tool": "tool call"}
CAUSES = (("cut", "cut at the limit"), ("not_json", "not JSON"), ("not_in_schema", "not in the schema"))
NOTE = (
    f"Complete answers that started in the window, with 95 % intervals. {ORIGIN} Valid: JSON that its schema accepts. "
    f"– marks too few answers for the percentile. {UNSUPPORTED} A ratio is a mean latency divided by that of the "
    "unconstrained answers: the cost that only structured answers have. A mask that delays a whole step delays both; "
    "compare with a run without --structured for this cost."
)


def structured_section(analyses: Sequence[Analysis]) -> tuple[Section, ...]:
    """A table for each run with structured answers."""
    blocks = tuple(
        Table(analysis.label if len(analyses) > 1 else "", structured_table(rows), NOTE)
        for analysis in analyses
        if (rows := analysis.summary.get("structured"))
    )
    return (Section("Structured answers", blocks),) if blocks else ()


def structured_table(rows: Sequence[Mapping[str, Any]]) -> pd.DataFrame:
    """A row per kind of answer."""
    return pd.DataFrame([_row(row) for row in rows], dtype=object).dropna(axis=1, how="all")


def _row(row: Mapping[str, Any]) -> dict[str, Any]:
    shown: dict[str, Any] = {"answers": KINDS.get(row["kind"], row["kind"]), "requests": row["requests"]}
    shown["valid, % ↑"] = _scaled(row.get("validity"), 100.0)
    causes = row.get("causes")
    shown |= {title: None if causes is None else causes.get(cause, 0) for cause, title in CAUSES}
    for name, title in (("ttft_s", "TTFT"), ("tpot_s", "TPOT")):
        for percentile in (50, 95):
            shown[f"{title} p{percentile}, ms ↓"] = group_percentile(row, name, f"p{percentile}")
        shown[f"{title} ratio"] = _scaled(row.get(f"{name}_ratio"), 1.0)
    return shown


def _scaled(found: Mapping[str, Any] | None, scale: float) -> Estimate | None:
    """The value with its interval; a value without one is marked."""
    if found is None or found["value"] is None:
        return None
    return scaled({**found, "supported": found["lo"] is not None}, scale)

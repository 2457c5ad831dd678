"""The result of a plan as text of at most 80 columns: limits, a row for each rate and policy, notes."""

import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from loadgen.commands.present import COLUMNS, render_table
from reports.metrics.titles import limits_text

COLUMNS_NOTE = "--json and plan.csv have every column."
RANGE_NOTE = f"In brackets: the range from the error of the cost model.\n{COLUMNS_NOTE}"


def plan_text(rows: Sequence[Mapping[str, Any]], limits: Sequence[str], attainment: float) -> str:
    """The table of `rows`, of `tgi-tune plan --json`, under a line with the limits."""
    import pandas as pd

    table = pd.DataFrame(
        {
            "requests/s": f"{row['rate']:g}",
            "policy": row["policy"],
            "replicas": replicas_text(row),
            "TTFT p95, ms": f"{row['ttft_p95_ms']:,.0f}",
            "TPOT, ms": f"{row['tpot_mean_ms']:,.1f}",
            **({"per hour": f"{row['cost_per_hour']:,.2f}"} if "cost_per_hour" in row else {}),
        }
        for row in rows
    )
    heading = f"{100 * attainment:g} % of requests within {limits_text(limits)}:"
    note = RANGE_NOTE if table["replicas"].str.contains("(", regex=False).any() else COLUMNS_NOTE
    return "\n".join((textwrap.fill(heading, COLUMNS), "", render_table(table), "", note))


def replicas_text(row: Mapping[str, Any]) -> str:
    """The size of a fleet: `4 + 1 spare (3–5)`.

    >>> replicas_text({"replicas": 4, "with_spare": 5, "range": "3-5"})
    '4 + 1 spare (3–5)'
    >>> replicas_text({"replicas": 1, "with_spare": 1, "range": "1-1"})
    '1'
    """
    count, spare = row["replicas"], row["with_spare"] - row["replicas"]
    low, high = row["range"].split("-")
    return f"{count}{f' + {spare} spare' if spare else ''}{f' ({low}–{high})' if low != high else ''}"

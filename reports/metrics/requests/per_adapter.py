"""The requests of each LoRA adapter: how many, how many failed, and their latencies."""

from typing import Any

import numpy as np
import pandas as pd

from reports.metrics.measured import Measured
from reports.run_schema import NOT_FAILED, Status
from reports.stats.estimators import is_supported

LATENCIES = ("ttft_s", "tpot_s", "e2e_s")
PERCENTILES = (50, 95)


def adapters_summary(measured: Measured) -> list[dict[str, Any]]:
    """A row per adapter, the base model (None) first, then by requests; empty if no request names an adapter.

    Equal numbers are in the order of the names. A percentile is None if an adapter has too few requests for it.
    """
    population = measured.population
    groups = [(str(name), own) for name, own in population.groupby("adapter")]
    if not groups:
        return []
    groups.sort(key=lambda group: (-len(group[1]), group[0]))
    base = population[population["adapter"].isna()]
    return [_row(name, own) for name, own in ([(None, base)] if len(base) else []) + groups]


def _row(name: str | None, own: pd.DataFrame) -> dict[str, Any]:
    succeeded = own[own["status"] == Status.OK]
    row: dict[str, Any] = {
        "adapter": name,
        "requests": len(own),
        "failed": int((~own["status"].isin(NOT_FAILED)).sum()),
        "output_tokens": int(succeeded["output_tokens"].fillna(0).sum()),
    }
    for latency in LATENCIES:
        known = succeeded[latency].dropna()
        for percentile in PERCENTILES:
            has_enough = is_supported(percentile, len(known))
            row[f"{latency}_p{percentile}"] = float(np.percentile(known, percentile)) if has_enough else None
    return row

"""The requests of each LoRA adapter: how many, how many failed, and their latencies."""

from typing import Any

import numpy as np
import numpy.typing as npt

from reports.metrics.measured import Measured
from reports.metrics.requests.group_latencies import group_latencies
from reports.metrics.requests.request_series import RequestSeries
from reports.run_schema import NOT_FAILED, Status

LATENCIES = ("ttft_s", "tpot_s", "e2e_s")


def adapters_summary(measured: Measured) -> list[dict[str, Any]]:
    """A row per adapter, the base model (None) first, then by requests; empty if no request names an adapter.

    Equal numbers are in the order of the names.
    """
    names = measured.population["adapter"]
    counts = sorted(names.dropna().value_counts().items(), key=lambda each: (-each[1], str(each[0])))
    if not counts:
        return []
    series, is_base = RequestSeries.of(measured), np.asarray(names.isna())
    rows = [_row(series, str(name), np.asarray(names == name)) for name, _ in counts]
    return [*([_row(series, None, is_base)] if is_base.any() else []), *rows]


def _row(series: RequestSeries, name: str | None, own: npt.NDArray[np.bool_]) -> dict[str, Any]:
    population = series.measured.population
    is_complete = np.asarray(population["status"] == Status.OK)
    return {
        "adapter": name,
        "requests": int(own.sum()),
        "failed": int((own & ~np.asarray(population["status"].isin(NOT_FAILED))).sum()),
        "output_tokens": int(population["output_tokens"][own & is_complete].fillna(0).sum()),
        **group_latencies(series, own & is_complete, LATENCIES),
    }

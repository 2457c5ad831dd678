"""The share of prompt tokens in the server's prefix cache: measured, and planned by the workload."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from reports.metrics.measured import Measured
from reports.run_schema import Status


@dataclass(frozen=True, slots=True)
class CachedShare:
    """Fractions of the prompt tokens of a run; None where unknown. source: responses or counters."""

    measured: float | None
    planned: float | None
    source: str | None

    def to_json(self) -> dict[str, Any]:
        return {"measured": self.measured, "planned": self.planned, "source": self.source}


def cached_share(measured: Measured, server: Mapping[str, Any]) -> CachedShare:
    """Of the answered requests that started in the window. server: its metrics over the window, by name."""
    population = measured.population
    known = population[(population["status"] == Status.OK) & population["input_tokens"].notna()]
    total = float(known["input_tokens"].sum())
    if not total:
        return CachedShare(None, None, None)
    plans = known["planned_cached_tokens"]
    planned = float(plans.sum()) / total if plans.notna().any() else None
    counts = known["cached_input_tokens"]
    if counts.notna().any():
        return CachedShare(float(counts.sum()) / total, planned, "responses")
    counters = server.get("prefix_hits")
    if counters is not None:
        return CachedShare(float(counters["mean"]), planned, "counters")
    return CachedShare(None, planned, None)

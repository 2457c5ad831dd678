"""The share of prompt tokens that the prefix cache of the server contained: measured, and planned by the workload."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from reports.metrics.measured import Measured
from reports.run_schema import Status


@dataclass(frozen=True, slots=True)
class CachedShare:
    """Cached prompt tokens as fractions of all; None if unknown. source: of `measured`, responses or counters."""

    measured: float | None
    planned: float | None
    source: str | None

    def to_json(self) -> dict[str, Any]:
        return {"measured": self.measured, "planned": self.planned, "source": self.source}


def cached_share(measured: Measured, server: Mapping[str, Any]) -> CachedShare:
    """The share for the answered requests that started in the window. server: the content of `server_summary`."""
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

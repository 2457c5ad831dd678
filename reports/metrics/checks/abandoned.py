"""Requests whose clients disconnected before the end of the answer, and whether the server dropped them too."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from reports.metrics.checks.findings import Finding, Level
from reports.metrics.measured import Measured
from reports.metrics.server.server_replicas import scraped_replicas
from reports.metrics.server.server_series import gauge_series
from reports.metrics.windows import Concurrency, Window
from reports.run_schema import Status

KEPT_FACTOR, KEPT_REQUESTS = 1.25, 1.0
"""A difference up to this factor plus this number of requests is ignored, because gauges are samples."""
MIN_SAMPLES = 5


@dataclass(frozen=True, slots=True)
class Abandoned:
    """The abandoned requests of a window.

    fraction: of all requests. tokens_mean: output tokens before the client left. in_flight: mean number of requests in
    flight at the clients. in_server: mean number of running and waiting requests in the server; None if unknown.
    """

    requests: int
    fraction: float
    tokens_mean: float
    in_flight: float
    in_server: float | None

    @property
    def are_kept(self) -> bool:
        """Whether the server has clearly more requests than its clients have in flight."""
        return self.in_server is not None and self.in_server > KEPT_FACTOR * self.in_flight + KEPT_REQUESTS

    @property
    def findings(self) -> list[Finding]:
        if not self.are_kept:
            return []
        message = (
            f"the server continues requests whose clients left: {self.in_server:.1f} inside the server on average, "
            f"{self.in_flight:.1f} in flight"
        )
        return [Finding("abandoned_kept", Level.VALID, message)]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def find_abandoned(measured: Measured, server_rows: Sequence[Mapping[str, Any]]) -> Abandoned | None:
    """The requests of the window whose clients left; None without any."""
    population, window = measured.population, measured.window
    left = population[population["status"] == Status.ABANDONED]
    if not len(left):
        return None
    return Abandoned(
        len(left),
        len(left) / len(population),
        float(left["output_tokens"].mean()),
        Concurrency.mean(measured.concurrency, window.start_s, window.end_s),
        _mean_in_server(server_rows, window) if _covers_all(measured, server_rows) else None,
    )


def _covers_all(measured: Measured, rows: Sequence[Mapping[str, Any]]) -> bool:
    """Whether the metrics include every replica."""
    others = measured.manifest.target.get("replicas") or ()
    return not others or len(scraped_replicas(rows)) == len(others) + 1


def _mean_in_server(rows: Iterable[Mapping[str, Any]], window: Window) -> float | None:
    """The mean of running and waiting requests over the scrapes of the window; None with few scrapes."""
    listed = list(rows)
    running, waiting = (dict(zip(*gauge_series(listed, name), strict=True)) for name in ("batch_size", "queue_size"))
    inside = [value + waiting.get(t_s, 0.0) for t_s, value in running.items() if window.start_s <= t_s <= window.end_s]
    return float(np.mean(inside)) if len(inside) >= MIN_SAMPLES else None

"""A run prepared for measuring: derived columns, token events and the measurement window."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from reports.metrics.requests.counted import counted, counted_events
from reports.metrics.requests.per_request import PER_REQUEST, meets_objectives
from reports.metrics.requests.queue_state import QueueState
from reports.metrics.windows import Concurrency, Window, find_window, starts_s
from reports.request_columns import RequestColumns, TokenEvents, columns_of
from reports.run_schema import Phase, Status, TokensSource
from reports.run_store import RunManifest, RunResult
from reports.saved_run import SavedRecords
from reports.stats.estimators import NUM_BATCHES, Interval, mean_interval

Array = npt.NDArray[np.float64]

POWER_SERIES = "accelerator_power_watts"


@dataclass(frozen=True, eq=False)
class Measured:
    """A run with its measurement window: every request, those started in the window, and their events.

    requests: the columns of `derive` with the values that count, in the order of start; requests of the drain are last.
    started: [requests], whether each started in the window and not in the drain; these requests are consecutive.
    power: sample times in seconds, and watts. output_batches: the output tokens in each batch of the window.
    """

    manifest: RunManifest
    requests: pd.DataFrame
    started: npt.NDArray[np.bool_]
    events: TokenEvents
    window: Window
    concurrency: Concurrency
    power: tuple[Array, Array]
    output_batches: Array

    @classmethod
    def of(cls, run: RunResult) -> "Measured":
        columns = _columns(run)
        start_s = starts_s(columns.frame, run.manifest.is_open_loop)
        columns = columns.take(np.lexsort((start_s, columns.frame["phase"] == Phase.DRAIN)))
        is_streaming = run.manifest.config.get("stream") is not False
        requests = counted(derive(columns.frame, run.manifest), is_streaming=is_streaming)
        events = TokenEvents.of(columns)
        window = find_window(requests, events, run.manifest)
        watts = sorted(_power(run.server_metrics).items())
        return cls(
            run.manifest,
            requests,
            window.contains(requests["start_s"]) & np.asarray(requests["phase"] != Phase.DRAIN),
            events,
            window,
            Concurrency.of(np.asarray(requests["t_sent_ns"]) / 1e9, np.asarray(requests["t_end_ns"]) / 1e9),
            (np.array([t_s for t_s, _ in watts]), np.array([value for _, value in watts])),
            events.tokens_between(window.start_s, window.end_s, NUM_BATCHES),
        )

    @cached_property
    def population(self) -> pd.DataFrame:
        """The requests that started in the window."""
        return self.requests.iloc[slice(*self._window_slice)]

    @property
    def judged(self) -> pd.DataFrame:
        """The requests of `population` that objectives apply to: all except abandoned requests."""
        is_abandoned = self.population["status"] == Status.ABANDONED
        return self.population[~is_abandoned] if is_abandoned.any() else self.population

    @property
    def started_events(self) -> TokenEvents:
        """The events of the requests that started in the window."""
        return self.events.part(*self._window_slice)

    @property
    def counted_events(self) -> TokenEvents:
        """`started_events` without the events of failed requests."""
        return self.started_events.where(counted_events(self.population))

    @cached_property
    def queue_state(self) -> QueueState:
        """The dependence of the requests that started in the window."""
        return QueueState.of(self.requests, self.started, is_open_loop=self.manifest.is_open_loop)

    @property
    def _window_slice(self) -> tuple[int, int]:
        """The range of the requests that started in the window."""
        inside = np.flatnonzero(self.started)
        return (int(inside[0]), int(inside[-1]) + 1) if len(inside) else (0, 0)

    def batches(self, t_s: "Array | pd.Series[float]", weights: "Array | pd.Series[float] | None" = None) -> Interval:
        """Weight per second in the window, with the Student interval of the batch means."""
        if self.window.length_s <= 0:
            return Interval(math.nan, math.nan, math.nan)
        moments = np.asarray(t_s, dtype=np.float64)
        inside = self.window.contains(moments)
        amounts = np.ones(int(inside.sum())) if weights is None else np.nan_to_num(np.asarray(weights)[inside])
        span = (self.window.start_s, self.window.end_s)
        return self.rate(np.histogram(moments[inside], NUM_BATCHES, span, weights=amounts)[0])

    def rate(self, sums: Array) -> Interval:
        """Sums per batch of the window as a rate per second, with the Student interval of the batch means."""
        if self.window.length_s <= 0:
            return Interval(math.nan, math.nan, math.nan)
        found = mean_interval(sums * NUM_BATCHES / self.window.length_s)
        return Interval(found.value, max(found.lo, 0.0), found.hi)


def _power(rows: Iterable[Mapping[str, Any]]) -> dict[float, float]:
    """The power of all devices together, in watts, by sample time."""
    watts: dict[float, float] = {}
    for row in rows:
        if row["name"] == POWER_SERIES:
            watts[row["t_s"]] = watts.get(row["t_s"], 0.0) + row["value"]
    return watts


def _columns(run: RunResult) -> RequestColumns:
    """The columns from the Parquet file of a saved run, else from its records."""
    return run.records.table.requests() if isinstance(run.records, SavedRecords) else columns_of(run.records)


def derive(frame: pd.DataFrame, manifest: RunManifest) -> pd.DataFrame:
    """The frame of `RequestColumns` with every per-request metric, `start_s`, `itl_exact` and `slo_ok`.

    `slo_ok` is None if the run has no objectives.
    """
    derived = frame.assign(**{metric.name: metric.function(frame) for metric in PER_REQUEST})
    met = meets_objectives(derived, manifest.objectives, manifest.is_open_loop)
    return derived.assign(
        start_s=starts_s(frame, manifest.is_open_loop),
        itl_exact=frame["tokens_source"] == TokensSource.SERVER_STREAM,
        slo_ok=pd.Series([None] * len(frame) if met is None else met.tolist(), index=frame.index, dtype=object),
    )

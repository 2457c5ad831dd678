"""A run made ready for measuring: derived columns, token events, and the window found."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from reports.frames import TokenEvents, requests_frame, token_events
from reports.per_request import PER_REQUEST, meets_objectives
from reports.results import RequestRecord, RunManifest, RunResult, TokensSource
from reports.stats import NUM_BATCHES, Interval, mean_interval
from reports.windows import Concurrency, Window, find_window, starts_s

Array = npt.NDArray[np.float64]

POWER_SERIES = "accelerator_power_watts"


@dataclass(frozen=True, slots=True)
class Measured:
    """A run with its window found: every request, those started in the window, and the events.

    `requests` has the columns of `derive`; `started` marks the latency population. Its order is that of the starts.
    """

    manifest: RunManifest
    requests: pd.DataFrame
    started: npt.NDArray[np.bool_]
    events: TokenEvents
    window: Window
    concurrency: Concurrency
    power: tuple[Array, Array]

    @classmethod
    def of(cls, run: RunResult) -> "Measured":
        records = sorted(run.records, key=_start_key)
        requests = derive(records, run.manifest)
        events = token_events(records)
        window = find_window(requests, events, run.manifest)
        watts = sorted(_power(run.server_metrics).items())
        return cls(
            run.manifest,
            requests,
            window.holds(requests["start_s"]),
            events,
            window,
            Concurrency.of(np.asarray(requests["t_sent_ns"]) / 1e9, np.asarray(requests["t_end_ns"]) / 1e9),
            (np.array([t_s for t_s, _ in watts]), np.array([value for _, value in watts])),
        )

    @property
    def population(self) -> pd.DataFrame:
        """The requests that started in the window."""
        return self.requests[self.started]

    def batches(self, t_s: "Array | pd.Series[float]", weights: "Array | pd.Series[float] | None" = None) -> Interval:
        """Weight per second in the window, with the Student interval of its batch means."""
        if self.window.length_s <= 0:
            return Interval(math.nan, math.nan, math.nan)
        moments = np.asarray(t_s, dtype=np.float64)
        inside = self.window.holds(moments)
        amounts = np.ones(int(inside.sum())) if weights is None else np.nan_to_num(np.asarray(weights)[inside])
        edges = np.linspace(self.window.start_s, self.window.end_s, NUM_BATCHES + 1)
        sums, _ = np.histogram(moments[inside], edges, weights=amounts)
        found = mean_interval(sums * NUM_BATCHES / self.window.length_s)
        return Interval(found.value, max(found.lo, 0.0), found.hi)


def _power(rows: Iterable[Mapping[str, Any]]) -> dict[float, float]:
    """Watts of all devices together, by the moment they were sampled at."""
    watts: dict[float, float] = {}
    for row in rows:
        if row["name"] == POWER_SERIES:
            watts[row["t_s"]] = watts.get(row["t_s"], 0.0) + row["value"]
    return watts


def _start_key(record: RequestRecord) -> int:
    for moment in (record.t_intended_ns, record.t_sent_ns, record.t_dispatch_ns):
        if moment is not None:
            return moment
    return 0


def derive(records: Sequence[RequestRecord], manifest: RunManifest) -> pd.DataFrame:
    """The frame of records with every per-request metric, `start_s`, `itl_exact` and `slo_ok`.

    `slo_ok` is None where the run has no objectives.
    """
    frame = requests_frame(records)
    for metric in PER_REQUEST:
        frame[metric.name] = metric.function(frame)
    frame["start_s"] = starts_s(frame, manifest.is_open_loop)
    frame["itl_exact"] = frame["tokens_source"] == TokensSource.SERVER_STREAM
    met = meets_objectives(frame, manifest.objectives, manifest.is_open_loop)
    frame["slo_ok"] = pd.Series([None] * len(frame) if met is None else met.tolist(), dtype=object)
    return frame

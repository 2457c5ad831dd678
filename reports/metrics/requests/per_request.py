"""Per-request metrics: name, unit, direction, formula and function.

A function takes the frame of `RequestColumns`. Its ns columns are float64 with NaN for a missing time, so the metric of
a missing time is missing and never zero.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import pandas as pd

from reports.run_schema import Status


class Direction(StrEnum):
    """The better direction of a metric."""

    LOWER = "lower"
    HIGHER = "higher"
    NONE = "none"

    @property
    def mark(self) -> str:
        """The arrow in tables and on axes."""
        return {"lower": "↓", "higher": "↑", "none": ""}[self.value]


@dataclass(frozen=True, slots=True)
class RequestMetric:
    """A value per request; `title` is its name in tables and on axes."""

    name: str
    title: str
    unit: str
    direction: Direction
    formula: str
    function: Callable[[pd.DataFrame], "pd.Series[float]"]


def _seconds(later: str, earlier: str) -> Callable[[pd.DataFrame], "pd.Series[float]"]:
    return lambda r: (r[later] - r[earlier]) / 1e9


def _succeeded(r: pd.DataFrame, values: "pd.Series[float]") -> "pd.Series[float]":
    return values.where(r["status"] == Status.OK)


def _end_ns(r: pd.DataFrame) -> "pd.Series[float]":
    """The arrival of the last token; for a blocking call, the end of the response."""
    return r["t_last_ns"].fillna(r["t_end_ns"])


def _tpot_s(r: pd.DataFrame) -> "pd.Series[float]":
    tokens = r["output_tokens"] - r["first_event_tokens"].fillna(1)
    return (r["t_last_ns"] - r["t_first_ns"]) / 1e9 / tokens.where(tokens > 0)


def _decode_tps(r: pd.DataFrame) -> "pd.Series[float]":
    tpot_s = _tpot_s(r)
    return 1 / tpot_s.where(tpot_s > 0)


def _e2e_s(r: pd.DataFrame) -> "pd.Series[float]":
    return _succeeded(r, (_end_ns(r) - r["t_sent_ns"]) / 1e9)


def _e2e_co_s(r: pd.DataFrame) -> "pd.Series[float]":
    return _succeeded(r, (_end_ns(r) - r["t_intended_ns"]) / 1e9)


def _ntpot_s(r: pd.DataFrame) -> "pd.Series[float]":
    return _e2e_s(r) / r["output_tokens"].where(r["output_tokens"] > 0)


def _length_shortfall(r: pd.DataFrame) -> "pd.Series[float]":
    requested = r["requested_output_tokens"]
    # The length of a structured answer is never forced.
    return (1 - r["output_tokens"] / requested.where(requested > 0)).where(r["constraint"].isna())


def _outside_server_s(r: pd.DataFrame) -> "pd.Series[float]":
    return _e2e_s(r) - r["srv_validation_s"] - r["srv_queue_s"] - r["srv_inference_s"]


def _column(name: str) -> Callable[[pd.DataFrame], "pd.Series[float]"]:
    return lambda r: r[name]


LOWER, HIGHER = Direction.LOWER, Direction.HIGHER

PER_REQUEST = (
    RequestMetric("ttft_s", "TTFT", "s", LOWER, "t_first - t_sent", _seconds("t_first_ns", "t_sent_ns")),
    RequestMetric(
        "ttft_co_s", "TTFT from schedule", "s", LOWER, "t_first - t_intended", _seconds("t_first_ns", "t_intended_ns")
    ),
    RequestMetric(
        "ttfat_s",
        "Time to first answer",
        "s",
        LOWER,
        "t_first_answer - t_sent",
        _seconds("t_first_answer_ns", "t_sent_ns"),
    ),
    RequestMetric("ttfb_s", "Time to headers", "s", LOWER, "t_headers - t_sent", _seconds("t_headers_ns", "t_sent_ns")),
    RequestMetric("tpot_s", "TPOT", "s", LOWER, "(t_last - t_first) / (n_out - k1)", _tpot_s),
    RequestMetric("max_gap_s", "Longest gap", "s", LOWER, "max of gap_s", _column("max_gap_s")),
    RequestMetric("e2e_s", "E2E", "s", LOWER, "t_last - t_sent; blocking: t_end - t_sent", _e2e_s),
    RequestMetric("e2e_co_s", "E2E from schedule", "s", LOWER, "t_last - t_intended", _e2e_co_s),
    RequestMetric("ntpot_s", "Normalized latency", "s", LOWER, "e2e_s / n_out", _ntpot_s),
    RequestMetric("decode_tps", "Decode speed", "tokens/s", HIGHER, "1 / tpot_s", _decode_tps),
    RequestMetric(
        "schedule_lag_s",
        "Schedule lag",
        "s",
        LOWER,
        "t_dispatch - t_intended",
        _seconds("t_dispatch_ns", "t_intended_ns"),
    ),
    RequestMetric(
        "limit_wait_s", "Wait at limit", "s", LOWER, "part of schedule_lag_s at the limit", _column("limit_wait_s")
    ),
    RequestMetric(
        "length_shortfall",
        "Length shortfall",
        "fraction",
        LOWER,
        "1 - n_out / requested output tokens",
        _length_shortfall,
    ),
    RequestMetric(
        "srv_validation_s", "Server validation", "s", LOWER, "reported by the server", _column("srv_validation_s")
    ),
    RequestMetric("srv_queue_s", "Queue time", "s", LOWER, "reported by the server", _column("srv_queue_s")),
    RequestMetric(
        "srv_inference_s", "Server inference", "s", LOWER, "reported by the server", _column("srv_inference_s")
    ),
    RequestMetric(
        "srv_time_per_token_s",
        "Server time per token",
        "s",
        LOWER,
        "reported by the server",
        _column("srv_time_per_token_s"),
    ),
    RequestMetric(
        "outside_server_s",
        "Outside the server",
        "s",
        LOWER,
        "e2e_s - validation - queue - inference",
        _outside_server_s,
    ),
)

LATENCY_NAME = re.compile(r"(?P<name>[a-z0-9_]+?)_(?P<stat>mean|min|max|p\d+(?:\.\d+)?)_ms")
CORRECTED = {"ttft_s": "ttft_co_s", "e2e_s": "e2e_co_s"}
"""Latencies, and the latencies that count from the intended start instead of the send."""


def primary_latency(name: str, is_open_loop: bool) -> str:
    """The column of a latency: in an open loop the column that counts from the intended start, if there is one."""
    return CORRECTED.get(name, name) if is_open_loop else name


def request_metric_of(limit: str, is_open_loop: bool) -> str | None:
    """The per-request metric that an objective such as `ttft_p95_ms` bounds; None for a rate.

    >>> request_metric_of("ttft_p95_ms", is_open_loop=True), request_metric_of("tpot_mean_ms", is_open_loop=True)
    ('ttft_co_s', 'tpot_s')
    """
    match = LATENCY_NAME.fullmatch(limit)
    name = match["name"] if match else limit.removesuffix("_ms").removesuffix("_s")
    column = primary_latency(f"{name}_s", is_open_loop)
    if limit in {metric.name for metric in PER_REQUEST}:
        column = limit
    return column if column in {metric.name for metric in PER_REQUEST} else None


def meets_objectives(
    frame: pd.DataFrame, objectives: Sequence[Mapping[str, Any]], is_open_loop: bool
) -> "pd.Series[bool] | None":
    """The requests that succeeded and meet every per-request objective; None without such objectives."""
    verdicts = [verdict for each in objectives if (verdict := meets_objective(frame, each, is_open_loop)) is not None]
    if not verdicts:
        return None
    met = frame["status"] == Status.OK
    for verdict in verdicts:
        met &= verdict
    return met


def meets_objective(frame: pd.DataFrame, objective: Mapping[str, Any], is_open_loop: bool) -> "pd.Series[bool] | None":
    """The requests that meet one objective {metric, max or min}; a request without the metric does not meet it.

    None if the metric is not a per-request metric.
    """
    column = request_metric_of(objective["metric"], is_open_loop)
    if column is None:
        return None
    scale = 1e3 if objective["metric"].endswith("_ms") else 1.0
    values = frame[column] * scale
    met = values.notna()
    if objective.get("max") is not None:
        met &= values <= objective["max"]
    if objective.get("min") is not None:
        met &= values >= objective["min"]
    return met

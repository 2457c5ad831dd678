"""Whether the server restarted during a run, by its counters and its start time."""

from collections.abc import Mapping, Sequence
from typing import Any

START_TIME_SERIES = "process_start_time_seconds"
COUNTER_SUFFIXES = ("_total", "_count", "_success")
UNREACHABLE = ("server_unreachable", "server_unhealthy")
"""Stop reasons of a run whose server no longer answered."""


def restarted_s(rows: Sequence[Mapping[str, Any]]) -> float | None:
    """The time in seconds at which a counter of the server fell, as after a restart; None if none fell."""
    latest: dict[tuple[str, str], float] = {}
    for row in rows:
        if not row["name"].endswith(COUNTER_SUFFIXES) or row["value"] is None:
            continue
        key = (row["name"], row.get("labels") or "")
        if row["value"] < latest.get(key, 0.0):
            return float(row["t_s"])
        latest[key] = row["value"]
    return None

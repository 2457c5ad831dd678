"""The server's metrics of each replica, in a run that scraped several."""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pandas as pd

from reports.metrics.server.server_metrics import SERVER_METRICS
from reports.metrics.server.server_series import server_summary
from reports.metrics.windows import Window

_REPLICA = re.compile(r'(?:^|,)replica="([^"]*)"$')


def scraped_replicas(rows: Iterable[Mapping[str, Any]]) -> list[str]:
    """The URLs of the scraped replicas, in order; empty if only one server was scraped."""
    return list(dict.fromkeys(url for row in rows if (url := _replica_of(row)) is not None))


def server_replicas_table(rows: Sequence[Mapping[str, Any]], window: Window) -> pd.DataFrame:
    """A row per metric and a column per replica: means, or the change of a counter; empty for a single server."""
    found = {
        url: server_summary([row for row in rows if _replica_of(row) == url], window) for url in scraped_replicas(rows)
    }
    table = []
    for metric in SERVER_METRICS:
        scale, unit = {"s": (1e3, "ms"), "fraction": (100.0, "%")}.get(metric.unit, (1.0, metric.unit))
        values = {url: _value(summary.get(metric.name), scale) for url, summary in found.items()}
        if any(value is not None for value in values.values()):
            table.append({"server metric": metric.title, **values, "unit": unit})
    return pd.DataFrame(table)


def _replica_of(row: Mapping[str, Any]) -> str | None:
    match = _REPLICA.search(row.get("labels") or "")
    return None if match is None else match[1]


def _value(found: Mapping[str, Any] | None, scale: float) -> float | None:
    if found is None:
        return None
    return scale * float(found["mean"]) if "mean" in found else float(found["change"])

"""Queries a Prometheus over its HTTP API."""

import json
import urllib.parse
import urllib.request
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Prometheus:
    """The Prometheus at `url`, such as `http://localhost:9090`."""

    url: str

    def api(self, path: str, **parameters: str) -> Any:
        """`data` of an answer of `/api/v1`."""
        query = urllib.parse.urlencode(parameters)
        with urllib.request.urlopen(f"{self.url}/api/v1/{path}?{query}", timeout=10) as response:
            return json.load(response)["data"]

    def values(self, query: str) -> list[float]:
        """The value of each series now."""
        return [float(each["value"][1]) for each in self.api("query", query=query)["result"]]

    def series(self, query: str, start_s: float, end_s: float, step_s: float) -> list["Series"]:
        """The values of each series between two times in Unix seconds."""
        found = self.api("query_range", query=query, start=f"{start_s}", end=f"{end_s}", step=f"{step_s}")
        return [
            Series(each["metric"], [(at, float(value)) for at, value in each["values"]]) for each in found["result"]
        ]


@dataclass(frozen=True, slots=True)
class Series:
    """One series of an answer: its labels, and its values as (Unix seconds, value)."""

    labels: dict[str, str]
    points: list[tuple[float, float]]

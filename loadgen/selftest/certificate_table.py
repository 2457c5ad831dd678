"""The certificate as a table: a row per model, load, number of requests and latency, a column per statistic.

An entry holds the percentage of runs that print the interval, the coverage of those in percent, and the median width
over the true value. `met 95 %` is the attainment of a limit at the true p95. The rows of E2E have the throughput too.
"""

from collections.abc import Iterable, Mapping
from typing import Any

COLUMNS = {
    "mean": "mean",
    "p50": "p50",
    "p90": "p90",
    "p95": "p95",
    "p99": "p99",
    "att90": "met 90 %",
    "att95": "met 95 %",
    "att99": "met 99 %",
    "rate": "requests/s",
}
LATENCIES = {"ttft": "TTFT", "e2e": "E2E", "throughput": "E2E"}
NOTHING = "–"

HEADER = ("model", "load", "requests", "latency", *COLUMNS.values())


def rows(cells: Iterable[Mapping[str, Any]]) -> list[tuple[str, ...]]:
    """cells: those of `Certificate.to_json`.

    >>> cell = {"model": "M/M/1", "load": 0.5, "requests": 300, "latency": "e2e", "statistic": "mean"}
    >>> rows([cell | {"printed": 0.812, "coverage": 0.958, "width": 0.31}])[0][:5]
    ('M/M/1', '0.5', '300', 'E2E', '81/95.8/0.31')
    """
    found: dict[tuple[str, ...], dict[str, str]] = {}
    for cell in cells:
        key = (cell["model"], f"{cell['load']:g}", f"{cell['requests']}", LATENCIES[cell["latency"]])
        found.setdefault(key, {})[cell["statistic"]] = _entry(cell)
    return [(*key, *(entries.get(name, "") for name in COLUMNS)) for key, entries in found.items()]


def markdown(cells: Iterable[Mapping[str, Any]]) -> str:
    lines = [HEADER, ("---",) * len(HEADER), *rows(cells)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def text(cells: Iterable[Mapping[str, Any]]) -> str:
    lines = [HEADER, *rows(cells)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(value.ljust(width) for value, width in zip(line, widths, strict=True)).rstrip() for line in lines
    )


def _entry(cell: Mapping[str, Any]) -> str:
    if not cell["printed"]:
        return NOTHING
    return f"{100 * cell['printed']:.0f}/{100 * cell['coverage']:.1f}/{cell['width']:.2f}"

"""Parses requirements on a metric: an objective, `ttft_p95_ms < 500`, or an interval width, `ttft_p95_ms 5%`."""

import re
from collections.abc import Iterable
from typing import Any

from loadgen.errors import UsageError
from loadgen.terminal.suggestion import nearest

_OBJECTIVE = re.compile(r"\s*([a-z0-9_.]+)\s*(<=|>=|<|>)\s*([0-9]+(?:\.[0-9]*)?(?:[eE][+-]?[0-9]+)?)\s*")
EXAMPLE = "ttft_p95_ms < 500"
_WIDTH = re.compile(r"\s*([a-z0-9_.]+)\s+(\d+(?:\.\d*)?)\s*%\s*")
WIDTH_EXAMPLE = "ttft_p95_ms 5%"


def parse_objective(text: str) -> dict[str, Any]:
    """An objective in the manifest's form. A value equal to the bound meets it. Raises ValueError.

    >>> parse_objective("tpot_mean_ms < 50")
    {'metric': 'tpot_mean_ms', 'max': 50.0}
    """
    match = _OBJECTIVE.fullmatch(text)
    if match is None:
        raise ValueError(f'{text!r} is not an objective; write it as "{EXAMPLE}"')
    return {"metric": match[1], "max" if match[2].startswith("<") else "min": float(match[3])}


def parse_width(text: str) -> tuple[str, float]:
    """A metric and the largest relative half-width of its interval. Raises ValueError.

    >>> parse_width("ttft_p95_ms 5%")
    ('ttft_p95_ms', 0.05)
    """
    match = _WIDTH.fullmatch(text)
    if match is None or not 0 < float(match[2]) < 100:
        raise ValueError(f'{text!r} is not an interval width; write it as "{WIDTH_EXAMPLE}"')
    return match[1], float(match[2]) / 100


def objectives_of(texts: Iterable[str]) -> list[dict[str, Any]]:
    """The objectives of a load. Raises UsageError for a metric that a single request does not have."""
    found = [parse_objective(text) for text in texts]
    if not found:
        return []
    from reports.metrics.requests.per_request import PER_REQUEST, Direction, request_metric_of

    directions = {metric.name: metric.direction for metric in PER_REQUEST}

    for each in found:
        name = request_metric_of(each["metric"], is_open_loop=False)
        if name is not None and "min" in each and directions[name] is Direction.LOWER:
            raise UsageError(
                f"`slo` is '{each['metric']} > {each['min']:g}', but a lower {each['metric']} is better; "
                f"write '{each['metric']} < {each['min']:g}'"
            )
        if name is None:
            names = [f"{metric.name.removesuffix('_s')}_p95_ms" for metric in PER_REQUEST[:4]]
            names += ["tpot_mean_ms", "max_gap_p95_ms", "e2e_p95_ms", "ntpot_mean_ms"]
            raise UsageError(
                f"`slo` names {each['metric']!r}, which is not a metric of a single request; choose from "
                f"{', '.join(names)}{nearest(each['metric'], names)}"
            )
    return found

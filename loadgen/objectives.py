"""Objectives of single requests, as people write them: `ttft_p95_ms < 500`."""

import re
from collections.abc import Iterable
from typing import Any

from loadgen.errors import UsageError

_OBJECTIVE = re.compile(r"\s*([a-z0-9_.]+)\s*(<=|>=|<|>)\s*([0-9]+(?:\.[0-9]*)?(?:[eE][+-]?[0-9]+)?)\s*")
EXAMPLE = "ttft_p95_ms < 500"


def parse_objective(text: str) -> dict[str, Any]:
    """An objective as the manifest keeps it. A request at the bound itself meets it. Raises ValueError.

    >>> parse_objective("tpot_mean_ms < 50")
    {'metric': 'tpot_mean_ms', 'max': 50.0}
    """
    match = _OBJECTIVE.fullmatch(text)
    if match is None:
        raise ValueError(f'{text!r} is no objective; write it as "{EXAMPLE}"')
    return {"metric": match[1], "max" if match[2].startswith("<") else "min": float(match[3])}


def objectives_of(texts: Iterable[str]) -> list[dict[str, Any]]:
    """The objectives of a load. Raises UsageError for a metric that no single request has."""
    found = [parse_objective(text) for text in texts]
    if not found:
        return []
    from reports.per_request import PER_REQUEST, request_metric_of

    for each in found:
        if request_metric_of(each["metric"], is_open_loop=False) is None:
            names = ", ".join(f"{metric.name.removesuffix('_s')}_p95_ms" for metric in PER_REQUEST[:4])
            raise UsageError(
                f"`slo` names {each['metric']!r}, which is no metric of a single request; such are {names}, "
                "tpot_mean_ms, max_gap_p95_ms, e2e_p95_ms, ntpot_mean_ms"
            )
    return found

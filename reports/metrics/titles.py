"""The titles of metrics on all pages, by their identifiers."""

from collections.abc import Sequence

from reports.metrics.per_request import LATENCY_NAME, Direction
from reports.metrics.run_metrics import PER_RUN

LATENCY_TITLES = {
    "ttft": "TTFT",
    "ttft_co": "TTFT from schedule",
    "ttfat": "Time to first answer",
    "tpot": "TPOT",
    "ntpot": "Normalized latency",
    "gap": "Gap",
    "max_gap": "Longest gap",
    "itl": "ITL",
    "e2e": "E2E",
    "e2e_co": "E2E from schedule",
}
RATE_TITLES = {
    "output_tokens_per_s": "Output tokens/s",
    "input_tokens_per_s": "Input tokens/s",
    "total_tokens_per_s": "Total tokens/s",
    "requests_per_s": "Requests/s",
    "goodput_rps": "Goodput, requests/s",
    "error_rate": "Failed, fraction",
    "slo_attainment": "Objectives met, fraction",
    "token_timeliness": "Tokens in time, fraction",
    "structured_validity": "Valid structured answers, fraction",
    "cost_per_mtok": "Cost per million output tokens",
}


def metric_title(name: str) -> str:
    """The title of a metric with its unit; the identifier of a metric without a title.

    >>> [metric_title(name) for name in ("ttft_p95_ms", "output_tokens_per_s", "own_metric")]
    ['TTFT p95, ms', 'Output tokens/s', 'own_metric']
    """
    latency = LATENCY_NAME.fullmatch(name)
    if latency is not None and latency["name"] in LATENCY_TITLES:
        return f"{LATENCY_TITLES[latency['name']]} {latency['stat']}, ms"
    return RATE_TITLES.get(name, name)


def better_direction(name: str) -> Direction:
    """The better direction of a metric, by its identifier; NONE if neither direction is better."""
    if LATENCY_NAME.fullmatch(name) is not None or name in ("cost_per_mtok", "little_residual"):
        return Direction.LOWER
    return next((metric.direction for metric in PER_RUN if metric.name == name), Direction.HIGHER)


def limits_text(limits: Sequence[str]) -> str:
    """Limits in words of the pages; a limit that is no comparison of a metric stays as it is.

    >>> limits_text(["ttft_p95_ms <= 500", "error_rate ≤ 0.01", "own_metric >= 3"])
    'TTFT p95 ≤ 500 ms; Failed, fraction ≤ 0.01; own_metric ≥ 3'
    """
    return "; ".join(map(_limit_text, limits))


def _limit_text(limit: str) -> str:
    between = next((sign for sign in (" <= ", " >= ", " ≤ ", " ≥ ") if sign in limit), " <= ")
    name, sign, value = limit.partition(between)
    title, _, unit = metric_title(name).partition(", ")
    mark = {"<=": "≤", ">=": "≥"}.get(sign.strip(), sign.strip())
    if not sign:
        return limit
    return f"{title} {mark} {value} ms" if unit == "ms" else f"{metric_title(name)} {mark} {value}"

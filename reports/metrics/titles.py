"""The titles of metrics on all pages and in the terminal, by their identifiers."""

import re
from collections.abc import Sequence

from reports.metrics.requests.per_request import LATENCY_NAME, Direction
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


FRACTIONS = frozenset(name for name, title in RATE_TITLES.items() if title.endswith(", fraction"))


def metric_title(name: str) -> str:
    """The title of a metric with its unit; the identifier of a metric without a title.

    >>> [metric_title(name) for name in ("ttft_p95_ms", "output_tokens_per_s", "own_metric")]
    ['TTFT p95, ms', 'Output tokens/s', 'own_metric']
    """
    latency = LATENCY_NAME.fullmatch(name)
    if latency is not None and latency["name"] in LATENCY_TITLES:
        return f"{LATENCY_TITLES[latency['name']]} {latency['stat']}, ms"
    return RATE_TITLES.get(name, name)


def metric_heading(name: str) -> str:
    """The title of a metric without its unit, for sentences.

    >>> metric_heading("ttft_p95_ms"), metric_heading("error_rate")
    ('TTFT p95', 'Failed')
    """
    return metric_title(name).partition(", ")[0]


def percent_title(name: str) -> str:
    """The title of a metric in a table that has fractions in percent.

    >>> percent_title("error_rate"), percent_title("tpot_p50_ms")
    ('Failed, %', 'TPOT p50, ms')
    """
    return re.sub(", fraction$", ", %", metric_title(name))


def in_percent(name: str, value: float | None) -> float | None:
    """The value of a metric under its `percent_title`."""
    return 100 * value if name in FRACTIONS and value is not None else value


def value_text(name: str, value: float) -> str:
    """A value of a metric in words of the pages.

    >>> [value_text("ttft_p95_ms", 41.23), value_text("output_tokens_per_s", 1234.5), value_text("error_rate", 0.02)]
    ['TTFT p95 41.2 ms', 'Output tokens/s 1,234.5', 'Failed 2.0 %']
    """
    heading, _, unit = metric_title(name).partition(", ")
    shown = f"{100 * value:,.1f} %" if unit == "fraction" else f"{value:,.1f} {unit}".rstrip()
    return f"{heading} {shown}"


def better_direction(name: str) -> Direction:
    """The better direction of a metric, by its identifier; NONE if neither direction is better."""
    if LATENCY_NAME.fullmatch(name) is not None or name in ("cost_per_mtok", "little_residual"):
        return Direction.LOWER
    return next((metric.direction for metric in PER_RUN if metric.name == name), Direction.HIGHER)


def limits_text(limits: Sequence[str]) -> str:
    """Limits in words of the pages; text that is not a limit on a metric is returned unchanged.

    >>> limits_text(["ttft_p95_ms <= 500", "error_rate ≤ 0.01", "own_metric >= 3", "goodput_rps > 2"])
    'TTFT p95 ≤ 500 ms; Failed ≤ 1 %; own_metric ≥ 3; Goodput > 2 requests/s'
    """
    return "; ".join(map(_limit_text, limits))


def _limit_text(limit: str) -> str:
    found = re.fullmatch(r"(.+?) (<=|>=|≤|≥|<|>) (.+)", limit)
    if found is None:
        return limit
    name, sign, value = found.groups()
    title, _, unit = metric_title(name).partition(", ")
    mark = {"<=": "≤", ">=": "≥"}.get(sign, sign)
    number = re.fullmatch(r"[0-9.eE+-]+", value)
    if unit == "fraction" and number is not None:
        value, unit = f"{100 * float(value):g}", "%"
    return f"{title} {mark} {value} {unit}".rstrip()

"""The result of a search as a sentence and an exit code."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from loadgen.capacity.point_time import independent_requests_needed
from loadgen.capacity.search_policy import CapacitySearch, SearchGoal
from reports.metrics.titles import limits_text
from reports.stats.estimators import Interval

PASS, FAIL, INCONCLUSIVE = 0, 1, 3
UNITS = {"concurrency": "users", "rate": "requests/s"}


@dataclass(frozen=True, slots=True)
class SearchResult:
    """`sentence` has the capacity with its interval, or the reason why there is none."""

    exit_code: int
    sentence: str

    @property
    def level(self) -> str:
        return {PASS: "valid", FAIL: "invalid"}.get(self.exit_code, "inconclusive")


def search_result(
    search: CapacitySearch, quantity: str, seconds: float, objectives: Sequence[str] = ("the objectives",)
) -> SearchResult:
    """The result of a search for the highest load that keeps `objectives`, such as `ttft_p95_ms ≤ 500`."""
    goal, interval = search.goal, search.capacity.interval
    kept = f"{' and '.join(limits_text([each]) for each in objectives)} for {100 * goal.target:g} % of requests"
    took = f"{len(search.runs)} runs in {format_time(seconds)}"
    has_lo, has_hi = not math.isnan(interval.lo), not math.isnan(interval.hi)
    if has_lo and has_hi:
        found = f"{format_capacity(interval, goal, UNITS[quantity])} keep {kept}"
        if search.is_narrow:
            return SearchResult(PASS, f"{found}; {took}.")
        remedy = f"wider than ±{100 * goal.tolerance:g} %: raise --max-runs or --max-point-time"
        return SearchResult(INCONCLUSIVE, f"{found}; {took}. The interval is {remedy}.")
    if has_lo:
        if interval.lo >= goal.high:
            return SearchResult(PASS, f"Even the highest load, {load_text(goal.high, quantity)}, keeps {kept}; {took}.")
        return SearchResult(INCONCLUSIVE, f"At least {load_text(interval.lo, quantity)} keep {kept}; {took}.")
    if has_hi:
        if interval.hi <= goal.low:
            lowest = load_text(goal.low, quantity)
            return SearchResult(FAIL, f"Even the lowest load, {lowest}, does not keep {kept}; {took}.")
        return SearchResult(INCONCLUSIVE, f"Less than {load_text(interval.hi, quantity)} keep {kept}; {took}.")
    return SearchResult(INCONCLUSIVE, f"{_too_few(search, quantity)}; {took}. Raise --max-point-time.")


def load_text(load: float, quantity: str) -> str:
    """A load with its unit.

    >>> load_text(1, "concurrency"), load_text(64, "concurrency"), load_text(2.5, "rate")
    ('1 user', '64 users', '2.5 requests/s')
    """
    unit = UNITS[quantity]
    return f"{load:g} {unit.removesuffix('s') if unit == 'users' and load == 1 else unit}"


def _too_few(search: CapacitySearch, quantity: str) -> str:
    needed = {run.load: run.requests_for(independent_requests_needed(search.goal.target)) for run in search.runs}
    load = min(needed, key=lambda load: needed[load])
    return f"Not shown at any load: too few requests; about {needed[load]:,} are needed at {load_text(load, quantity)}"


def format_capacity(interval: Interval, goal: SearchGoal, unit: str) -> str:
    """`41 requests/s (38–43)`: with as many decimals as the width of the interval supports; users are whole.

    >>> goal = SearchGoal(1, 64, 0.95, 0.05)
    >>> format_capacity(Interval(41.23, 38.2, 43.4), goal, "users")
    '41 users (38–43)'
    >>> format_capacity(Interval(3.312, 3.27, 3.36), goal, "requests/s")
    '3.31 requests/s (3.27–3.36)'
    """
    width = max(interval.hi - interval.lo, 1e-9)
    decimals = 0 if goal.is_whole else max(0, -math.floor(math.log10(width / 2.5)))
    round_down = math.floor if goal.is_whole else float
    value, lo, hi = (f"{round_down(each):,.{decimals}f}" for each in (interval.value, interval.lo, interval.hi))
    return f"{value} {unit} ({lo}–{hi})"


def format_time(seconds: float) -> str:
    """`6 min 20 s`.

    >>> format_time(8.2), format_time(380), format_time(3725)
    ('8 s', '6 min 20 s', '62 min 5 s')
    """
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"

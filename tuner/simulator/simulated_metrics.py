"""Metrics of a simulation, fast enough for thousands of predictions.

They have the names and definitions of `reports.metrics.summary`. For a request that is only partly in the window, the
tokens are assumed to be evenly spaced. Metrics of inter-token gaps are not included.
"""

import re
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from tuner.simulator.simulation import NS_PER_S, Simulated

Array = npt.NDArray[np.float64]

LATENCY = re.compile(r"(?P<name>ttft|tpot|e2e)_(?P<stat>mean|p50|p90|p95|p99)_ms")
RATES = ("output_tokens_per_s", "total_tokens_per_s", "requests_per_s", "goodput_rps", "error_rate")


class SimulatedTimes:
    """The times in seconds, the lengths and the success of a simulation's requests, as arrays [requests].

    is_in: the request started in the measured window.
    """

    def __init__(self, run: Simulated) -> None:
        flights = run.flights
        self.start_s, self.end_s = run.start_ns / NS_PER_S, run.end_ns / NS_PER_S
        columns = np.asarray(
            [(f.intended_ns, f.first_ns, f.end_ns, f.input_tokens, f.generated, f.status == "ok") for f in flights],
            dtype=np.float64,
        ).reshape(-1, 6)
        self.sent_s, self.first_s, self.end_at_s = (columns[:, :3] / NS_PER_S).T
        self.input_tokens, self.output_tokens = columns[:, 3], columns[:, 4]
        self.is_ok = columns[:, 5] > 0
        self.is_in = (self.sent_s >= self.start_s) & (self.sent_s < self.end_s)

    def latencies_ms(self, name: str) -> Array:
        """`ttft`, `tpot` or `e2e` of the successful requests that started in the window."""
        first, end, tokens = (
            column[self.is_in & self.is_ok] for column in (self.first_s, self.end_at_s, self.output_tokens)
        )
        if name == "tpot":
            several = tokens > 1
            return np.asarray(1e3 * (end - first)[several] / (tokens[several] - 1))
        sent = self.sent_s[self.is_in & self.is_ok]
        return np.asarray(1e3 * ((first if name == "ttft" else end) - sent))

    def tokens_in_window(self) -> float:
        """Output tokens that arrived in the window."""
        ok = self.is_ok
        first, end, tokens = self.first_s[ok], self.end_at_s[ok], self.output_tokens[ok]
        first_in = (first >= self.start_s) & (first < self.end_s)
        span = np.maximum(end - first, 1e-12)
        overlap = np.clip(np.minimum(end, self.end_s) - np.maximum(first, self.start_s), 0.0, None) / span
        return float((first_in + (tokens - 1) * overlap).sum())


def metrics_of(run: Simulated, names: Sequence[str], limits_ms: Mapping[str, float] | None = None) -> dict[str, float]:
    """The named metrics. Metrics without a value are left out. `limits_ms`: limits by latency name, for goodput.

    Raises KeyError for a name that is not simulated.
    """
    times = SimulatedTimes(run)
    found: dict[str, float] = {}
    for name in names:
        value = _rate(times, name, limits_ms or {}) if name in RATES else _latency(times, name)
        if value is not None:
            found[name] = value
    return found


def _latency(times: SimulatedTimes, name: str) -> float | None:
    match = LATENCY.fullmatch(name)
    if match is None:
        raise KeyError(name)
    values = times.latencies_ms(match["name"])
    if not len(values):
        return None
    stat = match["stat"]
    return float(values.mean() if stat == "mean" else np.quantile(values, int(stat[1:]) / 100))


def _rate(times: SimulatedTimes, name: str, limits_ms: Mapping[str, float]) -> float | None:
    seconds = times.end_s - times.start_s
    ended_in = times.is_ok & (times.end_at_s >= times.start_s) & (times.end_at_s < times.end_s)
    started = int(times.is_in.sum())
    match name:
        case "output_tokens_per_s":
            return times.tokens_in_window() / seconds
        case "total_tokens_per_s":
            prompts = float(times.input_tokens[ended_in].sum())
            return (times.tokens_in_window() + prompts) / seconds
        case "requests_per_s":
            return int(ended_in.sum()) / seconds
        case "error_rate":
            return int((times.is_in & ~times.is_ok).sum()) / started if started else None
        case _:
            return float(within_limits(times, limits_ms)[times.is_in].sum()) / seconds


def within_limits(times: SimulatedTimes, limits_ms: Mapping[str, float]) -> npt.NDArray[np.bool_]:
    """[requests]: whether a request is successful and within every limit. `limits_ms`: limits by latency name."""
    good = times.is_ok.copy()
    tokens = np.maximum(times.output_tokens - 1, 1)
    of = {
        "ttft": times.first_s - times.sent_s,
        "tpot": (times.end_at_s - times.first_s) / tokens,
        "e2e": times.end_at_s - times.sent_s,
    }
    for name, most in limits_ms.items():
        good &= 1e3 * of[name] <= most
    return good

"""`tgi-bench search` in virtual time, on servers of known capacity: the same policy, stop rules and statistics.

A server is a queue (`open_server`, M/G/c) or places that users wait for (`closed_server`); time is simulated, so
thousands of searches take minutes.
"""

import heapq
import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from loadgen.capacity.point_time import PointTime
from loadgen.capacity.search_policy import CapacitySearch, SearchGoal
from loadgen.generator.stop_rules import DOUBLING, FIRST_LOOK, FREQUENT, queue_grows
from reports.metrics.checks.overload import is_growing
from reports.metrics.windows import Window
from reports.stats.capacity import RunEvidence
from reports.stats.dependence import Dependence, state_time

Array = npt.NDArray[np.float64]
FIRST_TOKEN_S = 0.05
FIRST_TOKEN_CV = 0.2

# Requests of one stream, in order of start: start, time to first token and end of each.
Stream = Callable[[np.random.Generator, float], Iterator[tuple[float, float, float]]]


@dataclass(frozen=True, slots=True)
class KnownServer:
    """A server whose requests meet the objective if their first token arrives within `limit_s`."""

    name: str
    stream: Stream
    limit_s: float
    target: float
    goal_range: tuple[float, float]
    time: PointTime
    capacity: float
    is_open: bool = True


def open_server(servers: int, service_s: float, service_cv: float) -> Stream:
    """M/G/c with lognormal service times, first come first served. The load is arrivals per second."""

    def stream(generator: np.random.Generator, load: float) -> Iterator[tuple[float, float, float]]:
        free_at, now = [0.0] * servers, 0.0
        for gap, service, first in _draws(generator, 1 / load, service_s, service_cv):
            now += gap
            start = max(now, free_at[0])
            heapq.heapreplace(free_at, start + service)
            yield now, start - now + first, start + service

    return stream


def closed_server(places: int, service_s: float, service_cv: float, think_s: float) -> Stream:
    """Users who think for an exponential time and wait for one of the places. The load is the number of users."""

    def stream(generator: np.random.Generator, load: float) -> Iterator[tuple[float, float, float]]:
        arrivals = sorted(generator.exponential(think_s, round(load)).tolist())
        free_at = [0.0] * places
        for think, service, first in _draws(generator, think_s, service_s, service_cv):
            now = heapq.heappop(arrivals)
            start = max(now, free_at[0])
            heapq.heapreplace(free_at, start + service)
            heapq.heappush(arrivals, start + service + think)
            yield now, start - now + first, start + service

    return stream


def _draws(
    generator: np.random.Generator, gap_s: float, service_s: float, service_cv: float
) -> Iterator[tuple[float, float, float]]:
    """Exponential gaps, lognormal service times and times to first token without a queue."""
    while True:
        gaps = generator.exponential(gap_s, 1_000)
        services = _lognormal(generator, service_s, service_cv)
        firsts = _lognormal(generator, FIRST_TOKEN_S * service_s, FIRST_TOKEN_CV)
        yield from zip(gaps.tolist(), services.tolist(), firsts.tolist(), strict=True)


def _lognormal(generator: np.random.Generator, mean: float, cv: float) -> Array:
    variance = math.log1p(cv * cv)
    found: Array = generator.lognormal(math.log(mean) - variance / 2, math.sqrt(variance), 1_000)
    return found


@dataclass(frozen=True, slots=True)
class Seen:
    """The requests of a run so far in order of start; those before the end of the warm-up are not measured."""

    start_s: Array
    ttft_s: Array
    end_s: Array
    window: Window
    is_open: bool

    @property
    def measured(self) -> slice:
        return slice(int(np.searchsorted(self.start_s, self.window.start_s)), len(self.start_s))

    @property
    def dependence(self) -> Dependence:
        ttft_s = self.ttft_s[self.measured]
        found = np.arange(len(self.start_s)) - np.searchsorted(np.sort(self.end_s), self.start_s, side="right")
        companions = [ttft_s, found[self.measured].astype(np.float64)] if self.is_open else [ttft_s]
        return Dependence.of(ttft_s, state_time(companions))

    @property
    def queue_grows(self) -> bool:
        moments = np.arange(math.ceil(self.window.start_s), self.window.end_s)
        started, ended = (np.searchsorted(np.sort(each), moments, "right") for each in (self.start_s, self.end_s))
        levels = (started - ended).astype(np.float64)
        return self.is_open and queue_grows(self.window, self.start_s, self.ttft_s, (moments, levels))

    @property
    def takes_in_more_than_it_answers(self) -> bool:
        """Whether the verdict would report overload. It needs fewer requests than the rule that ends a run."""
        bounds = self.window.start_s, self.window.end_s
        leaves_s = (self.start_s + self.ttft_s, self.end_s)
        return self.is_open and any(is_growing(self.start_s, leave_s, *bounds) for leave_s in leaves_s)


@dataclass(frozen=True, slots=True)
class VirtualSearch:
    """Runs a search on a server in virtual time."""

    server: KnownServer
    goal: SearchGoal
    time: PointTime

    def run(self, seed: int) -> CapacitySearch:
        search = CapacitySearch(self.goal, self.time)
        while (load := search.next_load()) is not None:
            search = search.after(self.measure(load, search.independent_requests, [seed, len(search.runs)]))
        return search

    def measure(self, load: float, needed: int, seed: list[int]) -> RunEvidence:
        """One run, which starts on an empty server and extends its own time until it has the requests it needs."""
        stream = self.server.stream(np.random.default_rng(seed), load)
        requests: list[tuple[float, float, float]] = []
        next_look, length_s = float(FIRST_LOOK), self.time.least_s
        while True:
            while not requests or requests[-1][0] < self.time.warmup_s + length_s:
                requests.append(next(stream))
            seen = self._seen(requests[:-1], length_s)
            dependence = seen.dependence
            is_overloaded = dependence.count >= next_look and seen.queue_grows
            next_look *= 1 if dependence.count < next_look else DOUBLING
            is_over = dependence.effective >= needed or length_s >= self.time.most_s
            if is_overloaded or is_over:
                met = seen.ttft_s[seen.measured] <= self.server.limit_s
                is_beyond = is_overloaded or seen.takes_in_more_than_it_answers
                return RunEvidence.of(load, met, dependence, self.time.warmup_s + length_s, is_beyond)
            length_s = min(length_s * FREQUENT, self.time.most_s)

    def _seen(self, requests: list[tuple[float, float, float]], length_s: float) -> Seen:
        start_s, ttft_s, end_s = np.array(requests, dtype=np.float64).reshape(-1, 3).T
        window = Window(self.time.warmup_s, self.time.warmup_s + length_s, "configured", None, None, None)
        return Seen(start_s, ttft_s, end_s, window, self.server.is_open)


def stationary_attainment(server: KnownServer, load: float, count: int, seed: int = 1) -> float:
    """The share of many requests that meet the objective, without the first tenth."""
    stream = server.stream(np.random.default_rng(seed), load)
    met = np.fromiter((ttft_s <= server.limit_s for _, ttft_s, _ in itertools.islice(stream, count)), dtype=np.bool_)
    return float(met[count // 10 :].mean())


# Capacities are simulated with 4 million requests at each of three loads
# (`python -m benchmarks.client.capacity_search --truth`); that of M/G/1 is by the Pollaczek-Khinchine formula.
KNOWN_SERVERS = (
    KnownServer("M/G/16", open_server(16, 0.5, 0.7), 0.15, 0.95, (1, 128), PointTime(30, 300, 3, 2), 23.725),
    KnownServer("M/G/4", open_server(4, 0.5, 0.7), 0.25, 0.95, (0.5, 32), PointTime(60, 900, 6, 2), 3.92),
    KnownServer("M/G/1", open_server(1, 0.05, 1.0), 0.25, 0.95, (0.5, 64), PointTime(60, 900, 6, 2), 10.28),
    KnownServer(
        "16 places", closed_server(16, 0.5, 0.7, 1.0), 0.2, 0.95, (1, 256), PointTime(30, 300, 3, 2), 43.45, False
    ),
)

"""Queues with known stationary values, to check that intervals of dependent latencies cover them.

All runs of a model advance together as rows of numpy arrays. Times are seconds; a run starts empty. Nothing here
imports the tuner's simulator or the server: a check needs its own model.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]

LOADS = (0.5, 0.7, 0.85, 0.95)
SLOTS = 16
# Of a request that does not wait; it does not occupy the server.
FIRST_TOKEN_S, FIRST_TOKEN_CV = 0.05, 0.2
TOKEN_S = 0.03  # time of one output token in an open queue
INDEPENDENT_PER_S = 10.0

# The closed loop: users think, then wait for one of 16 slots. A step takes 10 ms, 1 ms for each running sequence and
# 20 ms for each new prompt. With `SATURATING_USERS` the slots are always busy.
STEP_S, SEQUENCE_S, PROMPT_S = 0.010, 0.001, 0.020
MEAN_LENGTH, LENGTH_CV = 32, 0.7
SATURATING_USERS = 40
FULL_STEP_S = STEP_S + SLOTS * SEQUENCE_S + PROMPT_S * SLOTS / MEAN_LENGTH


@dataclass(frozen=True, slots=True)
class Runs:
    """Simulated requests in order of arrival, each array [runs, requests], or [requests] of one run.

    queue_s: the part of a latency that the queue causes (waiting, or time to the first token).
    in_flight: requests that an arrival finds in the system; None in a closed loop.
    """

    arrival_s: Array
    queue_s: Array
    e2e_s: Array
    in_flight: Array | None
    output_tokens: Array

    def after(self, warmup: int) -> "Runs":
        """Without the first `warmup` requests of each run."""
        in_flight = None if self.in_flight is None else self.in_flight[:, warmup:]
        tokens = self.output_tokens[:, warmup:]
        return Runs(self.arrival_s[:, warmup:], self.queue_s[:, warmup:], self.e2e_s[:, warmup:], in_flight, tokens)

    def part(self, run: int, kept: slice) -> "Runs":
        """Some requests of one run."""
        in_flight = None if self.in_flight is None else self.in_flight[run, kept]
        tokens = self.output_tokens[run, kept]
        return Runs(self.arrival_s[run, kept], self.queue_s[run, kept], self.e2e_s[run, kept], in_flight, tokens)


@dataclass(frozen=True, slots=True)
class QueueModel:
    """A named model: `simulate(generator, runs, requests, load)`.

    servers: None of a closed loop, 0 without a queue. Services have a mean of 1 s and a coefficient of variation.
    """

    name: str
    simulate: Callable[[np.random.Generator, int, int, float], Runs]
    servers: int | None = None
    service_cv: float = 1.0

    @property
    def number(self) -> int:
        """Part of the seeds of its runs: its place in `MODELS`, or the next one."""
        return MODELS.index(self) if self in MODELS else len(MODELS)

    @property
    def loads(self) -> tuple[float, ...]:
        return (0.0,) if self.servers == 0 else LOADS

    def arrivals_per_s(self, load: float) -> float:
        """Of an open queue; for a closed loop the highest rate."""
        if self.servers is None:
            return SLOTS / (MEAN_LENGTH * FULL_STEP_S)
        return load * self.servers or INDEPENDENT_PER_S


def open_queue(
    servers: int, service_cv: float, slowdown: Callable[[Array], Array] = np.ones_like
) -> Callable[[np.random.Generator, int, int, float], Runs]:
    """M/G/c, first come first served, mean service 1 s: lognormal service times, exponential ones for a cv of 1.

    slowdown: factor of the service time, by the time of arrival.
    """

    def simulate(generator: np.random.Generator, runs: int, requests: int, load: float) -> Runs:
        shape = (runs, requests)
        arrival = np.cumsum(generator.exponential(1 / (load * servers), shape), axis=1)
        service = generator.exponential(1, shape) if service_cv == 1 else _lognormal(generator, 1.0, service_cv, shape)
        tokens = np.ceil(service / TOKEN_S) + 1
        service = service * slowdown(arrival)
        wait = _waits(arrival, service, servers)
        first_token = wait + _lognormal(generator, FIRST_TOKEN_S, FIRST_TOKEN_CV, shape)
        in_flight = _found_in_flight(arrival, arrival + wait + service)
        return Runs(arrival, first_token, first_token + service, in_flight, tokens)

    return simulate


def closed_loop(
    generator: np.random.Generator,
    runs: int,
    requests: int,
    load: float,
    slowdown: Callable[[Array], Array] = np.ones_like,
) -> Runs:
    """Continuous batching under users who think; load is the number of users over those that saturate the slots.

    slowdown: factor of the time of a step, by the time at its start [runs].
    """
    loop = _ClosedLoop(generator, runs, requests, round(load * SATURATING_USERS), slowdown)
    while not loop.is_done:
        loop.step()
    return loop.finished()


def independent(generator: np.random.Generator, runs: int, requests: int, _load: float) -> Runs:
    """Requests that do not wait for each other."""
    shape = (runs, requests)
    arrival = np.cumsum(generator.exponential(1 / INDEPENDENT_PER_S, shape), axis=1)
    first_token = _lognormal(generator, FIRST_TOKEN_S, FIRST_TOKEN_CV, shape)
    service = _lognormal(generator, 1.0, 1.0, shape)
    return Runs(arrival, first_token, first_token + service, None, np.ceil(service / TOKEN_S) + 1)


MODELS = (
    QueueModel("M/M/1", open_queue(1, 1.0), 1, 1.0),
    QueueModel("M/G/1 cv 0.5", open_queue(1, 0.5), 1, 0.5),
    QueueModel("M/G/1 cv 1.5", open_queue(1, 1.5), 1, 1.5),
    QueueModel("M/G/16", open_queue(SLOTS, 0.7), SLOTS, 0.7),
    QueueModel("closed loop", closed_loop),
    QueueModel("independent", independent, 0, 1.0),
)


def model_named(name: str) -> QueueModel:
    return next(model for model in MODELS if model.name == name)


def log_parameters(mean: float, cv: float) -> tuple[float, float]:
    """Mean and standard deviation of the logarithm of a lognormal value."""
    variance = math.log1p(cv * cv)
    return math.log(mean) - variance / 2, math.sqrt(variance)


def _lognormal(generator: np.random.Generator, mean: float, cv: float, shape: tuple[int, ...]) -> Array:
    return generator.lognormal(*log_parameters(mean, cv), shape)


def _waits(arrival: Array, service: Array, servers: int) -> Array:
    """[runs, requests]: a request starts on the server that is free first (Kiefer and Wolfowitz, 1955)."""
    runs, requests = arrival.shape
    waits = np.empty_like(arrival)
    free_at = np.zeros((runs, servers))
    rows = np.arange(runs)
    for index in range(requests):
        first = free_at.argmin(axis=1)
        start = np.maximum(arrival[:, index], free_at[rows, first])
        waits[:, index] = start - arrival[:, index]
        free_at[rows, first] = start + service[:, index]
    return waits


def _found_in_flight(arrival: Array, end: Array) -> Array:
    ends = np.sort(end, axis=1)
    gone = [np.searchsorted(ended, arrived, side="right") for ended, arrived in zip(ends, arrival, strict=True)]
    found: Array = np.arange(arrival.shape[1], dtype=np.float64) - np.array(gone, dtype=np.float64)
    return found


class _ClosedLoop:
    """State of all runs, each at its own time: per user the next arrival or the arrival of its request in progress."""

    def __init__(
        self,
        generator: np.random.Generator,
        runs: int,
        requests: int,
        users: int,
        slowdown: Callable[[Array], Array],
    ) -> None:
        self._generator = generator
        self._slowdown = slowdown
        self._requests = requests
        self._think_s = (SATURATING_USERS / SLOTS - 1) * MEAN_LENGTH * FULL_STEP_S
        self._now = np.zeros(runs)
        self._arrival = generator.exponential(self._think_s, (runs, users))
        self._left = np.zeros((runs, users))  # tokens left of a running request; 0: thinking or waiting
        self._first_token = np.zeros((runs, users))
        self._length = np.zeros((runs, users))
        wanted = requests + 4 * users
        self._done = np.zeros(runs, dtype=np.int64)
        self._kept = np.full((4, runs, wanted), np.inf)  # arrival, time to first token, end to end, output tokens

    @property
    def is_done(self) -> bool:
        return bool((self._done >= self._kept.shape[2]).all())

    def step(self) -> None:
        running = self._left > 0
        waiting = ~running & (self._arrival <= self._now[:, None])
        idle = ~(running | waiting).any(axis=1)
        self._now[idle] = self._arrival[idle].min(axis=1)
        waiting |= ~running & (self._arrival <= self._now[:, None])
        new = self._admitted(waiting, SLOTS - running.sum(axis=1))
        rows, users = np.nonzero(new)
        self._left[rows, users] = self._length[rows, users] = np.maximum(
            1, np.rint(_lognormal(self._generator, MEAN_LENGTH, LENGTH_CV, (len(rows),)))
        )
        running |= new
        step_s = STEP_S + SEQUENCE_S * running.sum(axis=1) + PROMPT_S * new.sum(axis=1)
        self._now += step_s * self._slowdown(self._now)
        self._first_token[rows, users] = self._now[rows]
        self._left[running] -= 1
        self._finish(*np.nonzero(running & (self._left == 0)))

    def finished(self) -> Runs:
        """The first requests by arrival; the last ones that finished are left out, since earlier ones may still run."""
        order = np.argsort(self._kept[0], axis=1)[:, : self._requests]
        arrival, queue, e2e, tokens = (np.take_along_axis(values, order, axis=1) for values in self._kept)
        return Runs(arrival, queue, e2e, None, tokens)

    def _admitted(self, waiting: npt.NDArray[np.bool_], free: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
        """Those who have waited longest, as many as there are free slots."""
        admitted = waiting.copy()
        crowded = waiting.sum(axis=1) > free
        since = np.where(waiting[crowded], self._arrival[crowded], np.inf)
        rank = since.argsort(axis=1).argsort(axis=1)
        admitted[crowded] &= rank < free[crowded, None]
        return admitted

    def _finish(self, rows: npt.NDArray[np.int64], users: npt.NDArray[np.int64]) -> None:
        """Record the requests of these users and let them think."""
        arrival, now = self._arrival[rows, users], self._now[rows]
        kept = np.stack((arrival, self._first_token[rows, users] - arrival, now - arrival, self._length[rows, users]))
        place = self._done[rows] + _occurrence(rows)
        inside = place < self._kept.shape[2]
        self._kept[:, rows[inside], place[inside]] = kept[:, inside]
        np.add.at(self._done, rows, 1)
        self._arrival[rows, users] = now + self._generator.exponential(self._think_s, len(rows))


def _occurrence(rows: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """How often each value of an ascending array occurred before it.

    >>> _occurrence(np.array([0, 0, 2, 2, 2])).tolist()
    [0, 1, 0, 1, 2]
    """
    found: npt.NDArray[np.int64] = np.arange(len(rows)) - np.searchsorted(rows, rows, side="left")
    return found

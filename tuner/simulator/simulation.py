"""Simulates a load on servers in virtual time: clock, clients, permits, and load balancing.

Virtual time is an integer number of ns. There is no wall clock and no unseeded randomness, so equal inputs give equal
results. The router's own scheduler decides the batches (replica.py).
"""

import heapq
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from reference_server.router.scheduling.calls import Decode, Prefill
from reference_server.router.scheduling.scheduler_options import SchedulerOptions
from tuner.simulator.replica import Replica
from tuner.simulator.replica_state import Counts, Flight
from tuner.simulator.slot_replica import SlotReplica, SlotRule
from tuner.simulator.step_law import StepLaw

NS_PER_S = 1_000_000_000


class PlannedRequest(NamedTuple):
    """A request of a load.

    declared_tokens: requested maximum of output tokens, by default `output_tokens`. ids: token ids of the prompt, only
    if prompts share prefixes. adapter: the LoRA adapter.
    """

    input_tokens: int
    output_tokens: int
    declared_tokens: int | None = None
    ids: tuple[int, ...] | None = None
    adapter: str | None = None


@dataclass(frozen=True, slots=True)
class SimulatedLoad:
    """Requests that arrive at `times_ns` (ascending), or that `users` send one after the other.

    The measurement starts when `warmup_ns` is over and, in a closed loop with a warm-up, every user has an answer.
    Without a warm-up, the first request of each user is measured, as in `tgi-bench run`. It ends after `duration_ns` or
    with the last of `requests`. Before it is queued, a request takes `client_ns`, and `tokenize_ns` for each prompt
    token on one of `validation_workers`.
    """

    planned: Iterable[PlannedRequest]
    times_ns: Iterable[int] | None = None
    users: int = 0
    think_ns: int = 0
    retry_ns: int = NS_PER_S
    warmup_ns: int = 0
    duration_ns: int | None = None
    requests: int | None = None
    client_ns: int = 0
    tokenize_ns: int = 0
    validation_workers: int = 2


class SimulatedReplica(Protocol):
    """A server in virtual time: `Replica` with TGI's scheduler, or `SlotReplica`. `Replica` describes the methods."""

    counts: Counts
    in_system: int

    def submit(self, flight: Flight, now_ns: int) -> bool: ...

    def begin(self, now_ns: int) -> int | None: ...

    def cut(self, now_ns: int) -> int | None: ...

    def end(self, now_ns: int) -> list[Flight]: ...

    def waiting_fractions(self) -> dict[str, float]: ...


# The rule by which a server forms batches: TGI's scheduler, or slots.
BatchingRule = SchedulerOptions | SlotRule
Policy = Callable[[Flight, Sequence[SimulatedReplica]], int]


def first_replica(flight: Flight, replicas: Sequence[SimulatedReplica]) -> int:  # noqa: ARG001 - the signature of policies
    """The policy for a single server."""
    return 0


@dataclass(slots=True)
class Simulated:
    """The result of a simulation. `start_ns` to `end_ns` is the measured window."""

    flights: list[Flight]
    start_ns: int
    end_ns: int
    replicas: list[SimulatedReplica] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        return (self.end_ns - self.start_ns) / NS_PER_S


# Kinds of events, in the order of processing at equal times.
_STEP_END, _ARRIVAL, _QUEUED = 0, 1, 2


class Simulation:
    """One simulation. Call either `run` once, or `next_ended` repeatedly.

    servers: rule and step law of each replica. policy: selects the replica of a request. with_strides: simulate equal
    decode steps as one event. with_gaps: record the time of every token. on_call, on_end: called for each step with its
    start, and for each request that ends.
    """

    def __init__(
        self,
        load: SimulatedLoad,
        servers: Sequence[tuple[BatchingRule, StepLaw]],
        *,
        max_concurrent_requests: int = 128,
        policy: Policy = first_replica,
        with_strides: bool = True,
        with_gaps: bool = False,
        on_call: Callable[[Prefill | Decode, int], None] | None = None,
        on_end: Callable[[Flight], None] | None = None,
    ) -> None:
        self._load = load
        self._permits = max_concurrent_requests
        self._policy = policy
        self._planned: Iterator[PlannedRequest] = iter(load.planned)
        self._replicas: list[SimulatedReplica] = [
            SlotReplica(rule, law, with_strides=with_strides, with_gaps=with_gaps)
            if isinstance(rule, SlotRule)
            else Replica(rule, law, with_strides=with_strides, with_gaps=with_gaps, on_call=on_call)
            for rule, law in servers
        ]
        self._ends = [-1] * len(servers)
        self._scheduled: Iterator[tuple[int, PlannedRequest]] = zip(load.times_ns or (), self._planned, strict=False)
        self._events: list[tuple[int, int, int, Flight | None]] = []
        self._touched: list[int] = []
        self._flights: list[Flight] = []
        self._on_end = on_end
        self._next_id = 0
        self._answered: set[int] = set()
        self._measure_ns: int | None = None if load.users and load.warmup_ns else load.warmup_ns
        self._measured = 0
        self._stop_ns: int | None = None
        self._workers_free = [0] * load.validation_workers
        self._last_sent_ns = 0

    def run(self) -> Simulated:
        """Simulate until the last request ends."""
        self._open_load()
        while self._events:
            self._next_instant()
        return self._result()

    def next_ended(self, requests: int) -> list[Flight]:
        """The next requests in order of arrival, simulated to their ends.

        They are not stored, so the memory of a load without end is that of the requests in the system.
        """
        if not self._next_id:
            self._open_load()
        while self._events and len(self._flights) < requests:
            self._next_instant()
        taken = self._flights[:requests]
        for flight in taken:
            while flight.end_ns < 0:
                self._next_instant()
        del self._flights[: len(taken)]
        return taken

    @property
    def replicas(self) -> Sequence[SimulatedReplica]:
        return self._replicas

    def _next_instant(self) -> None:
        """Process every event at the next time, then begin the possible steps."""
        events, replicas, ends, touched = self._events, self._replicas, self._ends, self._touched
        now_ns = events[0][0]
        while events and events[0][0] == now_ns:
            _, kind, number, flight = heapq.heappop(events)
            if kind == _STEP_END:
                if ends[number] != now_ns:
                    continue  # this event is outdated: the stride was shortened
                ends[number] = -1
                for ended in replicas[number].end(now_ns):
                    self._leave(ended, now_ns)
                touched.append(number)
            elif kind == _ARRIVAL:
                assert flight is not None, "an arrival has a request"
                self._arrive(flight, now_ns, touched)
            else:
                assert flight is not None, "a queue event has a request"
                self._queue(flight, now_ns, touched)
        for number in touched:
            if ends[number] < 0 and (end_ns := replicas[number].begin(now_ns)) is not None:
                end_ns = max(end_ns, now_ns + 1)
                ends[number] = end_ns
                heapq.heappush(events, (end_ns, _STEP_END, number, None))
        touched.clear()

    def _open_load(self) -> None:
        load = self._load
        if load.times_ns is None:
            for user in range(load.users):
                self._send(0, user)
            return
        self._schedule_next()

    def _schedule_next(self) -> None:
        """Schedule the next arrival of an open loop."""
        if (due := next(self._scheduled, None)) is not None:
            self._push_flight(*due, -1)

    def _send(self, at_ns: int, user: int) -> None:
        """Send the next request of a user, unless the load ends."""
        load = self._load
        if self._stop_ns is None and self._measure_ns is not None and load.duration_ns is not None:
            end_ns = self._measure_ns + load.duration_ns
            if at_ns >= end_ns:
                self._stop_ns = end_ns
        if self._stop_ns is not None:
            return
        if load.requests is not None and self._measured >= load.requests:
            self._stop_ns = self._last_sent_ns + 1
            return
        request = next(self._planned, None)
        if request is None:
            self._stop_ns = self._last_sent_ns + 1
            return
        self._measured += self._measure_ns is not None and at_ns >= self._measure_ns
        self._last_sent_ns = at_ns
        self._push_flight(at_ns, request, user)

    def _push_flight(self, at_ns: int, request: PlannedRequest, user: int) -> None:
        declared = request.output_tokens if request.declared_tokens is None else request.declared_tokens
        flight = Flight(
            *(self._next_id, request.input_tokens, request.output_tokens, declared, request.ids, at_ns, at_ns),
            user=user,
            adapter=request.adapter,
        )
        self._next_id += 1
        heapq.heappush(self._events, (at_ns, _ARRIVAL, flight.id, flight))

    def _arrive(self, flight: Flight, now_ns: int, touched: list[int]) -> None:
        """Take a permit, and queue the request after the client and tokenizer time."""
        self._flights.append(flight)
        if flight.user < 0:
            self._schedule_next()
        if self._permits <= 0:
            self._reject(flight, "overloaded", now_ns)
            return
        self._permits -= 1
        load = self._load
        delay_ns = load.client_ns
        if load.tokenize_ns:
            slot = self._workers_free.index(min(self._workers_free))
            begin_ns = max(now_ns + load.client_ns, self._workers_free[slot])
            self._workers_free[slot] = begin_ns + load.tokenize_ns * flight.input_tokens
            delay_ns = self._workers_free[slot] - now_ns
        if delay_ns:
            heapq.heappush(self._events, (now_ns + delay_ns, _QUEUED, flight.id, flight))
        else:
            self._queue(flight, now_ns, touched)

    def _queue(self, flight: Flight, now_ns: int, touched: list[int]) -> None:
        number = self._policy(flight, self._replicas)
        replica = self._replicas[number]
        if not replica.submit(flight, now_ns):
            self._permits += 1
            self._reject(flight, "http_4xx", now_ns)
            return
        if self._ends[number] < 0:
            touched.append(number)
        elif (end_ns := replica.cut(now_ns)) is not None and end_ns < self._ends[number]:
            self._ends[number] = end_ns
            heapq.heappush(self._events, (end_ns, _STEP_END, number, None))

    def _reject(self, flight: Flight, status: str, now_ns: int) -> None:
        flight.status, flight.end_ns = status, now_ns
        if self._on_end is not None:
            self._on_end(flight)
        if flight.user >= 0:
            self._note_answer(flight.user, now_ns)
            self._send(now_ns + self._load.retry_ns, flight.user)

    def _leave(self, flight: Flight, now_ns: int) -> None:
        self._permits += 1
        if self._on_end is not None:
            self._on_end(flight)
        if flight.user < 0:
            return
        self._note_answer(flight.user, now_ns)
        self._send(now_ns + self._load.think_ns, flight.user)

    def _note_answer(self, user: int, now_ns: int) -> None:
        """Start the measurement after the warm-up when every user has an answer. A rejection is also an answer."""
        if self._measure_ns is None:
            self._answered.add(user)
            if len(self._answered) == self._load.users and now_ns >= self._load.warmup_ns:
                self._measure_ns = now_ns

    def _result(self) -> Simulated:
        load = self._load
        start_ns = self._measure_ns or 0
        last_ns = max((flight.end_ns for flight in self._flights), default=start_ns)
        if load.duration_ns is not None:
            end_ns = start_ns + load.duration_ns
        elif load.users:
            end_ns = last_ns if self._stop_ns is None else self._stop_ns
        else:
            end_ns = max((flight.sent_ns for flight in self._flights), default=last_ns)
        return Simulated(self._flights, start_ns, max(end_ns, start_ns + 1), self._replicas)

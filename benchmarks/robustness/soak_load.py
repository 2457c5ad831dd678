"""The load of the soak: streams whose waits are measured, and the clients that must not delay them."""

import asyncio
import heapq
import random
import time
from array import array
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

from benchmarks.robustness.soak_clients import SoakedServer, TokenTimes, exchange, hold, stream
from benchmarks.robustness.stall_cause import InFlight, Stall

STREAMS, SLOW_READERS, HEALTH_PER_S = 6, 4, 200
PROMPT_WORDS = (1, 8, 40)
NUM_SLOWEST = 5
SLOW_PROBE_NS = 20_000_000
HOSTILE = ("((a+)+)+b", "(a{1,900}){1,900}", "(", "[" * 500, "(a|b|ab){4000}", "a{1,60000}")
LONG = "word " * 395_000
"""Below the payload limit of 2,000,000 bytes."""


@dataclass(frozen=True, slots=True)
class OwnWork:
    """The time that a stream's own work takes on a quiet server: a gap, and the first token of each prompt (ns)."""

    gap_ns: int = 0
    first_ns: Mapping[int, int] = field(default_factory=dict)


@dataclass(slots=True)
class PhaseCounts:
    """The answers of one phase, and the waits of its streams beyond `own` work (ns)."""

    own: OwnWork = field(default_factory=OwnWork)
    statuses: Counter[str] = field(default_factory=Counter)
    gap_waits_ns: "array[int]" = field(default_factory=lambda: array("q"))
    first_waits_ns: dict[int, "array[int]"] = field(default_factory=lambda: {n: array("q") for n in PROMPT_WORDS})
    late_ns: "array[int]" = field(default_factory=lambda: array("q"))
    slowest: list[Stall] = field(default_factory=list)
    health_ns: "array[int]" = field(default_factory=lambda: array("q"))
    slow_probes: list[InFlight] = field(default_factory=list)
    others: list[InFlight] = field(default_factory=list)

    @property
    def waits_ns(self) -> list[int]:
        """Every wait for a token, the first ones included."""
        return [*self.gap_waits_ns, *(wait for waits in self.first_waits_ns.values() for wait in waits)]

    def add_stream(self, times: TokenTimes, num_words: int) -> None:
        """Count a stream and its waits. A stream that was cut waited for its next token until the end."""
        self.statuses[f"stream {times.outcome}"] += 1
        ends = list(zip(times.at_ns, times.late_ns, strict=True))
        if times.outcome == "cut":
            ends.append((times.ended_ns, 0))
        before_ns, own_ns = times.sent_ns, self.own.first_ns.get(num_words, 0)
        waits = self.first_waits_ns[num_words]
        for at_ns, late_ns in ends:
            wait_ns = max(0, at_ns - before_ns - own_ns)
            waits.append(wait_ns)
            self.late_ns.append(late_ns)
            stall = Stall(wait_ns, before_ns, at_ns, waits is not self.gap_waits_ns, late_ns)
            (heapq.heappush if len(self.slowest) < NUM_SLOWEST else heapq.heappushpop)(self.slowest, stall)
            before_ns, own_ns, waits = at_ns, self.own.gap_ns, self.gap_waits_ns

    @contextmanager
    def in_flight(self, name: str) -> Iterator[None]:
        """Record when a request of another client was in flight."""
        start_ns = time.perf_counter_ns()
        yield
        self.others.append(InFlight(name, start_ns, time.perf_counter_ns()))


async def phase(
    server: SoakedServer, seconds: float, chance: random.Random, *, disturb: bool, own: OwnWork | None = None
) -> PhaseCounts:
    """Run streams for `seconds`; with `disturb`, together with all clients that must not delay them."""
    counts, end_ns = PhaseCounts(own or OwnWork()), time.perf_counter_ns() + round(seconds * 1e9)
    async with asyncio.TaskGroup() as group:
        for _ in range(STREAMS):
            group.create_task(streams(server, counts, random.Random(chance.random()), end_ns, leave=disturb))
        if disturb:
            group.create_task(health(server, counts, end_ns))
            group.create_task(hostile(server, counts, random.Random(chance.random()), end_ns))
            for _ in range(SLOW_READERS):
                group.create_task(slow_reader(server, counts, end_ns))
    return counts


async def streams(
    server: SoakedServer, counts: PhaseCounts, chance: random.Random, end_ns: int, *, leave: bool
) -> None:
    """Run one stream after another; with `leave`, a third of them disconnects at a random token."""
    while time.perf_counter_ns() < end_ns:
        num_words = chance.choice(PROMPT_WORDS)
        body = {
            "inputs": "the server " * num_words,
            "parameters": {"max_new_tokens": chance.randint(8, 120), "ignore_eos_token": True},
        }
        leave_after = chance.randint(1, 40) if leave and chance.random() < 1 / 3 else None
        counts.add_stream(await stream(server, body, leave_after), num_words)


async def health(server: SoakedServer, counts: PhaseCounts, end_ns: int) -> None:
    """Send probes at a fixed rate, each on its own connection, so that a late answer delays no other probe."""

    async def probe() -> None:
        answer = await exchange(server, "GET", "/health", None)
        counts.health_ns.append(answer.ended_ns - answer.sent_ns)
        if answer.ended_ns - answer.sent_ns > SLOW_PROBE_NS:
            counts.slow_probes.append(InFlight("health", answer.sent_ns, answer.ended_ns))
        counts.statuses[f"health {answer.status}"] += 1

    async with asyncio.TaskGroup() as group:
        due_ns = time.perf_counter_ns()
        while due_ns < end_ns:
            group.create_task(probe())
            due_ns += 1_000_000_000 // HEALTH_PER_S
            await asyncio.sleep(max(0.0, (due_ns - time.perf_counter_ns()) / 1e9))


async def hostile(server: SoakedServer, counts: PhaseCounts, chance: random.Random, end_ns: int) -> None:
    """Send prompts of 2 MB and grammars that are too large or malformed, one after another."""
    while time.perf_counter_ns() < end_ns:
        if chance.random() < 0.3:
            name, body = "prompt of 2 MB", dict[str, object](inputs=LONG)
        else:
            grammar = {"type": "regex", "value": chance.choice(HOSTILE)}
            name, body = "grammar", {"inputs": "a", "parameters": {"max_new_tokens": 4, "grammar": grammar}}
        with counts.in_flight(name):
            answer = await exchange(server, "POST", "/generate", body)
        counts.statuses[f"{name} {answer.status}"] += 1
        await asyncio.sleep(0.2)


async def slow_reader(server: SoakedServer, counts: PhaseCounts, end_ns: int) -> None:
    """Send requests and read their answers at 3 KB/s."""
    body = {"inputs": "the server", "parameters": {"max_new_tokens": 200, "ignore_eos_token": True}}
    while time.perf_counter_ns() < end_ns:
        await hold(server, body, end_ns)
        counts.statuses["slow reader"] += 1

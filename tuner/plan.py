"""How many replicas a rate needs so that requests keep their limits: fleets simulated under a balancing policy. Pure.

A request meets the limits when each of its own values is within them; the attainment of a fleet is the share that does,
taken at its lower 95 % bound.
"""

import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from reference_server.router.scheduler import SchedulerOptions
from tuner.replica import Flight, Replica
from tuner.simulate import NS_PER_S, Ask, Load, Policy, Simulation
from tuner.simulated_metrics import Moments, meeting
from tuner.steps import StepLaw

LEAST_SECONDS, LEAST_REQUESTS = 400, 4000
SEEDS = 3
Z95 = 1.645
MOST_REPLICAS = 4096


def round_robin(seed: int) -> Policy:  # noqa: ARG001 - policies are made alike
    turn = iter(range(2**62))
    return lambda _, replicas: next(turn) % len(replicas)


def at_random(seed: int) -> Policy:
    rng = random.Random(f"policy:{seed}")
    return lambda _, replicas: rng.randrange(len(replicas))


def two_choices(seed: int) -> Policy:
    """The one with fewer requests in it, of two at random."""
    rng = random.Random(f"policy:{seed}")

    def choose(_: Flight, replicas: Sequence[Replica]) -> int:
        first, second = rng.randrange(len(replicas)), rng.randrange(len(replicas))
        return second if replicas[second].in_system < replicas[first].in_system else first

    return choose


def least_loaded(seed: int) -> Policy:  # noqa: ARG001 - policies are made alike
    """Fewest requests in it, over all."""
    return lambda _, replicas: min(range(len(replicas)), key=lambda number: replicas[number].in_system)


POLICIES: Mapping[str, Callable[[int], Policy]] = {
    "round_robin": round_robin,
    "random": at_random,
    "two_choices": two_choices,
    "least_loaded": least_loaded,
}


@dataclass(frozen=True, slots=True)
class Promise:
    """Upper limits in ms by latency (`ttft`, `tpot`, `e2e`), and the share of requests that must meet them all."""

    limits_ms: Mapping[str, float]
    attainment: float = 0.95


@dataclass(frozen=True, slots=True)
class Fleet:
    """What one replica is, and what comes: asks are made anew for each seed."""

    options: SchedulerOptions
    law: StepLaw
    asks: Callable[[int], Callable[[int], Sequence[Ask]]]
    max_concurrent_requests: int = 128


@dataclass(frozen=True, slots=True)
class Point:
    """A fleet at one size: attainment with its lower bound, and the means that a table shows."""

    replicas: int
    attainment: float
    lower: float
    ttft_p50_ms: float
    ttft_p95_ms: float
    tpot_mean_ms: float
    utilisation: float
    output_tokens_per_s: float


@dataclass(frozen=True, slots=True)
class Sized:
    """The least fleet that keeps the promise, the one smaller, and the one with spares; with one replica lost."""

    rate: float
    policy: str
    at: Point
    below: Point | None
    with_spare: int
    one_lost: Point | None


def size_fleet(
    fleet: Fleet, promise: Promise, rate: float, policy: str, *, spare: int = 0, effort: float = 1.0
) -> Sized:
    """The least number of replicas for a rate in requests/s, by doubling and bisection.

    `effort` scales the virtual time of each point. Raises ValueError where no fleet keeps the promise.
    """
    known: dict[int, Point] = {}

    def point(replicas: int) -> Point:
        if replicas not in known:
            known[replicas] = attained(fleet, promise, rate, replicas, policy, effort)
        return known[replicas]

    high = 1
    while point(high).lower < promise.attainment:
        high *= 2
        if high > MOST_REPLICAS:
            raise ValueError(f"{MOST_REPLICAS} replicas do not keep the promise at {rate:g} requests/s")
    low = high // 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if point(middle).lower >= promise.attainment else (middle, high)
    below = point(high - 1) if high > 1 else None
    return Sized(rate, policy, point(high), below, high + spare, below)


def attained(fleet: Fleet, promise: Promise, rate: float, replicas: int, policy: str, effort: float = 1.0) -> Point:
    """A fleet of one size over three seeds of Poisson arrivals."""
    requests = math.ceil(effort * max(LEAST_REQUESTS, LEAST_SECONDS * rate))
    met = count = 0
    ttft: list[float] = []
    tpot: list[float] = []
    busy = seconds = tokens = 0.0
    for seed in range(SEEDS):
        times = poisson(rate, math.ceil(requests / SEEDS), seed)
        load = Load(fleet.asks(seed)(len(times)), times_ns=times)
        run = Simulation(
            load,
            [(fleet.options, fleet.law)] * replicas,
            max_concurrent_requests=fleet.max_concurrent_requests * replicas,
            policy=POLICIES[policy](seed),
        ).run()
        moments = Moments(run)
        good = meeting(moments, promise.limits_ms)
        met += int(good.sum())
        count += len(good)
        ttft += list(moments.latencies_ms("ttft"))
        tpot += list(moments.latencies_ms("tpot"))
        last_s = max(flight.end_ns for flight in run.flights) / NS_PER_S
        seconds += last_s
        busy += sum(each.counts.prefill_ns + each.counts.decode_ns for each in run.replicas) / NS_PER_S / replicas
        tokens += float(moments.output_tokens[moments.is_ok].sum())
    share = met / count
    lower = share - Z95 * math.sqrt(max(share * (1 - share), 1 / count) / count)
    ttft.sort()
    return Point(
        replicas,
        share,
        lower,
        _quantile(ttft, 0.5),
        _quantile(ttft, 0.95),
        sum(tpot) / max(len(tpot), 1),
        busy / seconds,
        tokens / seconds,
    )


def poisson(rate: float, count: int, seed: int) -> list[int]:
    """Arrival times in ns."""
    rng = random.Random(f"plan:{seed}")
    at_s, times = 0.0, []
    for _ in range(count):
        at_s += rng.expovariate(rate)
        times.append(round(at_s * NS_PER_S))
    return times


def _quantile(ordered: Sequence[float], share: float) -> float:
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else math.nan

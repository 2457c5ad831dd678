"""The number of replicas that meets an SLO at a rate, and over a day: fleets simulated with a balancing policy. Pure.

A request meets the SLO if each of its latencies is within its limit. The attainment of a fleet is the fraction of
requests that do; its lower 95 % bound decides.
"""

import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from reference_server.router.scheduling.scheduler import SchedulerOptions
from tuner.errors import NoFleetError
from tuner.simulator.engine import NS_PER_S, PlannedRequest, Policy, SimulatedLoad, Simulation
from tuner.simulator.replica import Flight, Replica
from tuner.simulator.simulated_metrics import Moments, within_limits
from tuner.simulator.step_law import StepLaw

LEAST_SECONDS, LEAST_REQUESTS = 400, 4000
SECONDS_PER_HOUR = 3600
SEEDS = 3
Z95 = 1.645
MAX_REPLICAS = 4096


def round_robin(seed: int) -> Policy:  # noqa: ARG001 - the signature of policies
    turn = iter(range(2**62))
    return lambda _, replicas: next(turn) % len(replicas)


def at_random(seed: int) -> Policy:
    rng = random.Random(f"policy:{seed}")
    return lambda _, replicas: rng.randrange(len(replicas))


def two_choices(seed: int) -> Policy:
    """The replica with fewer requests of two random ones."""
    rng = random.Random(f"policy:{seed}")

    def choose(_: Flight, replicas: Sequence[Replica]) -> int:
        first, second = rng.randrange(len(replicas)), rng.randrange(len(replicas))
        return second if replicas[second].in_system < replicas[first].in_system else first

    return choose


def least_loaded(seed: int) -> Policy:  # noqa: ARG001 - the signature of policies
    """The replica with the fewest requests."""
    return lambda _, replicas: min(range(len(replicas)), key=lambda number: replicas[number].in_system)


POLICIES: Mapping[str, Callable[[int], Policy]] = {
    "round_robin": round_robin,
    "random": at_random,
    "two_choices": two_choices,
    "least_loaded": least_loaded,
}


@dataclass(frozen=True, slots=True)
class LatencySlo:
    """Upper limits in ms by latency (`ttft`, `tpot`, `e2e`), and the fraction of requests that must meet all."""

    limits_ms: Mapping[str, float]
    attainment: float = 0.95


@dataclass(frozen=True, slots=True)
class Fleet:
    """The server of one replica, and its requests: `planned(seed)(count)` returns the first ones of a seed."""

    options: SchedulerOptions
    law: StepLaw
    planned: Callable[[int], Callable[[int], Sequence[PlannedRequest]]]
    max_concurrent_requests: int = 128


@dataclass(frozen=True, slots=True)
class FleetPoint:
    """A fleet of one size: attainment with its lower bound, and mean metrics."""

    replicas: int
    attainment: float
    lower: float
    ttft_p50_ms: float
    ttft_p95_ms: float
    tpot_mean_ms: float
    utilisation: float
    output_tokens_per_s: float


@dataclass(frozen=True, slots=True)
class SizedFleet:
    """The smallest fleet that meets the SLO, the next smaller one, the size with spares, and one replica lost."""

    rate: float
    policy: str
    at: FleetPoint
    below: FleetPoint | None
    with_spare: int
    one_lost: FleetPoint | None


def size_fleet(
    fleet: Fleet, slo: LatencySlo, rate: float, policy: str, *, spare: int = 0, effort: float = 1.0
) -> SizedFleet:
    """The smallest number of replicas for a rate in requests/s, by doubling and bisection.

    `effort` scales the simulated time of each point. Raises NoFleetError if no fleet meets the SLO.
    """
    known: dict[int, FleetPoint] = {}

    def point(replicas: int) -> FleetPoint:
        if replicas not in known:
            known[replicas] = attained(fleet, slo, rate, replicas, policy, effort)
        return known[replicas]

    high = 1
    while point(high).lower < slo.attainment:
        high *= 2
        if high > MAX_REPLICAS:
            raise NoFleetError(f"the SLO is not met at {rate:g} requests/s with up to {MAX_REPLICAS} replicas")
    low = high // 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if point(middle).lower >= slo.attainment else (middle, high)
    below = point(high - 1) if high > 1 else None
    return SizedFleet(rate, policy, point(high), below, high + spare, below)


def attained(fleet: Fleet, slo: LatencySlo, rate: float, replicas: int, policy: str, effort: float = 1.0) -> FleetPoint:
    """Simulate a fleet of one size with three seeds of Poisson arrivals."""
    requests = math.ceil(effort * max(LEAST_REQUESTS, LEAST_SECONDS * rate))
    met = count = 0
    ttft: list[float] = []
    tpot: list[float] = []
    busy = seconds = tokens = 0.0
    for seed in range(SEEDS):
        times = poisson(rate, math.ceil(requests / SEEDS), seed)
        load = SimulatedLoad(fleet.planned(seed)(len(times)), times_ns=times)
        run = Simulation(
            load,
            [(fleet.options, fleet.law)] * replicas,
            max_concurrent_requests=fleet.max_concurrent_requests * replicas,
            policy=POLICIES[policy](seed),
        ).run()
        moments = Moments(run)
        good = within_limits(moments, slo.limits_ms)
        met += int(good.sum())
        count += len(good)
        ttft += list(moments.latencies_ms("ttft"))
        tpot += list(moments.latencies_ms("tpot"))
        last_s = max(flight.end_ns for flight in run.flights) / NS_PER_S
        seconds += last_s
        busy += sum(each.counts.prefill_ns + each.counts.decode_ns for each in run.replicas) / NS_PER_S / replicas
        tokens += float(moments.output_tokens[moments.is_ok].sum())
    fraction = met / count
    lower = fraction - Z95 * math.sqrt(max(fraction * (1 - fraction), 1 / count) / count)
    ttft.sort()
    return FleetPoint(
        replicas,
        fraction,
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


def _quantile(ordered: Sequence[float], q: float) -> float:
    return ordered[min(len(ordered) - 1, int(q * len(ordered)))] if ordered else math.nan


@dataclass(frozen=True, slots=True)
class ReplicaSchedule:
    """Replicas by hour that the load needs and that run, and replica-hours spent starting."""

    needed: tuple[int, ...]
    running: tuple[int, ...]
    starting_hours: float

    @property
    def hours(self) -> float:
        """Replica-hours of the scheduled fleet, starting replicas included."""
        return sum(self.running) + self.starting_hours

    @property
    def static_hours(self) -> float:
        """Replica-hours of a constant fleet of the size that the peak needs."""
        return float(max(self.needed) * len(self.needed))


def replica_schedule(needed: Sequence[int], *, start_delay_s: float = 0.0, min_dwell_s: float = 0.0) -> ReplicaSchedule:
    """As many replicas as each hour needs, each kept for its dwell and started its delay before. Days repeat.

    >>> replica_schedule([1, 3, 1, 1], start_delay_s=900, min_dwell_s=7200)
    ReplicaSchedule(needed=(1, 3, 1, 1), running=(1, 3, 3, 1), starting_hours=0.5)
    """
    dwell_hours = max(1, math.ceil(min_dwell_s / SECONDS_PER_HOUR))
    count = len(needed)
    past = range(min(dwell_hours, count))
    running = tuple(max(needed[(hour - each) % count] for each in past) for hour in range(count))
    started = sum(max(0, running[hour] - running[hour - 1]) for hour in range(count))
    return ReplicaSchedule(tuple(needed), running, started * start_delay_s / SECONDS_PER_HOUR)

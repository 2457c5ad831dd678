"""Simulates a fleet of replicas with a balancing policy and Poisson arrivals. Pure."""

import random
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tuner.simulator.replica_state import Flight
from tuner.simulator.simulated_metrics import SimulatedTimes, within_limits
from tuner.simulator.simulation import (
    NS_PER_S,
    BatchingRule,
    PlannedRequest,
    Policy,
    Simulated,
    SimulatedLoad,
    SimulatedReplica,
    Simulation,
)
from tuner.simulator.step_law import StepLaw
from tuner.simulator.step_ranges import RangeUse

Array = npt.NDArray[np.float64]

# Number of requests after which their objects are converted to arrays.
CHUNK = 4096
# Tokens at the start of a prompt that select a replica, about as many as nginx hashes characters of.
HASHED_TOKENS = 64


def round_robin(seed: int) -> Policy:  # noqa: ARG001 - the signature of policies
    turn = iter(range(2**62))
    return lambda _, replicas: next(turn) % len(replicas)


def at_random(seed: int) -> Policy:
    rng = random.Random(f"policy:{seed}")
    return lambda _, replicas: rng.randrange(len(replicas))


def two_choices(seed: int) -> Policy:
    """The replica with fewer requests of two random ones."""
    rng = random.Random(f"policy:{seed}")

    def choose(_: Flight, replicas: Sequence[SimulatedReplica]) -> int:
        first, second = rng.randrange(len(replicas)), rng.randrange(len(replicas))
        return second if replicas[second].in_system < replicas[first].in_system else first

    return choose


def least_loaded(seed: int) -> Policy:  # noqa: ARG001 - the signature of policies
    """The replica with the fewest requests."""
    return lambda _, replicas: min(range(len(replicas)), key=lambda number: replicas[number].in_system)


def prefix_hash(seed: int) -> Policy:
    """The replica that a hash of the prompt's first tokens selects. Without shared prefixes a random one."""
    rng = random.Random(f"policy:{seed}")

    def choose(flight: Flight, replicas: Sequence[SimulatedReplica]) -> int:
        if flight.ids is None:
            return rng.randrange(len(replicas))
        start = ",".join(map(str, flight.ids[:HASHED_TOKENS]))
        return zlib.crc32(f"{seed}:{start}".encode()) % len(replicas)

    return choose


POLICIES: Mapping[str, Callable[[int], Policy]] = {
    "round_robin": round_robin,
    "random": at_random,
    "two_choices": two_choices,
    "least_loaded": least_loaded,
    "prefix_hash": prefix_hash,
}


@dataclass(frozen=True, slots=True)
class Fleet:
    """The server of one replica, and its requests.

    planned: returns the endless requests of a seed. first_seed: seed of the first run. The next runs have the next
    seeds.
    """

    rule: BatchingRule
    law: StepLaw
    planned: Callable[[int], Iterator[PlannedRequest]]
    max_concurrent_requests: int = 128
    first_seed: int = 0


@dataclass(frozen=True, slots=True)
class ServedRequests:
    """Requests in order of arrival, each array [requests].

    is_met: successful and within every limit. Latencies of failed requests and the TPOT of a single token are NaN.
    """

    sent_s: Array
    end_s: Array
    is_met: npt.NDArray[np.bool_]
    ttft_ms: Array
    tpot_ms: Array
    output_tokens: Array

    @classmethod
    def of(cls, flights: Sequence[Flight], limits_ms: Mapping[str, float]) -> "ServedRequests":
        times = SimulatedTimes(Simulated(list(flights), 0, 1))
        tokens, ok = times.output_tokens, times.is_ok
        with np.errstate(divide="ignore", invalid="ignore"):
            tpot_s = (times.end_at_s - times.first_s) / (tokens - 1)
        return cls(
            times.sent_s,
            times.end_at_s,
            within_limits(times, limits_ms),
            np.where(ok, 1e3 * (times.first_s - times.sent_s), np.nan),
            np.where(ok & (tokens > 1), 1e3 * tpot_s, np.nan),
            np.where(ok, tokens, 0.0),
        )

    @classmethod
    def joined(cls, parts: Sequence["ServedRequests"]) -> "ServedRequests":
        return cls(*(np.concatenate([getattr(part, name) for part in parts]) for name in cls.__slots__))

    @property
    def in_system(self) -> Array:
        """[requests]: number of requests in the fleet at each arrival."""
        ended = np.searchsorted(np.sort(self.end_s), self.sent_s, side="right")
        return np.arange(len(self.sent_s), dtype=np.float64) - ended


class FleetRun:
    """One run of a fleet of `replicas`, from an empty start, which can be extended."""

    def __init__(
        self, fleet: Fleet, limits_ms: Mapping[str, float], rate: float, replicas: int, policy: str, seed: int
    ):
        self._limits_ms = limits_ms
        self._simulation = Simulation(
            SimulatedLoad(fleet.planned(seed), times_ns=poisson(rate, seed)),
            [(fleet.rule, fleet.law)] * replicas,
            max_concurrent_requests=fleet.max_concurrent_requests * replicas,
            policy=POLICIES[policy](seed),
        )
        self._parts: list[ServedRequests] = []
        self._count = 0

    def first(self, requests: int) -> ServedRequests:
        """At least the first `requests` of the run, simulated to their ends. Extends the run if needed."""
        while self._count < requests:
            flights = self._simulation.next_ended(min(CHUNK, requests - self._count))
            self._parts.append(ServedRequests.of(flights, self._limits_ms))
            self._count += len(flights)
        self._parts = [ServedRequests.joined(self._parts)]
        return self._parts[0]

    @property
    def ranges(self) -> RangeUse:
        """The step time outside the measured sizes of steps."""
        return RangeUse.joined(each.counts.ranges for each in self._simulation.replicas)

    @property
    def utilisation(self) -> float:
        """Mean fraction of time in which a replica is running a step."""
        replicas = self._simulation.replicas
        busy_ns = sum(each.counts.prefill_ns + each.counts.decode_ns for each in replicas)
        return busy_ns / len(replicas) / max(NS_PER_S * float(self._parts[0].end_s.max()), 1.0)


def poisson(rate: float, seed: int) -> Iterator[int]:
    """Arrival times in ns, without an end."""
    rng = random.Random(f"plan:{seed}")
    at_s = 0.0
    while True:
        at_s += rng.expovariate(rate)
        yield round(at_s * NS_PER_S)

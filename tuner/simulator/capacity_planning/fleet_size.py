"""Finds the number of replicas that meets an SLO at a rate, by simulation of fleets. Pure.

A request meets the SLO if every latency is within its limit. The attainment of a stationary fleet is the fraction of
requests that meet the SLO. Its lower 95 % bound decides.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from tuner.errors import NoFleetError
from tuner.simulator.capacity_planning.attainment import Attainment, FleetVerdict, after_transient
from tuner.simulator.capacity_planning.fleet import Fleet, FleetRun, ServedRequests
from tuner.simulator.step_ranges import RangeUse

LEAST_SECONDS, LEAST_REQUESTS = 400, 4000
RUNS = 10
LEAST_REQUESTS_PER_RUN = 100
# The runs of a fleet are extended to these multiples of the shortest time until they decide. The bounds are valid for
# all looks together.
LOOKS = (1, 2, 4, 8)
LEVEL = 0.05
MAX_REPLICAS = 4096


@dataclass(frozen=True, slots=True)
class LatencySlo:
    """Upper limits in ms by latency (`ttft`, `tpot`, `e2e`), and the fraction of requests that must meet all limits."""

    limits_ms: Mapping[str, float]
    attainment: float = 0.95


@dataclass(frozen=True, slots=True)
class FleetPoint:
    """A fleet of one size: attainment with bounds, verdict, and metrics of `requests` after the transient.

    requests_per_replica: mean number of requests, running and waiting, of a replica. ranges: step time outside the
    measured sizes of steps.
    """

    replicas: int
    attained: Attainment
    verdict: FleetVerdict
    requests: int
    ttft_p50_ms: float
    ttft_p95_ms: float
    tpot_mean_ms: float
    utilisation: float
    output_tokens_per_s: float
    requests_per_replica: float
    ranges: RangeUse = field(default_factory=RangeUse)

    @property
    def attainment(self) -> float:
        return self.attained.value

    @property
    def lower(self) -> float:
        return self.attained.lower

    @property
    def is_sufficient(self) -> bool:
        return self.verdict is FleetVerdict.MEETS


@dataclass(frozen=True, slots=True)
class SizedFleet:
    """A sized fleet. `at`: the smallest sufficient fleet. `below`: one replica less. `with_spare`: size with spares."""

    rate: float
    policy: str
    at: FleetPoint
    below: FleetPoint | None
    with_spare: int


def size_fleet(
    fleet: Fleet, slo: LatencySlo, rate: float, policy: str, *, spare: int = 0, effort: float = 1.0
) -> SizedFleet:
    """The smallest sufficient number of replicas for a rate in requests/s, by doubling and bisection.

    `effort` scales the simulated time of each point. Raises NoFleetError if no fleet meets the SLO.
    """
    known: dict[int, FleetPoint] = {}

    def point(replicas: int) -> FleetPoint:
        if replicas not in known:
            known[replicas] = attained(fleet, slo, rate, replicas, policy, effort)
        return known[replicas]

    high = 1
    while not point(high).is_sufficient:
        high *= 2
        if high > MAX_REPLICAS:
            raise NoFleetError(f"the SLO is not met at {rate:g} requests/s with up to {MAX_REPLICAS} replicas")
    low = high // 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if point(middle).is_sufficient else (middle, high)
    return SizedFleet(rate, policy, point(high), point(high - 1) if high > 1 else None, high + spare)


def attained(fleet: Fleet, slo: LatencySlo, rate: float, replicas: int, policy: str, effort: float = 1.0) -> FleetPoint:
    """Simulate a fleet of one size in independent runs until they decide whether it meets the SLO."""
    runs = [FleetRun(fleet, slo.limits_ms, rate, replicas, policy, fleet.first_seed + each) for each in range(RUNS)]
    least = effort * max(LEAST_REQUESTS, LEAST_SECONDS * rate) / RUNS
    for look in LOOKS:
        requests = max(math.ceil(look * least), LEAST_REQUESTS_PER_RUN)
        served = [run.first(requests) for run in runs]
        start = after_transient(requests)
        found = Attainment.of(
            np.array([each.is_met[start:] for each in served]),
            np.array([each.in_system[start:] for each in served]),
            LEVEL / len(LOOKS),
        )
        verdict = found.verdict(slo.attainment, is_last=look == LOOKS[-1])
        if verdict is not None:
            break
    assert verdict is not None, "the last look decides"
    point = _point(replicas, found, verdict, served, start, sum(run.utilisation for run in runs) / RUNS)
    return replace(point, ranges=RangeUse.joined(run.ranges for run in runs))


def _point(
    replicas: int,
    found: Attainment,
    verdict: FleetVerdict,
    served: Sequence[ServedRequests],
    start: int,
    utilisation: float,
) -> FleetPoint:
    ttft_ms, tpot_ms, tokens = (
        np.concatenate([getattr(each, name)[start:] for each in served])
        for name in ("ttft_ms", "tpot_ms", "output_tokens")
    )
    in_system = np.concatenate([each.in_system[start:] for each in served])
    seconds = sum(float(each.sent_s[-1] - each.sent_s[start]) for each in served)
    p50, p95 = np.nanquantile(ttft_ms, (0.5, 0.95)) if np.isfinite(ttft_ms).any() else (math.nan, math.nan)
    tpot = float(np.nanmean(tpot_ms)) if np.isfinite(tpot_ms).any() else 0.0
    return FleetPoint(
        replicas,
        found,
        verdict,
        len(ttft_ms),
        float(p50),
        float(p95),
        tpot,
        utilisation,
        float(tokens.sum()) / max(seconds, 1e-9),
        float(in_system.mean()) / replicas,
    )

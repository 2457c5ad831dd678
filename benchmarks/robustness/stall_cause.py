"""Finds the cause of a stall: divides its time into model steps, router and client, with the waits of each for a core.

The evidence has one clock (monotonic, ns): the router's step trace, the probes of `/health`, which need the router's
event loop alone, the times that the kernel recorded for each thread, and the other requests in flight.
"""

import json
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from benchmarks.robustness.core_times import CoreTimes, core_times_within

NS_PER_MS = 1_000_000


class Stall(NamedTuple):
    """A wait of one stream: for its first token, or between two tokens. `own_ns` is the part that is its own work."""

    wait_ns: int
    start_ns: int
    end_ns: int
    is_first: bool
    late_ns: int  # how late the client read its end


class TracedStep(NamedTuple):
    """One call of the model server: prompt tokens, rows that decode, the time in the model server and in all."""

    at_ns: int
    kind: str
    tokens: int
    rows: int
    model_ns: int
    wall_ns: int

    def __str__(self) -> str:
        return f"{self.kind} of {self.tokens} prompt tokens and {self.rows} rows, {self.model_ns / NS_PER_MS:.0f} ms"


class InFlight(NamedTuple):
    """Something that was in flight."""

    name: str
    start_ns: int
    end_ns: int

    def overlap_ns(self, start_ns: int, end_ns: int) -> int:
        return max(0, min(self.end_ns, end_ns) - max(self.start_ns, start_ns))


@dataclass(frozen=True, slots=True)
class StallEvidence:
    """Everything recorded while the server was loaded. Steps and samples are in order of time."""

    steps: Sequence[TracedStep]
    cores: Sequence[CoreTimes]
    probes: Sequence[InFlight]
    others: Sequence[InFlight]


@dataclass(frozen=True, slots=True)
class Cause:
    """One stall with the stage that took most of it. All times in ms."""

    text: str
    wait_ms: float
    start_ns: int
    is_first_token: bool
    stages_ms: dict[str, float]
    longest_step: str
    slowest_health_ms: float
    ran_ms: dict[str, float]
    waited_for_core_ms: dict[str, float]
    in_flight: list[str]
    client_late_ms: float
    """Already excluded where the kernel records arrival times."""


def cause_of(stall: Stall, evidence: StallEvidence) -> Cause:
    """The stage of the pipeline that took most of a stall."""
    start_ns, end_ns = stall.start_ns, stall.end_ns
    steps = steps_within(evidence.steps, start_ns, end_ns)
    in_model = sum(
        InFlight("", s.at_ns, s.at_ns + min(s.model_ns, s.wall_ns)).overlap_ns(start_ns, end_ns) for s in steps
    )
    in_steps = sum(InFlight("", s.at_ns, s.at_ns + s.wall_ns).overlap_ns(start_ns, end_ns) for s in steps)
    stages = {
        "model steps": in_model,
        "router between steps": in_steps - in_model,
        "no step": end_ns - start_ns - in_steps,
    }
    longest = max(steps, key=lambda step: step.model_ns, default=None)
    probes = [probe.end_ns - probe.start_ns for probe in evidence.probes if probe.overlap_ns(start_ns, end_ns)]
    ran, waited = core_times_within(evidence.cores, start_ns, end_ns)
    in_flight = [other.name for other in evidence.others if other.overlap_ns(start_ns, end_ns)]
    return Cause(
        text=describe(stages, longest, max(probes, default=0), waited, in_flight),
        wait_ms=in_ms(stall.wait_ns),
        start_ns=start_ns,
        is_first_token=stall.is_first,
        stages_ms={name: in_ms(ns) for name, ns in stages.items()},
        longest_step="none" if longest is None else str(longest),
        slowest_health_ms=in_ms(max(probes, default=0)),
        ran_ms={name: in_ms(ns) for name, ns in ran.items()},
        waited_for_core_ms={name: in_ms(ns) for name, ns in waited.items()},
        in_flight=in_flight,
        client_late_ms=in_ms(stall.late_ns),
    )


def describe(
    stages: dict[str, int], longest: TracedStep | None, probe_ns: int, waited: dict[str, int], in_flight: Sequence[str]
) -> str:
    """The longest stage in words, with the part of it that the process waited for a core."""
    stage, stage_ns = max(stages.items(), key=lambda item: item[1])
    words = [f"{stage}: {in_ms(stage_ns):.0f} of {in_ms(sum(stages.values())):.0f} ms"]
    process = "model server" if stage == "model steps" else "router"
    if stage == "model steps":
        words.append(f"the longest is a {longest}")
    elif probe_ns > stage_ns / 2:
        words.append(f"its event loop was blocked: a health probe took {in_ms(probe_ns):.0f} ms")
    if waited.get(process, 0) > stage_ns / 4:
        words.append(f"threads of the {process} waited {in_ms(waited[process]):.0f} ms for a core")
    if in_flight:
        words.append("in flight: " + ", ".join(sorted(set(in_flight))))
    return "; ".join(words)


def steps_within(steps: Sequence[TracedStep], start_ns: int, end_ns: int) -> Sequence[TracedStep]:
    """The steps that overlap a span of time."""
    first = max(0, bisect_right(steps, start_ns, key=lambda step: step.at_ns) - 1)
    last = bisect_left(steps, end_ns, key=lambda step: step.at_ns)
    return steps[first:last]


def read_steps(path: Path) -> list[TracedStep]:
    """The rows of a step trace."""
    lines = path.read_text().splitlines()
    columns = json.loads(lines[0])["columns"]
    steps = []
    for line in lines[1:]:
        row = dict(zip(columns, json.loads(line), strict=True))
        steps.append(TracedStep(row["at_ns"], row["kind"], row["tokens"], row["rows"], row["total_ns"], row["wall_ns"]))
    return steps


def in_ms(ns: int) -> float:
    return round(ns / NS_PER_MS, 1)

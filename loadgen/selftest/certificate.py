"""The certificate of the printed intervals: every queue, load and number of requests, judged by coverage and silence.

Intervals must contain the stationary value nearly always. Intervals must also be printed: a run with enough requests
must have them, and they must be narrow. docs/intervals.md has the certificate of the long form.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from typing import Any

from scipy import special

from loadgen.selftest.coverage import CoverageCell, Setting
from loadgen.selftest.queue_models import MODELS
from reports.stats.estimators import is_supported

COUNTS = (300, 1_000, 5_000)
SEED = 20_261_122
"""Of seeds that no constant of the intervals was chosen with."""
SHORT_RUNS, LONG_RUNS = 400, 1_000

LEAST_COVERAGE, LEAST_COVERED_CELLS, LOWEST_COVERAGE = 0.93, 0.99, 0.91
LEAST_PRINTED, MOST_MISSES = 0.2, 0.03
LEAST_REQUIRED, LEAST_INDEPENDENT = 0.9, 0.99
WIDEST = 3.0
# With few runs a cell, a coverage below a bound must be beyond chance at this level, over all cells together.
CHANCE = 0.01

# The mean TTFT has room for one cluster of waiting requests that a calm run did not see. A server without any queue,
# whose requests never wait, cannot be distinguished from one. docs/intervals.md has the coverage without this room.
WIDE_ON_PURPOSE = ("independent", "ttft", "mean")

CENTRE = ("mean", "p50")
SINGLE_SERVER = ("M/M/1", "M/G/1 cv 0.5", "M/G/1 cv 1.5")


@dataclass(frozen=True, slots=True)
class CertificateRequirement:
    """Intervals that most runs must print: up to a load, from a number of requests on."""

    models: tuple[str, ...]
    statistics: tuple[str, ...]
    highest_load: float
    least_count: int

    def applies_to(self, cell: CoverageCell) -> bool:
        return (
            cell.model in self.models
            and cell.statistic in self.statistics
            and cell.load <= self.highest_load
            and cell.count >= self.least_count
        )


REQUIREMENTS = (
    CertificateRequirement(("closed loop",), CENTRE, 0.7, 1_000),
    CertificateRequirement((*SINGLE_SERVER, "M/G/16"), CENTRE, 0.5, 1_000),
    CertificateRequirement((*SINGLE_SERVER, "M/G/16"), CENTRE, 0.7, 5_000),
    CertificateRequirement(("M/G/16", "closed loop"), ("p95",), 0.5, 1_000),
    CertificateRequirement(SINGLE_SERVER, ("p95",), 0.5, 5_000),
)


def required_fraction(cell: CoverageCell) -> float:
    """The fraction of runs that must print this cell; 0 if none must."""
    if cell.model == "independent":
        percentile = float(cell.statistic[1:]) if cell.statistic.startswith("p") else 50.0
        return LEAST_INDEPENDENT if is_supported(percentile, cell.count) else 0.0
    return LEAST_REQUIRED if any(each.applies_to(cell) for each in REQUIREMENTS) else 0.0


@dataclass(frozen=True, slots=True)
class BrokenPromise:
    """A promise that a cell breaks."""

    cell: CoverageCell
    promise: str
    is_fatal: bool = True


@dataclass(frozen=True, slots=True)
class Certificate:
    """The judged cells. `runs` simulated runs a cell; fewer than `LONG_RUNS` allow for chance."""

    cells: Sequence[CoverageCell]
    runs: int
    seed: int

    @property
    def frequent(self) -> list[CoverageCell]:
        """Cells whose interval is printed often."""
        return [cell for cell in self.cells if cell.printed_fraction >= LEAST_PRINTED]

    @property
    def required(self) -> list[CoverageCell]:
        """Cells whose interval must be printed."""
        return [cell for cell in self.cells if required_fraction(cell)]

    @property
    def findings(self) -> list[BrokenPromise]:
        return [*self._coverage(), *self._silence()]

    @property
    def is_kept(self) -> bool:
        below = [finding for finding in self.findings if not finding.is_fatal]
        return len(below) <= (1 - LEAST_COVERED_CELLS) * len(self.frequent) and len(below) == len(self.findings)

    def conclusion(self) -> str:
        verdict = "The intervals keep" if self.is_kept else "THE INTERVALS BREAK"
        parts = [f"{verdict} their promise in {self.runs} runs of each of {len(self.cells)} cells."]
        if frequent := self.frequent:
            covered = sum(cell.coverage >= LEAST_COVERAGE for cell in frequent)
            lowest = min(frequent, key=lambda cell: cell.coverage)
            parts.append(
                f"{covered} of the {len(frequent)} cells that print in at least {LEAST_PRINTED:.0%} of the runs cover "
                f"the truth in at least {LEAST_COVERAGE:.0%} of them; the lowest covers {lowest.coverage:.1%} "
                f"({lowest.name})."
            )
        if required := self.required:
            silent = min(required, key=lambda cell: cell.printed_fraction)
            narrow = [cell for cell in required if (cell.model, cell.latency, cell.statistic) != WIDE_ON_PURPOSE]
            widest = max(narrow or required, key=lambda cell: cell.relative_half_width)
            parts.append(
                f"Of the {len(required)} cells that must print, the most silent one prints "
                f"{silent.printed_fraction:.1%} ({silent.name}), and the widest has {widest.relative_half_width:.2f} "
                f"times the half-width of an ideal interval ({widest.name})."
            )
        parts += [] if self.runs >= LONG_RUNS else ["Breaches that chance explains are not counted."]
        return " ".join(parts)

    def _coverage(self) -> Iterator[BrokenPromise]:
        for cell in self.cells:
            missed = cell.printed - cell.covered
            if cell.printed_fraction < LEAST_PRINTED:
                if self._is_below(cell.runs - missed, cell.runs, 1 - MOST_MISSES):
                    yield BrokenPromise(cell, f"{cell.miss_fraction:.1%} of the runs print an interval that misses")
            elif self._is_below(cell.covered, cell.printed, LOWEST_COVERAGE):
                yield BrokenPromise(cell, f"covers {cell.coverage:.1%}, below {LOWEST_COVERAGE:.0%}")
            elif self._is_below(cell.covered, cell.printed, LEAST_COVERAGE):
                yield BrokenPromise(cell, f"covers {cell.coverage:.1%}, below {LEAST_COVERAGE:.0%}", is_fatal=False)

    def _silence(self) -> Iterator[BrokenPromise]:
        for cell in self.required:
            least = required_fraction(cell)
            if self._is_below(cell.printed, cell.runs, least):
                yield BrokenPromise(cell, f"printed in {cell.printed_fraction:.1%} of the runs, below {least:.0%}")
            if cell.relative_half_width > WIDEST and (cell.model, cell.latency, cell.statistic) != WIDE_ON_PURPOSE:
                yield BrokenPromise(cell, f"is {cell.relative_half_width:.2f} times as wide as an ideal interval")

    def _is_below(self, successes: int, trials: int, fraction: float) -> bool:
        if successes >= fraction * trials:
            return False
        return self.runs >= LONG_RUNS or float(special.bdtr(successes, trials, fraction)) < CHANCE / len(self.cells)

    def table(self) -> list[dict[str, Any]]:
        """A row per cell, for JSON."""
        return [
            {
                "model": cell.model,
                "load": cell.load,
                "requests": cell.count,
                "latency": cell.latency,
                "statistic": cell.statistic,
                "printed": round(cell.printed_fraction, 4),
                "coverage": _rounded(cell.coverage, 4),
                "width": _rounded(cell.median_width, 3),
                "half_width": _rounded(cell.relative_half_width, 2),
                "needed": _rounded(cell.median_needed, 0),
            }
            for cell in self.cells
        ]

    def to_json(self) -> dict[str, Any]:
        findings = [{"cell": each.cell.name, "promise": each.promise} for each in self.findings]
        return {
            "runs": self.runs,
            "seed": self.seed,
            "is_kept": self.is_kept,
            "conclusion": self.conclusion(),
            "findings": findings,
            "cells": self.table(),
        }


def _rounded(value: float, digits: int) -> float | None:
    return None if math.isnan(value) or math.isinf(value) else round(value, digits)


def settings() -> list[Setting]:
    """Every model, load and number of requests; the slowest ones first, so that processes end together."""
    found = [Setting(model, load, count) for model in MODELS for load in model.loads for count in COUNTS]
    return sorted(found, key=lambda each: (-each.count, each.model.servers is not None))


def certify(
    runs: int,
    seed: int = SEED,
    processes: int | None = None,
    done: Callable[[Setting], None] = lambda _: None,
    chosen: Sequence[Setting] | None = None,
) -> Certificate:
    """Simulate and judge; calls `done` after each setting, in the order of `settings`."""
    planned = settings() if chosen is None else chosen
    found: dict[Setting, list[CoverageCell]] = {}
    with ProcessPoolExecutor(processes) as pool:
        jobs = [_Job(MODELS.index(each.model), each.load, each.count, runs, seed) for each in planned]
        for setting, cells in zip(planned, pool.map(_simulate, jobs), strict=True):
            found[setting] = cells
            done(setting)
    order = sorted(found, key=lambda each: (MODELS.index(each.model), each.load, each.count))
    return Certificate([cell for setting in order for cell in found[setting]], runs, seed)


@dataclass(frozen=True, slots=True)
class _Job:
    """A setting for another process: the model by its index."""

    model: int
    load: float
    count: int
    runs: int
    seed: int


def _simulate(job: _Job) -> list[CoverageCell]:
    return Setting(MODELS[job.model], job.load, job.count).cells(job.runs, job.seed)

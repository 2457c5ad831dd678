"""Live runs for the gate: pairs of runs, each on a restarted server, until `reports.gate.compare` has decided.

Pairs alternate A B, B A, …, so that machine drift affects both sides equally; `interleaving` measures pairs in slices.
`tgi-bench noise` and comparisons with a stored baseline run one side alone.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from loadgen.errors import MeasurementError
from loadgen.gate.live_runs import Measure
from loadgen.gate.sides import LiveSide
from loadgen.interrupts import Interrupted
from loadgen.progress import ProgressDisplay
from loadgen.terminal.progress_line import LAUNCHING, Position
from reports.gate.compare import judge
from reports.gate.comparison import CompareOptions, Comparison, MetricResult
from reports.gate.side_run import GateRefusal, Pair, SideRun
from reports.metrics.checks.findings import Level
from reports.metrics.titles import metric_heading

T = TypeVar("T")

# An invalid run is repeated once.
ATTEMPTS = 2

MeasurePair = Callable[[int, tuple[LiveSide, LiveSide]], Pair]
"""Measures the pair of a number, counted from 1."""


def pair_order(number: int, sides: tuple[LiveSide, LiveSide]) -> tuple[LiveSide, LiveSide]:
    """A B for odd numbers, B A for even ones."""
    return sides if number % 2 else (sides[1], sides[0])


@dataclass(frozen=True, slots=True)
class GateResult:
    """The comparison, the exit code (its own, or of the signal that ended it), and each side's runs."""

    comparison: Comparison
    exit_code: int
    runs_a: tuple[SideRun, ...] = ()
    runs_b: tuple[SideRun, ...] = ()

    @classmethod
    def of_pairs(cls, comparison: Comparison, pairs: Sequence[Pair], exit_code: int | None = None) -> "GateResult":
        code = comparison.exit_code if exit_code is None else exit_code
        runs = [run for pair in pairs for run in pair.runs]
        return cls(comparison, code, tuple(run.a for run in runs), tuple(run.b for run in runs))


@dataclass(frozen=True, slots=True)
class Gate:
    """Runs pairs: where they are stored, how they are judged, and the time limit."""

    out: Path
    options: CompareOptions
    progress: ProgressDisplay
    max_minutes: float | None = None

    def run(self, sides: tuple[LiveSide, LiveSide], measure_pair: MeasurePair) -> "GateResult":
        """Run pairs until every gated metric is decided, a limit on pairs or time is reached, or a signal arrives.

        A side that does not start also ends it; the comparison then has a refusal. Raises Interrupted on a second
        signal.
        """
        deadline_s = time.monotonic() + 60 * self.max_minutes if self.max_minutes else None
        pairs: list[Pair] = []
        comparison = replace(judge(pairs, self.options), label_a=sides[0].label, label_b=sides[1].label)
        for number in range(1, self.options.looks[-1] + 1):
            looks = self.options.looks
            count = looks[-1] if looks[0] == looks[-1] else f"{looks[0]}–{looks[-1]}"
            self.progress.place(Position("pair", number, count, idle=LAUNCHING))
            try:
                pairs.append(measure_pair(number, sides))
            except Interrupted as interrupted:
                if interrupted.is_urgent:
                    raise
                self.progress.show(f"interrupted; judging {len(pairs)} pairs")
                return GateResult.of_pairs(comparison, pairs, interrupted.exit_code)
            except MeasurementError as error:
                self.progress.show(str(error))
                refusal = GateRefusal.of(f"pair {number} could not be measured: {error}")
                comparison = replace(comparison, refusals=(*comparison.refusals, refusal))
                break
            comparison = judge(pairs, self.options)
            if comparison.refusals:
                break
            self.progress.show(f"pair {number}, B against A:{_changes(comparison)}")
            if number >= self.options.looks[0] and comparison.is_decided:
                break
            if deadline_s is not None and time.monotonic() > deadline_s:
                self.progress.show(f"time limit of {self.max_minutes:g} minutes reached")
                break
        return GateResult.of_pairs(comparison, pairs)

    def run_alone(self, side: LiveSide, count: int, measure: Measure) -> "SideRuns":
        """`count` runs of one side; fewer at the time limit or after a signal. Raises MeasurementError."""

        def run(number: int) -> SideRun:
            return valid_run(self.out / f"run{number:02d}", f"run {number}", side, measure, self.progress)

        runs, exit_code = self._repeated(count, run, lambda run: run.status != Level.INVALID)
        return SideRuns(runs, exit_code)

    def run_equal(self, side: LiveSide, count: int, measure_pair: MeasurePair) -> "SideRuns":
        """`count` pairs of a side with itself; fewer at the time limit or after a signal. Raises MeasurementError."""
        sides = replace(side, letter="a"), replace(side, letter="b")
        pairs, exit_code = self._repeated(count, lambda number: measure_pair(number, sides), lambda pair: pair.is_valid)
        return SideRuns(tuple(run for pair in pairs for run in (pair.a, pair.b)), exit_code, pairs)

    def _repeated(
        self, count: int, measure: Callable[[int], T], is_valid: Callable[[T], bool]
    ) -> tuple[tuple[T, ...], int | None]:
        """Up to `count` measurements, the last one perhaps invalid; and the exit code of a signal."""
        deadline_s = time.monotonic() + 60 * self.max_minutes if self.max_minutes else None
        done: list[T] = []
        for number in range(1, count + 1):
            self.progress.place(Position("run", number, count, idle=LAUNCHING))
            try:
                done.append(measure(number))
            except Interrupted as interrupted:
                if interrupted.is_urgent:
                    raise
                self.progress.show(f"interrupted after {len(done)} of {count}")
                return tuple(done), interrupted.exit_code
            if not is_valid(done[-1]):
                break
            if deadline_s is not None and time.monotonic() > deadline_s:
                self.progress.show(f"time limit of {self.max_minutes:g} minutes reached")
                break
        return tuple(done), None


@dataclass(frozen=True, slots=True)
class SeparateRuns:
    """Measures a pair as one run of each side on a server of its own, one after the other."""

    measure: Measure
    out: Path
    progress: ProgressDisplay

    def __call__(self, number: int, sides: tuple[LiveSide, LiveSide]) -> Pair:
        runs = {
            side.letter: valid_run(
                self.out / f"pair{number:02d}-{side.letter}",
                f"pair {number}, {side.letter.upper()}",
                side,
                self.measure,
                self.progress,
            )
            for side in pair_order(number, sides)
        }
        return Pair(runs[sides[0].letter], runs[sides[1].letter])


def valid_run(directory: Path, shown: str, side: LiveSide, measure: Measure, progress: ProgressDisplay) -> SideRun:
    """One run; an invalid one is repeated once."""
    for attempt in range(ATTEMPTS):
        progress.show(shown if shown.endswith(f", {side.label}") else f"{shown}: {side.label}")
        run = measure(side, directory.with_name(directory.name + (f"-again{attempt}" if attempt else "")))
        if run.status != Level.INVALID:
            break
        progress.show(f"  invalid: {'; '.join(run.reasons)}")
    return run


@dataclass(frozen=True, slots=True)
class SideRuns:
    """The runs of one side, in pairs with itself if it was interleaved; `exit_code`: of the signal that ended them."""

    runs: tuple[SideRun, ...]
    exit_code: int | None = None
    pairs: tuple[Pair, ...] = ()

    @property
    def is_valid(self) -> bool:
        return all(run.status != Level.INVALID for run in self.runs)


def _changes(comparison: Comparison) -> str:
    """The change in the last pair, and the mean of all pairs with its interval, of each gated metric."""
    return "".join(f"\n  {_change(metric)}" for metric in comparison.gated if metric.d)


def _change(metric: MetricResult) -> str:
    mean, count = metric.running_change, len(metric.d)
    unit = metric.change_unit
    text = f"{metric_heading(metric.name)} {metric.last_change:+.1f} {unit}"
    if count < 2:
        return text
    interval = f"95 % interval {mean.lo:+.1f} to {mean.hi:+.1f}"
    return f"{text}; mean of {count} pairs {mean.value:+.1f} {unit} ({interval})"

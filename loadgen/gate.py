"""Live runs for the gate: which side runs when, on a fresh launch, until `reports.compare` has decided.

Pairs alternate A B, B A, …, so that a drift of the machine hits both sides alike. One side alone is run for
`tgi-bench noise` and against a stored baseline.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from loadgen import runner
from loadgen.config import BenchConfig
from loadgen.errors import MeasurementError
from loadgen.interrupts import Interrupted
from loadgen.progress import Progress
from loadgen.sides import Side
from reports.compare import CompareOptions, Comparison, Pair, Refusal, SideRun, judge
from reports.results import load_manifest, write_manifest
from reports.summary import write_summary
from reports.validity import Level

# An invalid run says nothing about its side; it is made once more.
ATTEMPTS = 2


Measure = Callable[[Side, Path], SideRun]


@dataclass(frozen=True, slots=True)
class GateResult:
    """What the pairs say, the exit code (the comparison's own, or that of the signal which ended it), and each side's
    runs."""

    comparison: Comparison
    exit_code: int
    runs_a: tuple[SideRun, ...] = ()
    runs_b: tuple[SideRun, ...] = ()

    @classmethod
    def of_pairs(cls, comparison: Comparison, pairs: Sequence[Pair], exit_code: int | None = None) -> "GateResult":
        code = comparison.exit_code if exit_code is None else exit_code
        return cls(comparison, code, tuple(pair.a for pair in pairs), tuple(pair.b for pair in pairs))


@dataclass(frozen=True, slots=True)
class Gate:
    """How pairs are run: where they are kept, how they are judged, and when it has taken too long."""

    out: Path
    options: CompareOptions
    progress: Progress
    max_minutes: float | None = None

    def run(self, sides: tuple[Side, Side], measure: Measure) -> "GateResult":
        """Run pairs until every gated metric is decided, their number or the time is spent, or a signal comes.

        A side that does not start ends it too, and is told of as what could not be measured. Raises Interrupted when
        signalled twice.
        """
        deadline_s = time.monotonic() + 60 * self.max_minutes if self.max_minutes else None
        pairs: list[Pair] = []
        comparison = replace(judge(pairs, self.options), label_a=sides[0].label, label_b=sides[1].label)
        for number in range(1, self.options.looks[-1] + 1):
            try:
                pairs.append(self._pair(number, sides, measure))
            except Interrupted as interrupted:
                if interrupted.is_urgent:
                    raise
                self.progress.say(f"interrupted; judging the {len(pairs)} pairs there are")
                return GateResult.of_pairs(comparison, pairs, interrupted.exit_code)
            except MeasurementError as error:
                self.progress.say(str(error))
                lost = Refusal.of(f"pair {number} could not be measured: {error}")
                comparison = replace(comparison, refusals=(*comparison.refusals, lost))
                break
            comparison = judge(pairs, self.options)
            if comparison.refusals:
                break
            self.progress.say(f"pair {number}: {_so_far(comparison)}")
            if number >= self.options.looks[0] and comparison.is_decided:
                break
            if deadline_s is not None and time.monotonic() > deadline_s:
                self.progress.say(f"{self.max_minutes:g} minutes are up")
                break
        return GateResult.of_pairs(comparison, pairs)

    def run_alone(self, side: Side, count: int, measure: Measure) -> "Alone":
        """So many runs of one side; fewer when the time is up or a signal comes. Raises MeasurementError."""
        deadline_s = time.monotonic() + 60 * self.max_minutes if self.max_minutes else None
        runs: list[SideRun] = []
        for number in range(1, count + 1):
            try:
                runs.append(self._valid_run(f"run{number:02d}", f"run {number}", side, measure))
            except Interrupted as interrupted:
                if interrupted.is_urgent:
                    raise
                self.progress.say(f"interrupted after {len(runs)} runs")
                return Alone(tuple(runs), interrupted.exit_code)
            if runs[-1].status == Level.INVALID:
                break
            if deadline_s is not None and time.monotonic() > deadline_s:
                self.progress.say(f"{self.max_minutes:g} minutes are up")
                break
        return Alone(tuple(runs))

    def _pair(self, number: int, sides: tuple[Side, Side], measure: Measure) -> Pair:
        order = sides if number % 2 else tuple(reversed(sides))
        runs = {
            side.letter: self._valid_run(
                f"pair{number:02d}-{side.letter}", f"pair {number}, {side.letter.upper()}", side, measure
            )
            for side in order
        }
        return Pair(runs[sides[0].letter], runs[sides[1].letter])

    def _valid_run(self, name: str, shown: str, side: Side, measure: Measure) -> SideRun:
        for attempt in range(ATTEMPTS):
            self.progress.say(f"{shown}: {side.label}")
            run = measure(side, self.out / (name + (f"-again{attempt}" if attempt else "")))
            if run.status != Level.INVALID:
                break
            self.progress.say(f"  invalid: {'; '.join(run.reasons)}")
        return run


@dataclass(frozen=True, slots=True)
class Alone:
    """The runs of one side, and the exit code of the signal that ended them early."""

    runs: tuple[SideRun, ...]
    exit_code: int | None = None

    @property
    def is_valid(self) -> bool:
        return all(run.status != Level.INVALID for run in self.runs)


def live_measure(load: BenchConfig, metrics: Sequence[str], progress: Progress) -> Measure:
    """Measures a side by opening its server, loading it and leaving it; the run stays in its directory."""

    def measure(side: Side, directory: Path) -> SideRun:
        directory.mkdir(parents=True, exist_ok=True)
        labelled = load.model_copy(update={"label": side.label})
        died = None
        with side.server.open(load, directory / "server.log") as target:
            runner.run(labelled, target, directory, progress)
            if target.process is not None:
                died = target.process.exit_code
        if died is not None:
            raise MeasurementError(f"{side.label} ended with exit code {died} during its run; log in {directory}")
        if side.identity:
            manifest = load_manifest(directory)
            write_manifest(directory, replace(manifest, labels={**manifest.labels, **side.identity}))
        return stored_run(directory, metrics)

    return measure


def stored_run(directory: Path, metrics: Sequence[str]) -> SideRun:
    """A run directory as the gate sees it. Raises MeasurementError for a metric that does not exist."""
    try:
        return SideRun.of(load_manifest(directory), write_summary(directory), metrics, directory)
    except KeyError as error:
        raise MeasurementError(f"there is no metric {error}") from error


def _so_far(comparison: Comparison) -> str:
    return ", ".join(
        f"{metric.name} {metric.change.value:+.1f} {metric.change_unit}"
        for metric in comparison.gated
        if metric.change.value == metric.change.value
    )

"""Live pairs for the gate: which side runs when, on a fresh launch, until `reports.compare` has decided.

Pairs alternate A B, B A, …, so that a drift of the machine hits both sides alike.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from loadgen import runner
from loadgen.config import BenchConfig
from loadgen.errors import MeasurementError
from loadgen.interrupts import Interrupted
from loadgen.progress import Progress
from loadgen.target import LaunchedTarget
from reports.compare import CompareOptions, Comparison, Pair, SideRun, judge, metrics_needed
from reports.results import load_manifest
from reports.summary import write_summary
from reports.validity import Level

# An invalid run says nothing about its side; it is made once more.
ATTEMPTS = 2


@dataclass(frozen=True, slots=True)
class Side:
    """One side of a comparison: a name for people and the command that starts its server."""

    letter: str
    label: str
    command: str


Measure = Callable[[Side, Path], SideRun]


@dataclass(frozen=True, slots=True)
class GateResult:
    """What the pairs say, and the exit code: the comparison's own, or that of the signal which ended it."""

    comparison: Comparison
    exit_code: int


@dataclass(frozen=True, slots=True)
class Gate:
    """How pairs are run: where they are kept, how they are judged, and when it has taken too long."""

    out: Path
    options: CompareOptions
    progress: Progress
    max_minutes: float | None = None

    def run(self, sides: tuple[Side, Side], measure: Measure) -> "GateResult":
        """Run pairs until every gated metric is decided, their number or the time is spent, or a signal comes.

        Raises MeasurementError when a side does not start, Interrupted when signalled twice.
        """
        deadline_s = time.monotonic() + 60 * self.max_minutes if self.max_minutes else None
        pairs: list[Pair] = []
        comparison = judge(pairs, self.options)
        for number in range(1, self.options.looks[-1] + 1):
            try:
                pairs.append(self._pair(number, sides, measure))
            except Interrupted as interrupted:
                if interrupted.is_urgent:
                    raise
                self.progress.say(f"interrupted; judging the {len(pairs)} pairs there are")
                return GateResult(comparison, interrupted.exit_code)
            comparison = judge(pairs, self.options)
            if comparison.refusals:
                break
            self.progress.say(f"pair {number}: {_so_far(comparison)}")
            if number >= self.options.looks[0] and comparison.is_decided:
                break
            if deadline_s is not None and time.monotonic() > deadline_s:
                self.progress.say(f"{self.max_minutes:g} minutes are up")
                break
        return GateResult(comparison, comparison.exit_code)

    def _pair(self, number: int, sides: tuple[Side, Side], measure: Measure) -> Pair:
        order = sides if number % 2 else tuple(reversed(sides))
        runs = {side.letter: self._valid_run(number, side, measure) for side in order}
        return Pair(runs[sides[0].letter], runs[sides[1].letter])

    def _valid_run(self, number: int, side: Side, measure: Measure) -> SideRun:
        for attempt in range(ATTEMPTS):
            name = f"pair{number:02d}-{side.letter}" + (f"-again{attempt}" if attempt else "")
            self.progress.say(f"pair {number}, {side.letter.upper()}: {side.label}")
            run = measure(side, self.out / name)
            if run.status != Level.INVALID:
                break
            self.progress.say(f"  invalid: {'; '.join(run.reasons)}")
        return run


def live_measure(load: BenchConfig, options: CompareOptions, progress: Progress) -> Measure:
    """Measures a side by launching its command, loading it and stopping it; the run stays in its directory."""
    names = metrics_needed(options)

    def measure(side: Side, directory: Path) -> SideRun:
        launched = LaunchedTarget(
            side.command,
            directory / "server.log",
            ready_timeout_s=load.ready_timeout,
            api=load.api,
            api_key=load.api_key.get_secret_value() if load.api_key else None,
        )
        labelled = load.model_copy(update={"label": side.label})
        with launched as target:
            runner.run(labelled, target, directory, progress)
            died = launched.process.exit_code
        if died is not None:
            raise MeasurementError(f"{side.label} ended with exit code {died} during its run; log in {directory}")
        return stored_run(directory, names)

    return measure


def stored_run(directory: Path, metrics: Sequence[str]) -> SideRun:
    """A run directory as the gate sees it. Raises MeasurementError for a metric that does not exist."""
    try:
        return SideRun.of(load_manifest(directory), write_summary(directory), metrics)
    except KeyError as error:
        raise MeasurementError(f"there is no metric {error}") from error


def _so_far(comparison: Comparison) -> str:
    return ", ".join(
        f"{metric.name} {metric.change.value:+.1f} {metric.change_unit}"
        for metric in comparison.gated
        if metric.change.value == metric.change.value
    )

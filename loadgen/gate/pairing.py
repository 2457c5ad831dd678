"""Live runs for the gate: pairs of runs, each on a restarted server, until `reports.gate.compare` has decided.

Pairs alternate A B, B A, …, so that machine drift affects both sides equally. `tgi-bench noise` and comparisons with a
stored baseline run one side alone.
"""

import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from loadgen import runner
from loadgen.config.bench_config import BenchConfig
from loadgen.errors import MeasurementError
from loadgen.gate.sides import LiveSide, RunningServer
from loadgen.interrupts import Interrupted
from loadgen.progress import ProgressDisplay
from reports.gate.compare import CompareOptions, Comparison, judge
from reports.gate.side_run import GateRefusal, Pair, SideRun
from reports.metrics.summary import analyse_run
from reports.metrics.validity import Level
from reports.run_store import load_manifest, write_manifest

# An invalid run is repeated once.
ATTEMPTS = 2


Measure = Callable[[LiveSide, Path], SideRun]


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
        return cls(comparison, code, tuple(pair.a for pair in pairs), tuple(pair.b for pair in pairs))


@dataclass(frozen=True, slots=True)
class Gate:
    """Runs pairs: where they are stored, how they are judged, and the time limit."""

    out: Path
    options: CompareOptions
    progress: ProgressDisplay
    max_minutes: float | None = None

    def run(self, sides: tuple[LiveSide, LiveSide], measure: Measure) -> "GateResult":
        """Run pairs until every gated metric is decided, a limit on pairs or time is reached, or a signal arrives.

        A side that does not start also ends it; the comparison then has a refusal. Raises Interrupted on a second
        signal.
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
            self.progress.show(f"pair {number}: {_changes(comparison)}")
            if number >= self.options.looks[0] and comparison.is_decided:
                break
            if deadline_s is not None and time.monotonic() > deadline_s:
                self.progress.show(f"time limit of {self.max_minutes:g} minutes reached")
                break
        return GateResult.of_pairs(comparison, pairs)

    def run_alone(self, side: LiveSide, count: int, measure: Measure) -> "SideRuns":
        """`count` runs of one side; fewer at the time limit or after a signal. Raises MeasurementError."""
        deadline_s = time.monotonic() + 60 * self.max_minutes if self.max_minutes else None
        runs: list[SideRun] = []
        for number in range(1, count + 1):
            try:
                runs.append(self._valid_run(f"run{number:02d}", f"run {number}", side, measure))
            except Interrupted as interrupted:
                if interrupted.is_urgent:
                    raise
                self.progress.show(f"interrupted after {len(runs)} runs")
                return SideRuns(tuple(runs), interrupted.exit_code)
            if runs[-1].status == Level.INVALID:
                break
            if deadline_s is not None and time.monotonic() > deadline_s:
                self.progress.show(f"time limit of {self.max_minutes:g} minutes reached")
                break
        return SideRuns(tuple(runs))

    def _pair(self, number: int, sides: tuple[LiveSide, LiveSide], measure: Measure) -> Pair:
        order = sides if number % 2 else tuple(reversed(sides))
        runs = {
            side.letter: self._valid_run(
                f"pair{number:02d}-{side.letter}", f"pair {number}, {side.letter.upper()}", side, measure
            )
            for side in order
        }
        return Pair(runs[sides[0].letter], runs[sides[1].letter])

    def _valid_run(self, name: str, shown: str, side: LiveSide, measure: Measure) -> SideRun:
        for attempt in range(ATTEMPTS):
            self.progress.show(f"{shown}: {side.label}")
            run = measure(side, self.out / (name + (f"-again{attempt}" if attempt else "")))
            if run.status != Level.INVALID:
                break
            self.progress.show(f"  invalid: {'; '.join(run.reasons)}")
        return run


@dataclass(frozen=True, slots=True)
class SideRuns:
    """The runs of one side; `exit_code` is that of the signal that ended them early."""

    runs: tuple[SideRun, ...]
    exit_code: int | None = None

    @property
    def is_valid(self) -> bool:
        return all(run.status != Level.INVALID for run in self.runs)


def live_measure(load: BenchConfig, metrics: Sequence[str], progress: ProgressDisplay) -> Measure:
    """A function that starts a side's server, runs the load and stops the server; the run stays in its directory.

    Both runs of a pair send the same texts, unless a side's server is not restarted: it would know them.
    """
    base = secrets.token_hex(8)

    def measure(side: LiveSide, directory: Path) -> SideRun:
        directory.mkdir(parents=True, exist_ok=True)
        salt = load.salt or (
            None if isinstance(side.server, RunningServer) else f"{base}:{directory.name.split('-')[0]}"
        )
        labelled = load.model_copy(update={"label": side.label, "salt": salt})
        exit_code = None
        with side.server.open(load, directory / "server.log") as target:
            runner.measure(labelled, target, directory, progress)
            if target.process is not None:
                exit_code = target.process.exit_code
        if exit_code is not None:
            raise MeasurementError(f"{side.label} ended with exit code {exit_code} during its run; log in {directory}")
        if side.identity:
            manifest = load_manifest(directory)
            write_manifest(directory, replace(manifest, labels={**manifest.labels, **side.identity}))
        return stored_run(directory, metrics)

    return measure


def stored_run(directory: Path, metrics: Sequence[str]) -> SideRun:
    """The metrics of a run directory. Raises MeasurementError for an unknown metric."""
    try:
        return SideRun.of(load_manifest(directory), analyse_run(directory).summary, metrics, directory)
    except KeyError as error:
        raise MeasurementError(f"unknown metric {error}") from error


def _changes(comparison: Comparison) -> str:
    return ", ".join(
        f"{metric.name} {metric.change.value:+.1f} {metric.change_unit}"
        for metric in comparison.gated
        if metric.change.value == metric.change.value
    )

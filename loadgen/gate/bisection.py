"""Bisects a line of revisions: builds each revision once, makes the runs that the statistics need, stores each run.

The runs are in `bisect.json`, which is written after each of them. The builds are in the same folder. The same command
continues from both.
"""

import json
import math
import shlex
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from loadgen.config.bench_config import BenchConfig
from loadgen.errors import MeasurementError, UsageError
from loadgen.gate.live_runs import Measure
from loadgen.gate.sides import CommandServer, LiveSide, open_side, read_side
from loadgen.progress import ProgressDisplay
from loadgen.target.launched.launch import split_command
from loadgen.target.launched.revision import Revision, check_out, first_parents, remove_check_out
from reports.gate.change_point import Bisection, BisectionOutcome, Conclusion, RevisionMeasurement
from reports.gate.side_run import direction_of, find_refusals
from reports.metrics.requests.per_request import Direction
from reports.metrics.titles import value_text
from reports.run_store import write_json

STATE_FILE = "bisect.json"
ATTEMPTS = 2
TREE = "{tree}"


@dataclass(frozen=True, slots=True)
class RevisionRun:
    """One run of one revision. value: the metric; directory: relative to the bisection's."""

    commit: str
    value: float
    directory: str


@dataclass(frozen=True, slots=True)
class Question:
    """A bisection: its metric, load and server, and the commits from the good end to the bad end by first parents."""

    commits: tuple[str, ...]
    metric: str
    load: Mapping[str, Any]
    server: str | None

    @classmethod
    def of(cls, good: str, bad: str, metric: str, load: BenchConfig, server: str | None) -> "Question":
        """Raises UsageError for unknown revisions, or if GOOD is not an ancestor of BAD."""
        commits = first_parents(Revision.find(good), Revision.find(bad))
        return cls(tuple(commits), metric, json.loads(json.dumps(load.resolved(), default=str)), server)


@dataclass(slots=True)
class BisectionRuns:
    """The stored state of a bisection: its question and the runs made so far, in order."""

    question: Question
    runs: list[RevisionRun] = field(default_factory=list)

    @classmethod
    def open(cls, directory: Path, question: Question) -> "BisectionRuns":
        """The state in a directory, or a new one. Raises UsageError if it belongs to another question."""
        path = directory / STATE_FILE
        if not path.exists():
            return cls(question)
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            stored = Question(**{**content["question"], "commits": tuple(content["question"]["commits"])})
            runs = [RevisionRun(**run) for run in content["runs"]]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UsageError(f"{path} is not the state of a bisection ({error}); choose another --out") from error
        different = [name for name, value in asdict(question).items() if asdict(stored)[name] != value]
        if different:
            raise UsageError(
                f"{path} belongs to another bisection (different: {', '.join(different)}); choose another --out"
            )
        return cls(question, runs)

    def write(self, directory: Path) -> None:
        content = {"question": asdict(self.question), "runs": [asdict(run) for run in self.runs]}
        write_json(directory / STATE_FILE, content)

    def measurements(self) -> list[RevisionMeasurement]:
        """Logs of the metric, with the sign that makes higher values worse."""
        sign = 1.0 if direction_of(self.question.metric) is Direction.LOWER else -1.0
        index = {commit: number for number, commit in enumerate(self.question.commits)}
        return [RevisionMeasurement(index[run.commit], sign * math.log(run.value)) for run in self.runs]


@dataclass(frozen=True, slots=True)
class Bisector:
    """Makes the runs of a bisection. Each revision is checked out and built once.

    The builds stay in `out`, by commit, until the bisection has its conclusion: the same command uses them again after
    an interruption.
    """

    out: Path
    load: BenchConfig
    bisection: Bisection
    progress: ProgressDisplay

    def run(self, state: BisectionRuns, measure: Measure) -> Conclusion:
        """Run until the conclusion. Raises MeasurementError if a revision cannot be built or measured."""
        sides: dict[str, LiveSide] = {}
        with ExitStack() as stack:
            while not isinstance(chosen := self.bisection.next(state.measurements()), Conclusion):
                for number in chosen:
                    commit = state.question.commits[number]
                    if commit not in sides:
                        sides[commit] = self._open(commit, state.question.server, stack)
                    state.runs.append(self._measured(commit, sides[commit], state, measure))
                    state.write(self.out)
        if chosen.outcome is not BisectionOutcome.UNDECIDED:
            self._remove_builds(state)
        return chosen

    def _remove_builds(self, state: BisectionRuns) -> None:
        for commit in state.question.commits:
            if self._source(commit).exists():
                remove_check_out(Revision.find(commit), self._source(commit))

    def _source(self, commit: str) -> Path:
        return self.out / f"source-{commit[:12]}"

    def _measured(self, commit: str, side: LiveSide, state: BisectionRuns, measure: Measure) -> RevisionRun:
        for attempt in range(ATTEMPTS):
            name = f"run{len(state.runs) + 1:02d}-{commit[:12]}" + (f"-again{attempt}" if attempt else "")
            run = measure(side, self.out / name)
            value = run.values.get(state.question.metric)
            refusals, _ = find_refusals([(commit[:12], run)])
            if not refusals and value is not None and value > 0:
                self.progress.show(
                    f"run {len(state.runs) + 1}: {commit[:12]}: {value_text(state.question.metric, value)}"
                )
                return RevisionRun(commit, value, name)
            problem = refusals[0].message if refusals else f"{state.question.metric} has no value"
            self.progress.show(f"  {problem}")
        raise MeasurementError(f"{ATTEMPTS} runs of {commit[:12]} gave no value: {problem}; see {self.out / name}")

    def _open(self, commit: str, server: str | None, stack: ExitStack) -> LiveSide:
        if server is None:
            spec = read_side(commit[:12], f"git:{commit}", commit[:12])
            return open_side(spec, self.load, self.out, stack, self.progress, is_build_kept=True)
        tree = stack.enter_context(check_out(Revision.find(commit), self._source(commit), is_kept=True))
        words = tuple(word.replace(TREE, str(tree)) for word in split_command(server))
        return LiveSide(commit[:12], commit[:12], CommandServer(words), {"commit": commit})


def subject(commit: str) -> str:
    """The first line of a commit's message."""
    done = subprocess.run(["git", "log", "-1", "--format=%s", commit], capture_output=True, text=True, check=False)
    return done.stdout.strip()


def check_server(server: str | None) -> None:
    """Raises UsageError for a server command that does not depend on the revision."""
    if server is not None and TREE not in server:
        raise UsageError(f"`server` is {shlex.quote(server)} but must contain {TREE}, the checkout of a revision")


def relative_change(state: BisectionRuns, first_changed: int) -> float:
    """The metric's change at a revision: geometric mean from it on over that before it, less 1."""
    index = {commit: number for number, commit in enumerate(state.question.commits)}
    logs: tuple[list[float], list[float]] = ([], [])
    for run in state.runs:
        logs[index[run.commit] >= first_changed].append(math.log(run.value))
    before, after = (sum(values) / len(values) for values in logs)
    return math.exp(after - before) - 1


def rows(state: BisectionRuns) -> Sequence[Mapping[str, Any]]:
    """Per measured revision, in order: commit, subject, number of runs, mean of the metric."""
    values: dict[str, list[float]] = {}
    for run in state.runs:
        values.setdefault(run.commit, []).append(run.value)
    return [
        {
            "revision": commit[:12],
            "runs": len(values[commit]),
            state.question.metric: f"{sum(values[commit]) / len(values[commit]):.4g}",
            "subject": subject(commit)[:60],
        }
        for commit in state.question.commits
        if commit in values
    ]

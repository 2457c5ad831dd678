"""The Python API: a measurement, a sweep and a comparison as function calls.

Keyword arguments are the flags of the command with underscores, with the same defaults, checks and exceptions. Nothing
is printed, and no call ends the process. The load is made by a process of its own, so locust is not imported here.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import pandas as pd

from loadgen.call_words import parse_call, words_of
from loadgen.commands import compare as compare_command
from loadgen.commands import run as run_command
from loadgen.commands import sweep as sweep_command
from loadgen.commands.shared_flags import load_config
from loadgen.errors import UsageError
from loadgen.progress import progress_to
from reports.gate.comparison import Comparison
from reports.gate.decide import GateDecision
from reports.metrics.checks.findings import Level
from reports.metrics.summary import Analysis, analyse_run, metric_value
from reports.metrics.sweep import Sweep
from reports.pages.comparison_page import metrics_table
from reports.pages.run_page import build_run_report
from reports.pages.sweep_page import points_table
from reports.renderers.write import write_report
from reports.run_store import RunDirectoryError

OnLine = Callable[[str], object]
"""Receives each line of progress, without a line feed."""


@dataclass(frozen=True, slots=True)
class Run:
    """A finished run: its directory, and its analysis."""

    directory: Path
    analysis: Analysis

    @classmethod
    def load(cls, directory: str | Path) -> Self:
        """The run of a directory, as `measure` or `tgi-bench run` wrote it. Raises UsageError if it is none."""
        try:
            return cls(Path(directory), analyse_run(Path(directory)))
        except RunDirectoryError as error:
            raise UsageError(str(error)) from error

    @property
    def summary(self) -> dict[str, Any]:
        """The content of summary.json."""
        return self.analysis.summary

    @property
    def requests(self) -> pd.DataFrame:
        """A row for each request, in the order of their start, with its metrics; times in seconds or ns."""
        return self.analysis.measured.requests

    @property
    def verdict(self) -> Level:
        """Whether the measurement is valid, degraded or invalid; `summary["verdict"]` has the reasons."""
        return Level(self.summary["verdict"]["status"])

    def value(self, metric: str) -> float | None:
        """A metric by its name in limits, `ttft_p95_ms` or `output_tokens_per_s`. Raises KeyError."""
        return metric_value(self.summary, metric, self.analysis.run.manifest.is_open_loop)

    def report(self, path: str | Path | None = None) -> Path:
        """Write the report into a directory, by default that of the run. Returns the path of report.html."""
        return write_report(build_run_report([self.analysis]), Path(path or self.directory)).html


@dataclass(frozen=True, slots=True)
class SweepResult:
    """Measured loads of one server: a run for each."""

    directory: Path
    sweep: Sweep

    @property
    def runs(self) -> Mapping[float, Run]:
        """The first run at each load."""
        found = {point.load: point.first for point in self.sweep.points}
        return {load: Run(each.run.directory or self.directory, each) for load, each in found.items()}

    @property
    def points(self) -> pd.DataFrame:
        """A row for each load, as in the report."""
        return points_table(self.sweep)


@dataclass(frozen=True, slots=True)
class ComparisonResult:
    """The comparison of two sides. `exit_code` is that of `tgi-bench compare`."""

    directory: Path
    comparison: Comparison
    exit_code: int

    @property
    def verdict(self) -> GateDecision:
        return self.comparison.verdict

    @property
    def metrics(self) -> pd.DataFrame:
        """A row for each metric, as in the report: both sides, the change with its interval, the decision."""
        return metrics_table(self.comparison)


def measure(*, progress: OnLine | None = None, **settings: Any) -> Run:
    """One run, as `tgi-bench run` makes it. settings: those of a load, `config`, `out`.

    Raises UsageError for a wrong setting, MeasurementError if nothing can be measured.
    """
    words = words_of(settings)
    args = parse_call(run_command.add_flags, words)
    config = load_config(args)
    distribution = run_command.distribution_of(args, config)
    display = progress_to(progress)
    with run_command.new_run_directory(args.out) as out:
        run_command.measure_server(config, distribution, out, ["run", *words], display)
        return Run.load(out)


def sweep(points: str | Sequence[float], *, progress: OnLine | None = None, **settings: Any) -> SweepResult:
    """Several loads on one server, as `tgi-bench sweep` measures them. points: loads, or a grid such as "1..64"."""
    text = points if isinstance(points, str) else ",".join(f"{point:g}" for point in points)
    words = words_of({"points": text, **settings})
    args = parse_call(sweep_command.add_flags, words)
    measured, _, out = sweep_command.measure_sweep(args, ["sweep", *words], progress_to(progress))
    return SweepResult(out, measured)


def compare(a: str, b: str, *, progress: OnLine | None = None, **settings: Any) -> ComparisonResult:
    """Judge whether B is slower than A, as `tgi-bench compare` does. a, b: sides, such as `git:main` or a URL."""
    words = words_of(settings, (a, b))
    args = parse_call(compare_command.add_flags, words)
    measured = compare_command.measure_comparison(args, ["compare", *words], progress_to(progress))
    return ComparisonResult(measured.directory, measured.result.comparison, measured.result.exit_code)

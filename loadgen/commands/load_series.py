"""Several loads on one server, as `sweep` and `search` run them: a run directory for each, and one report."""

import argparse
import contextlib
import functools
import json
import textwrap
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from loadgen.capacity.point_load import Point
from loadgen.capacity.point_time import PointTime
from loadgen.commands.present import COLUMNS, render_table
from loadgen.commands.shared_flags import add_load_flags, load_config
from loadgen.config import parsing
from loadgen.config.arrival_settings import RATE_MODES
from loadgen.config.bench_config import BenchConfig
from loadgen.config.durations import parse_duration
from loadgen.config.profiles import with_profile
from loadgen.errors import UsageError
from loadgen.progress import ProgressDisplay, add_verbosity_flags
from loadgen.run_directory import make_run_directory, new_run_id
from loadgen.runner import measure
from loadgen.target.open_target import open_target
from loadgen.target.target import Target
from reports.document import Report, VerdictLine
from reports.metrics.summary import Analysis, analyse_run
from reports.metrics.sweep import Sweep
from reports.pages.run_pages import write_run_page
from reports.pages.sweep_page import build_sweep_report, points_table, sweep_json, verdict
from reports.renderers.write import write_report
from reports.run_store import SCHEMA_VERSION, write_json

SWEEP_FILE = "sweep.json"
DEFAULT_MAX_POINT_S = 300.0


def add_series_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--attainment",
        type=float,
        metavar="SHARE",
        default=0.95,
        help="Fraction of requests that must meet every --slo. Default 0.95.",
    )
    parser.add_argument(
        "--max-point-time",
        metavar="TIME",
        help="Longest measurement of a load: it continues after --duration until it has enough requests. "
        f"Default {DEFAULT_MAX_POINT_S / 60:g}m. With --requests no load is measured longer.",
    )
    parser.add_argument("--cool-down", metavar="TIME", default="2s", help="Pause between two loads. Default 2s.")
    parser.add_argument("--out", type=Path, metavar="DIR", help="Directory of the series. Default runs/<id>.")
    parser.add_argument("--json", action="store_true", help="Print sweep.json instead of the table.")
    add_load_flags(parser)
    add_verbosity_flags(parser)


@dataclass(frozen=True, slots=True)
class SeriesResult:
    """The content of `sweep.json`, the runs, and the report. `build` is called once the pages of the runs exist."""

    content: Mapping[str, Any]
    analyses: Sequence[Analysis]
    build: Callable[[], Report]
    verdict: VerdictLine
    table: pd.DataFrame


@dataclass(frozen=True, slots=True)
class LoadSeries:
    """Loads on one server. `quantity` is the config field that differs between them: `concurrency` or `rate`."""

    load: BenchConfig
    quantity: str
    target: Target
    out: Path
    progress: ProgressDisplay
    time: PointTime

    def measure(self, point: Point, *, shares_stream: bool) -> Analysis:
        """One run, which goes on until it has the requests it needs."""
        return self.measure_as(self.load, point, point.name, shares_stream=shares_stream)

    def measure_as(self, load: BenchConfig, point: Point, name: str, *, shares_stream: bool = True) -> Analysis:
        """One run of another load than that of the series, in a directory of this name."""
        self.progress.show(name)
        directory = self.out / name
        measure(point.load(load, self.time, shares_stream=shares_stream), self.target, directory, self.progress)
        analysis = analyse_run(directory)
        time.sleep(self.time.cool_down_s)
        return analysis

    def report(self, sweep: Sweep, *, is_json: bool) -> str:
        """Write the report of all loads; returns the text for stdout."""
        analyses = [analysis for point in sweep.points for analysis in point.analyses]
        content, build = sweep_json(sweep), functools.partial(build_sweep_report, sweep)
        return self.write(SeriesResult(content, analyses, build, verdict(sweep), points_table(sweep)), is_json=is_json)

    def write(self, result: SeriesResult, *, is_json: bool) -> str:
        """Write `sweep.json`, the page of each run and the report, which links to them; returns the text for stdout."""
        self.progress.place(None)
        content = {"schema_version": SCHEMA_VERSION, **result.content}
        write_json(self.out / SWEEP_FILE, content)
        self.progress.show(f"writing the pages of {len(result.analyses)} runs")
        for analysis in result.analyses:
            write_run_page(analysis)
        report = write_report(result.build(), self.out)
        self.progress.show(f"report: {report.html}")
        if is_json:
            return json.dumps(content, indent=2, allow_nan=False)
        return render_series(result.verdict, result.table)


def render_series(verdict: VerdictLine, points: pd.DataFrame) -> str:
    """The verdict and the table of the points, as text."""
    lines = (f"{verdict.word}. {verdict.sentence}", *verdict.reasons)
    table = points.drop(columns="Requests/s ↑", errors="ignore")
    return "\n".join((*(textwrap.fill(line, COLUMNS) for line in lines), "", render_table(table)))


def series_load(args: argparse.Namespace, first: float) -> tuple[BenchConfig, str]:
    """The load of a command line at its first point, and the config field that the points set. Raises UsageError."""
    given = {name: value for name, value in vars(args).items() if value is not None}
    mode = with_profile((parsing.read_toml(args.config) if args.config else {}) | given).get("mode", "closed")
    quantity = "rate" if mode in RATE_MODES else "concurrency"
    if mode != "closed" and mode not in RATE_MODES:
        raise UsageError(f"`mode` is {mode!r} but must be closed or one of {', '.join(RATE_MODES)} to vary the load")
    value = getattr(args, quantity)
    if value is not None:
        raise UsageError(f"`{quantity}` is {value} but this command sets it for every run; leave it out")
    if not 0 < args.attainment < 1:
        raise UsageError(f"`attainment` is {args.attainment:g} but must be between 0 and 1")
    if quantity == "concurrency" and first != int(first):
        raise UsageError(f"the load {first:g} is not a whole number of users")
    return load_config(args, **{quantity: f"{first:g}"}), quantity


def check_quantity(named: str, config: BenchConfig, quantity: str) -> None:
    """Raises UsageError if `--points` names another load setting than that of the mode."""
    if named != quantity:
        raise UsageError(f"`points` sets {named}, but the load of mode {config.mode!r} is {quantity}")


@contextlib.contextmanager
def open_series(
    args: argparse.Namespace,
    config: BenchConfig,
    quantity: str,
    progress: ProgressDisplay,
    claim: Callable[[Path], bool] | None = None,
    *,
    opens_target: bool = True,
) -> Iterator[LoadSeries]:
    """The series of a command line; its server is started once for all loads, unless `opens_target` is false.

    `claim` marks the directory for a series that may be continued, and returns whether it was marked before.
    """
    point_time = _point_time(args, config)
    out: Path = args.out or Path("runs") / new_run_id()
    make_run_directory(out)
    is_continued = claim is not None and claim(out)
    if (out / SWEEP_FILE).exists() and not is_continued:
        raise UsageError(f"{out} already holds a series; choose another --out or remove it")
    if not opens_target:
        yield LoadSeries(config, quantity, Target(""), out, progress, point_time)
        progress.place(None)
        return
    if config.url is None:
        progress.show(f"starting {config.server or config.model_id}; log: {out / 'server.log'}")
    try:
        with open_target(config, out / "server.log") as target:
            yield LoadSeries(config, quantity, target, out, progress, point_time)
    finally:
        progress.place(None)


def _point_time(args: argparse.Namespace, config: BenchConfig) -> PointTime:
    """The times of a command line. Raises UsageError."""
    least_s = config.duration_s or 0.0
    most_s = _seconds(args, "max_point_time") if args.max_point_time else max(DEFAULT_MAX_POINT_S, least_s)
    if most_s < least_s:
        raise UsageError(f"`max_point_time` is {args.max_point_time} but `duration` is {least_s:g}s, which is longer")
    return PointTime(least_s, most_s, config.warmup_s, _seconds(args, "cool_down"))


def _seconds(args: argparse.Namespace, name: str) -> float:
    value = getattr(args, name)
    try:
        return float(str(parse_duration(value)))
    except ValueError as error:
        raise UsageError(f"`{name}` is {value!r}: {error}") from error

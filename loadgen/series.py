"""`tgi-bench sweep` and `search`: several loads on one server, a run directory for each, and one report."""

import argparse
import contextlib
import json
import math
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from loadgen import settings
from loadgen.bisection import Bisection
from loadgen.config import BenchConfig
from loadgen.errors import MeasurementError, UsageError
from loadgen.modes import RATE_MODES
from loadgen.objectives import objectives_of
from loadgen.present import render_table
from loadgen.progress import Progress, open_progress
from loadgen.runner import make_run_directory, new_run_id, run
from loadgen.target import Target, open_target
from reports.report import write_built
from reports.results import SCHEMA_VERSION, SUMMARY_FILE, load_run, write_json
from reports.summary import Analysis
from reports.sweep import LoadPoint, Standing
from reports.sweep_report import Sweep, build_sweep_report, points_table, sweep_json, verdict

SWEEP_FILE = "sweep.json"
MAX_POINTS = 64
DEFAULT_FACTOR = 2.0
# How often the run of an undecided point is made again before its share decides as it stands.
EXTENSIONS = 2
PASS, FAIL, NOT_DECIDED, COULD_NOT_MEASURE = 0, 1, 3, 4


@dataclass(frozen=True, slots=True)
class Series:
    """Loads on one server. `quantity` is the field of the config that they set."""

    load: BenchConfig
    quantity: str
    target: Target
    out: Path
    progress: Progress
    cool_down_s: float

    def measure(self, load: float, attempt: int = 0) -> Analysis:
        """One run at a load; its directory is named after the load."""
        directory = self.out / (f"{self.quantity}-{load:g}" + (f"-again{attempt}" if attempt else ""))
        self.progress.say(f"{self.quantity} {load:g}" + (" again" if attempt else ""))
        value = round(load) if self.quantity == "concurrency" else load
        config = BenchConfig.model_validate(
            self.load.model_dump() | {self.quantity: value, "label": self.load.label or f"{self.quantity} {load:g}"}
        )
        run(config, self.target, directory, self.progress)
        analysis = Analysis.of(load_run(directory))
        write_json(directory / SUMMARY_FILE, analysis.summary)
        time.sleep(self.cool_down_s)
        return analysis


def run_sweep(given: argparse.Namespace, arguments: Sequence[str]) -> tuple[str, int]:
    """Measure every point and write the report; returns the text for stdout and the exit code."""
    loads = parse_points(given.points)
    config, quantity = load_of(given, loads[0])
    order = list(loads)
    if given.order == "random":
        random.Random(f"order:{config.seed}").shuffle(order)
    with open_series(given, config, quantity) as series:
        measured = {load: LoadPoint(load, (series.measure(load),)) for load in order}
        points = tuple(measured[load] for load in loads)
        sweep = Sweep(quantity, points, given.attainment, ("tgi-bench", *arguments), order=tuple(order))
        code = COULD_NOT_MEASURE if sweep.invalid else PASS
        return _finish(sweep, series, given.json), code


def run_search(given: argparse.Namespace, arguments: Sequence[str]) -> tuple[str, int]:
    """Bisect, and write the report; returns the text for stdout and the exit code."""
    config, quantity = load_of(given, given.low)
    if not config.slo:
        raise UsageError("`slo` is needed by search: what the load must keep to")
    if not 0 < given.low < given.high:
        raise UsageError(f"`low` is {given.low:g} and `high` {given.high:g}, but must be 0 < low < high")
    if not 0 < given.tolerance <= 100:
        raise UsageError(f"`tolerance` is {given.tolerance:g} but must be above 0 and at most 100 percent")
    bisection = Bisection(given.low, given.high, given.tolerance / 100, is_whole=quantity == "concurrency")
    with open_series(given, config, quantity) as series:
        search = Search(series, bisection, given.attainment, given.max_runs)
        search.run()
        points = tuple(sorted(search.points.values(), key=lambda point: point.load))
        code, sentence = search.outcome()
        told = ("valid" if code == PASS else "invalid", sentence)
        sweep = Sweep(quantity, points, given.attainment, ("tgi-bench", *arguments), told, tuple(search.points))
        return _finish(sweep, series, given.json), code


@dataclass(slots=True)
class Search:
    """A bisection whose points are runs; an undecided point is run again and its requests are pooled."""

    series: Series
    bisection: Bisection
    target: float
    max_runs: int
    points: dict[float, LoadPoint] = field(default_factory=dict)
    undecided: list[float] = field(default_factory=list)

    @property
    def runs(self) -> int:
        return sum(len(point.analyses) for point in self.points.values())

    def run(self) -> None:
        """Until it is decided, or the runs are spent. Raises MeasurementError when a load cannot be measured."""
        while self.runs < self.max_runs and (load := self.bisection.next_load()) is not None:
            point = self._measure(load)
            standing, share = point.standing(self.target), point.attainment
            assert share is not None, "a search has objectives"
            if standing is Standing.UNDECIDED:
                self.undecided.append(load)
            is_within = standing is Standing.WITHIN or (standing is Standing.UNDECIDED and share.value >= self.target)
            self.series.progress.say(f"  {share.value:.1%} ({share.lo:.1%}-{share.hi:.1%}) within: {standing}")
            self.bisection.tell(load, is_within=is_within)

    def _measure(self, load: float) -> LoadPoint:
        point = LoadPoint(load, ())
        for attempt in range(EXTENSIONS + 1):
            point = LoadPoint(load, (*point.analyses, self.series.measure(load, attempt)))
            self.points[load] = point
            if not point.is_valid:
                reasons = point.analyses[-1].summary["verdict"]["reasons"]
                raise MeasurementError(
                    f"{self.series.quantity} {load:g} could not be measured: {reasons[0]['message']}; "
                    f"the runs so far are in {self.series.out}"
                )
            if point.standing(self.target) is not Standing.UNDECIDED or self.runs >= self.max_runs:
                break
        return point

    def outcome(self) -> tuple[int, str]:
        """The exit code and what was found, as a sentence."""
        found, unit = self.bisection.within, "users" if self.series.quantity == "concurrency" else "requests/s"
        wanted = f"{self.target:.0%} of requests within the objectives"
        if self.bisection.next_load() is not None:
            return NOT_DECIDED, f"Not decided after {self.runs} runs; {found or 0:g} {unit} kept {wanted}."
        if found is None:
            return FAIL, f"Even {self.bisection.low:g} {unit} did not keep {wanted}."
        doubt = " Too few requests to be sure of it." if found in self.undecided else ""
        if self.bisection.beyond is None:
            return PASS, f"Even the highest load, {found:g} {unit}, kept {wanted}.{doubt}"
        return (
            PASS,
            f"{found:g} {unit} is the highest load that kept {wanted}; {self.bisection.beyond:g} did not.{doubt}",
        )


def load_of(given: argparse.Namespace, first: float) -> tuple[BenchConfig, str]:
    """The load of a command line with its first point filled in, and the field that points set. Raises UsageError."""
    values = vars(given) | {}
    mode = values.get("mode") or (settings.read_toml(given.config).get("mode") if given.config else None) or "closed"
    quantity = "rate" if mode in RATE_MODES else "concurrency"
    if mode != "closed" and mode not in RATE_MODES:
        raise UsageError(f"`mode` is {mode!r} but only closed and {', '.join(RATE_MODES)} have a load to vary")
    if values.get(quantity) is not None:
        raise UsageError(f"`{quantity}` is {values[quantity]} but is what the points of the series say")
    if not 0 < given.attainment < 1:
        raise UsageError(f"`attainment` is {given.attainment:g} but must lie between 0 and 1")
    if quantity == "concurrency" and first != int(first):
        raise UsageError(f"{first:g} users are no whole number")
    config = settings.load(BenchConfig, values | {quantity: f"{first:g}"}, given.config)
    objectives_of(config.slo)
    return config, quantity


@contextlib.contextmanager
def open_series(given: argparse.Namespace, config: BenchConfig, quantity: str) -> Iterator[Series]:
    """The target of a series, started once for all loads."""
    from loadgen.durations import parse_duration

    try:
        cool_down_s = float(str(parse_duration(given.cool_down)))
    except ValueError as error:
        raise UsageError(f"`cool_down` is {given.cool_down!r}: {error}") from error
    out: Path = given.out or Path("runs") / new_run_id()
    make_run_directory(out)
    if (out / SWEEP_FILE).exists():
        raise UsageError(f"{out} holds a series already; give another --out or remove it")
    progress = open_progress()
    if config.url is None:
        progress.say(f"starting {config.server or config.model_id}, log in {out / 'server.log'}")
    try:
        with open_target(config, out / "server.log") as target:
            yield Series(config, quantity, target, out, progress, cool_down_s)
    finally:
        progress.close()


def _finish(sweep: Sweep, series: Series, is_json: bool) -> str:
    """Write the report; returns the text for stdout."""
    content: dict[str, Any] = {"schema_version": SCHEMA_VERSION, **sweep_json(sweep)}
    write_json(series.out / SWEEP_FILE, content)
    report = write_built(build_sweep_report(sweep), series.out)
    series.progress.say(f"report: {report.html}")
    if is_json:
        return json.dumps(content, indent=2, allow_nan=False)
    line = verdict(sweep)
    return "\n".join((f"{line.word}. {line.sentence}", *line.reasons, "", render_table(points_table(sweep))))


def parse_points(text: str) -> list[float]:
    """Loads in ascending order, of a list or a geometric grid that ends at its upper bound. Raises UsageError.

    >>> parse_points("4,1,16"), parse_points("1..10"), parse_points("2..9:1.5")
    ([1.0, 4.0, 16.0], [1.0, 2.0, 4.0, 8.0, 10.0], [2.0, 3.0, 4.5, 6.75, 9.0])
    """
    try:
        points = _grid(text) if ".." in text else [float(word) for word in text.split(",")]
    except ValueError:
        points = []
    points = sorted(set(points))
    if not 2 <= len(points) <= MAX_POINTS or points[0] <= 0 or not math.isfinite(points[-1]):
        raise UsageError(
            f"`points` is {text!r}: give 2 to {MAX_POINTS} loads as 1,4,16 or a grid as 1..64 or 1..64:1.5"
        )
    return points


def _grid(text: str) -> list[float]:
    bounds, _, step = text.partition(":")
    low, high = (float(bound) for bound in bounds.split(".."))
    factor = float(step) if step else DEFAULT_FACTOR
    if not 0 < low < high or factor < 1.01:
        raise ValueError(text)
    points: list[float] = []
    while low < high * 0.999 and len(points) < MAX_POINTS:
        points.append(round(low, 6))
        low *= factor
    return [*points, high]

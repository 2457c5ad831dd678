"""`tgi-bench search`: the highest load that meets the objectives, by bisection."""

import argparse
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from loadgen.commands.load_series import LoadSeries, add_series_flags, open_series, series_load
from loadgen.errors import MeasurementError, UsageError
from reports.metrics.summary import Analysis
from reports.metrics.sweep import LoadPoint, SloDecision, Sweep

# An undecided point is measured this many times more before its attainment alone decides.
EXTENSIONS = 2
PASS, FAIL, INCONCLUSIVE = 0, 1, 3


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--low", type=float, required=True, metavar="LOAD", help="A load that meets the objectives.")
    parser.add_argument("--high", type=float, required=True, metavar="LOAD", help="A load that misses them.")
    parser.add_argument(
        "--tolerance", metavar="PERCENT", type=float, default=5.0, help="Precision of the result. Default 5."
    )
    parser.add_argument("--max-runs", type=int, metavar="N", default=20, help="Maximum number of runs. Default 20.")
    add_series_flags(parser)


def run(args: argparse.Namespace, words: Sequence[str]) -> int:
    config, quantity = series_load(args, args.low)
    if not config.slo:
        raise UsageError("`slo` is required by search: give at least one objective")
    if not 0 < args.low < args.high:
        raise UsageError(f"`low` is {args.low:g} and `high` is {args.high:g} but must be 0 < low < high")
    if not 0 < args.tolerance <= 100:
        raise UsageError(f"`tolerance` is {args.tolerance:g} but must be above 0 and at most 100 percent")
    bisection = Bisection(args.low, args.high, args.tolerance / 100, is_whole=quantity == "concurrency")
    with open_series(args, config, quantity) as series:
        search = LoadSearch(series, bisection, args.attainment, args.max_runs)
        search.run()
        points = tuple(sorted(search.points.values(), key=lambda point: point.load))
        exit_code, sentence = search.outcome()
        outcome = ("valid" if exit_code == PASS else "invalid", sentence)
        sweep = Sweep(quantity, points, args.attainment, ("tgi-bench", *words), outcome, tuple(search.points))
        print(series.report(sweep, is_json=args.json))
        return exit_code


@dataclass(slots=True)
class LoadSearch:
    """A bisection over runs. An undecided point is run again and its requests are pooled."""

    series: LoadSeries
    bisection: "Bisection"
    target: float
    max_runs: int
    points: dict[float, LoadPoint] = field(default_factory=dict)
    undecided: list[float] = field(default_factory=list)

    @property
    def num_runs(self) -> int:
        return sum(len(point.analyses) for point in self.points.values())

    def run(self) -> None:
        """Measure until decided, or until `max_runs`. Raises MeasurementError when a load cannot be measured."""
        while self.num_runs < self.max_runs and (load := self.bisection.next_load()) is not None:
            point = self._measure(load)
            standing, share = point.slo_decision(self.target), point.attainment
            assert share is not None, "a search has objectives"
            if standing is SloDecision.UNDECIDED:
                self.undecided.append(load)
            is_within = standing is SloDecision.WITHIN or (
                standing is SloDecision.UNDECIDED and share.value >= self.target
            )
            self.series.progress.show(f"  {share.value:.1%} ({share.lo:.1%}-{share.hi:.1%}) within: {standing}")
            self.bisection.record(load, is_within=is_within)

    def _measure(self, load: float) -> LoadPoint:
        analyses: list[Analysis] = []
        while True:
            analyses.append(self.series.measure(load, len(analyses)))
            point = self.points[load] = LoadPoint(load, tuple(analyses))
            if not point.is_valid:
                reasons = analyses[-1].summary["verdict"]["reasons"]
                raise MeasurementError(
                    f"{self.series.quantity} {load:g} could not be measured: {reasons[0]['message']}; "
                    f"the runs so far are in {self.series.out}"
                )
            is_decided = point.slo_decision(self.target) is not SloDecision.UNDECIDED
            if is_decided or len(analyses) > EXTENSIONS or self.num_runs >= self.max_runs:
                return point

    def outcome(self) -> tuple[int, str]:
        """The exit code, and the result as a sentence."""
        found, unit = self.bisection.within, "users" if self.series.quantity == "concurrency" else "requests/s"
        goal = f"{self.target:.0%} of requests within the objectives"
        if self.bisection.next_load() is not None:
            return INCONCLUSIVE, f"Not decided after {self.num_runs} runs; {found or 0:g} {unit} kept {goal}."
        if found is None:
            return FAIL, f"Even {self.bisection.low:g} {unit} did not keep {goal}."
        doubt = " Too few requests to be sure." if found in self.undecided else ""
        if self.bisection.beyond is None:
            return PASS, f"Even the highest load, {found:g} {unit}, kept {goal}.{doubt}"
        return (
            PASS,
            f"{found:g} {unit} is the highest load that kept {goal}; {self.bisection.beyond:g} did not.{doubt}",
        )


@dataclass(slots=True)
class Bisection:
    """The next load to try between `low` and `high`: both ends, then geometric middles.

    Ends when the best load within and the lowest beyond differ by `tolerance` (relative), or by 1 if `is_whole`.
    """

    low: float
    high: float
    tolerance: float
    is_whole: bool
    within: float | None = None
    beyond: float | None = None
    is_over: bool = field(default=False, init=False)

    def next_load(self) -> float | None:
        """The load to try; None once decided."""
        if self.is_over:
            return None
        if self.within is None:
            return self.low
        if self.beyond is None:
            return None if self.within >= self.high else self.high
        if self.beyond <= self.within * (1 + self.tolerance):
            return None
        middle = math.sqrt(self.within * self.beyond)
        if self.is_whole:
            middle = float(round(middle))
        return middle if self.within < middle < self.beyond else None

    def record(self, load: float, *, is_within: bool) -> None:
        """Record whether a load met the objectives."""
        if is_within:
            self.within = max(load, self.within or 0.0)
        else:
            self.beyond = min(load, self.beyond or math.inf)
            # Loads below `low` are not searched.
            self.is_over = self.within is None

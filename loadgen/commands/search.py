"""`tgi-bench search`: the highest load that meets the objectives, with its interval."""

import argparse
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from loadgen.capacity.point_load import Point
from loadgen.capacity.search_policy import CapacitySearch, SearchGoal
from loadgen.capacity.search_result import search_result
from loadgen.commands.load_series import LoadSeries, add_series_flags, open_series, series_load
from loadgen.config.objectives import objectives_of
from loadgen.errors import MeasurementError, UsageError
from loadgen.progress import progress_of
from loadgen.terminal.progress_line import Position
from reports.document import format_percent
from reports.metrics.checks.findings import Level
from reports.metrics.judged_objectives import objective_text
from reports.metrics.summary import Analysis, metric_value
from reports.metrics.sweep import SHORT_OF_REQUESTS, LoadPoint, Sweep
from reports.stats.capacity import RunEvidence


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--low",
        type=float,
        required=True,
        metavar="LOAD",
        help="A load that meets the objectives: users in mode closed, requests/s in modes with a rate.",
    )
    parser.add_argument(
        "--high",
        type=float,
        required=True,
        metavar="LOAD",
        help="A load that misses at least one of them, in the same unit.",
    )
    parser.add_argument(
        "--tolerance",
        metavar="PERCENT",
        type=float,
        default=5.0,
        help="End when the 95 %% interval is within ± this percentage of the result. Default 5.",
    )
    parser.add_argument("--max-runs", type=int, metavar="N", default=40, help="Maximum number of runs. Default 40.")
    add_series_flags(parser)


def run(args: argparse.Namespace, words: Sequence[str]) -> int:
    config, quantity = series_load(args, args.low)
    if not config.slo:
        raise UsageError("`slo` is required by search: give at least one objective")
    if not 0 < args.low < args.high:
        raise UsageError(f"`low` is {args.low:g} and `high` is {args.high:g} but must be 0 < low < high")
    if not 0 < args.tolerance <= 100:
        raise UsageError(f"`tolerance` is {args.tolerance:g} but must be above 0 and at most 100 percent")
    is_whole = quantity == "concurrency"
    goal = SearchGoal(args.low, args.high, args.attainment, args.tolerance / 100, is_whole, args.max_runs)
    with open_series(args, config, quantity, progress_of(args)) as series:
        measured = MeasuredSearch(series, CapacitySearch(goal, series.time))
        began_s = time.monotonic()
        measured.run()
        texts = [objective_text(each) for each in objectives_of(config.slo)]
        result = search_result(measured.search, quantity, time.monotonic() - began_s, texts)
        sweep = Sweep(
            quantity,
            measured.points,
            args.attainment,
            ("tgi-bench", *words),
            (result.level, result.sentence),
            tuple(measured.analyses),
            measured.search.capacity,
        )
        print(series.report(sweep, is_json=args.json))
        return result.exit_code


@dataclass(slots=True)
class MeasuredSearch:
    """The loop of a search: runs the loads that the policy chooses."""

    series: LoadSeries
    search: CapacitySearch
    analyses: dict[float, list[Analysis]] = field(default_factory=dict)

    def run(self) -> None:
        """Raises MeasurementError when a load cannot be measured."""
        while (load := self.search.next_load()) is not None:
            runs = self.analyses.setdefault(load, [])
            self._place()
            point = Point(self.series.quantity, load, len(runs), self.search.independent_requests)
            runs.append(self.series.measure(point, shares_stream=False))
            evidence = LoadPoint(load, tuple(runs)).evidence[-1]
            self._check(runs[-1], evidence)
            self.search = self.search.after(evidence)
            self._show(evidence)

    @property
    def points(self) -> tuple[LoadPoint, ...]:
        return tuple(LoadPoint(load, tuple(runs)) for load, runs in sorted(self.analyses.items()))

    def _check(self, analysis: Analysis, evidence: RunEvidence) -> None:
        """A run without an answer, or of something else than the server, ends the search; too few requests do not."""
        found = [reason for reason in analysis.summary["verdict"]["reasons"] if reason["level"] == Level.INVALID]
        is_broken = metric_value(analysis.summary, "error_rate", is_open_loop=False) == 1.0
        failed = [reason for reason in found if is_broken or reason["check"] not in SHORT_OF_REQUESTS]
        if failed and not evidence.is_overloaded:
            raise MeasurementError(
                f"{self.series.quantity} {evidence.load:g} could not be measured: {failed[0]['message']}; "
                f"the runs so far are in {self.series.out}"
            )

    def _place(self) -> None:
        number = sum(map(len, self.analyses.values())) + 1
        interval = self.search.capacity.interval if self.analyses else None
        is_bounded = interval is not None and math.isfinite(interval.hi - interval.lo)
        note = f"capacity {interval.lo:.3g}–{interval.hi:.3g}" if is_bounded and interval is not None else ""
        self.series.progress.place(Position("run", number, note=note))

    def _show(self, evidence: RunEvidence) -> None:
        share = f"{format_percent(evidence.share)} of {evidence.count:,} requests within the objectives"
        interval = self.search.capacity.interval
        is_bounded = math.isfinite(interval.hi - interval.lo)
        found = f"; the capacity is {interval.lo:.4g}–{interval.hi:.4g}" if is_bounded else ""
        self.series.progress.show(f"  {'overloaded' if evidence.is_overloaded else share}{found}")

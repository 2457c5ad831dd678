"""The points of a sweep over two settings: measured in any order, those that an earlier command finished read again."""

import argparse
import contextlib
import functools
import random
import shutil
from collections.abc import Sequence
from dataclasses import replace

from pydantic import ValidationError

from loadgen.capacity.load_list import parse_points
from loadgen.capacity.matrix import Matrix, MatrixPoint, claim, is_measured, parse_settings, parse_values
from loadgen.capacity.point_time import independent_requests_needed
from loadgen.commands.load_series import LoadSeries, SeriesResult, check_quantity, open_series, series_load
from loadgen.config import parsing
from loadgen.config.bench_config import BenchConfig
from loadgen.errors import UsageError
from loadgen.program import COULD_NOT_MEASURE
from loadgen.progress import progress_of
from loadgen.target.open_target import open_target
from loadgen.terminal.progress_line import Position
from reports.metrics.summary import Analysis, analyse_run
from reports.metrics.sweep import LoadPoint, Sweep
from reports.pages.matrix_page import MatrixResult, build_matrix_report, matrix_json, matrix_table, matrix_verdict


def run_matrix(args: argparse.Namespace, words: Sequence[str]) -> int:
    """Measure every point that is not measured yet; one report for all."""
    (quantity, loads), (setting, values) = parse_settings(args.points)
    matrix = Matrix(quantity, parse_points(loads), setting, parse_values(setting, values))
    config = _first_load(args, matrix)
    cells = list(matrix.cells(independent_requests_needed(args.attainment if config.slo else None)))
    if matrix.is_of_server and config.url is not None:
        raise UsageError(f"`points` sets {matrix.setting}, but `url` names a server that already runs; give --server")
    check_points(config, cells)
    with (
        open_series(
            args,
            config,
            quantity,
            progress_of(args),
            lambda out: claim(out, matrix.plan(config)),
            opens_target=not matrix.is_of_server,
        ) as series,
        contextlib.ExitStack() as launched,
    ):
        reused = [cell for cell in cells if is_measured(series.out / cell.name)]
        if reused:
            series.progress.show(f"{len(reused)} of {len(cells)} points are measured already")
        order, last = [cell for cell in cells if cell not in reused], ""
        if args.order == "random":
            random.Random(f"order:{config.seed}").shuffle(order)
        if matrix.is_of_server:
            # One launch for each value; the values keep their random order.
            launches = list(dict.fromkeys(cell.value for cell in order))
            order.sort(key=lambda cell: launches.index(cell.value))
        found = {cell: _analyse(series, cell) for cell in reused}
        for number, cell in enumerate(order, start=len(reused) + 1):
            series.progress.place(Position("point", number, len(cells)))
            if matrix.is_of_server and (number == len(reused) + 1 or cell.value != last):
                launched.close()
                series = _with_server(series, cell, launched)
            last = cell.value
            found[cell] = _measure(series, cell)
        series.progress.place(None)
        facets, command = _facets(matrix, found, args), ("tgi-bench", *words)
        result = MatrixResult(setting, facets, command, len(reused), matrix.is_of_server)
        print(_report(series, result, is_json=args.json))
    return COULD_NOT_MEASURE if any(sweep.invalid for _, sweep in result.facets) else 0


def _first_load(args: argparse.Namespace, matrix: Matrix) -> BenchConfig:
    """The load of the first point. Raises UsageError."""
    if getattr(args, matrix.setting, None) is not None:
        raise UsageError(f"`{matrix.setting}` is set, but --points sets it for every run; leave it out")
    setattr(args, matrix.setting, matrix.values[0])
    config, quantity = series_load(args, matrix.loads[0])
    check_quantity(matrix.quantity, config, quantity)
    return config


def check_points(config: BenchConfig, cells: Sequence[MatrixPoint]) -> None:
    """Raises UsageError for a value that does not fit, before anything is measured."""
    for cell in cells:
        try:
            cell.load(config)
        except ValidationError as error:
            raise UsageError(parsing.describe(error, BenchConfig)) from error


def _with_server(series: LoadSeries, cell: MatrixPoint, launched: contextlib.ExitStack) -> LoadSeries:
    """The series on a server that is launched with the value of a cell."""
    config = cell.load(series.load)
    log = series.out / cell.name.partition("/")[0] / "server.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    series.progress.show(f"starting {config.server}; log: {log}")
    return replace(series, target=launched.enter_context(open_target(config, log)))


def _measure(series: LoadSeries, cell: MatrixPoint) -> Analysis:
    directory = series.out / cell.name
    if directory.exists():
        series.progress.show(f"{cell.name}: not finished, measured again")
        shutil.rmtree(directory)
    return series.measure_as(cell.load(series.load), cell.point, cell.name)


def _analyse(series: LoadSeries, cell: MatrixPoint) -> Analysis:
    return analyse_run(series.out / cell.name)


def _facets(
    matrix: Matrix, found: dict[MatrixPoint, Analysis], args: argparse.Namespace
) -> tuple[tuple[str, Sweep], ...]:
    """A sweep for each value of the setting."""
    by_name = {(cell.value, cell.point.amount): analysis for cell, analysis in found.items()}
    return tuple(
        (
            value,
            Sweep(
                matrix.quantity,
                tuple(LoadPoint(load, (by_name[value, load],)) for load in matrix.loads),
                args.attainment,
            ),
        )
        for value in matrix.values
    )


def _report(series: LoadSeries, result: MatrixResult, *, is_json: bool) -> str:
    """Write the report of all points; returns the text for stdout."""
    analyses = [point.first for _, sweep in result.facets for point in sweep.points]
    content, build = matrix_json(result), functools.partial(build_matrix_report, result)
    found = SeriesResult(content, analyses, build, matrix_verdict(result), matrix_table(result))
    return series.write(found, is_json=is_json)

"""`tgi-bench sweep`: listed loads on one server."""

import argparse
import random
from collections.abc import Sequence
from pathlib import Path

from loadgen.capacity.load_list import parse_points
from loadgen.capacity.matrix import split_load
from loadgen.capacity.point_load import Point
from loadgen.capacity.point_time import independent_requests_needed
from loadgen.commands.load_series import add_series_flags, check_quantity, open_series, series_load
from loadgen.commands.matrix_sweep import run_matrix
from loadgen.program import COULD_NOT_MEASURE
from loadgen.progress import ProgressDisplay, progress_of
from loadgen.terminal.progress_line import Position
from reports.metrics.sweep import LoadPoint, Sweep


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--points",
        required=True,
        action="append",
        metavar="LIST",
        help="Loads: 1,4,16 or a geometric grid 1..64 (factor 2) or 1..64:1.5. Users in mode closed, requests/s in "
        "modes with a rate; concurrency=1,4 or rate=1,4 names them. Given twice as SETTING=LIST, every load at every "
        "value of another setting: --points concurrency=1..64 --points input_tokens=128,1024; server.speculate=0,4 "
        "launches the server with each value of one of its flags. Repeated with the same --out, only what is missing "
        "is measured.",
    )
    parser.add_argument(
        "--order",
        choices=("random", "ascending"),
        default="random",
        help="Order in which the loads are measured. Default random.",
    )
    add_series_flags(parser)


def run(args: argparse.Namespace, words: Sequence[str]) -> int:
    if len(args.points) > 1 or ("=" in args.points[0] and split_load(args.points[0])[0] is None):
        return run_matrix(args, words)
    sweep, text, _ = measure_sweep(args, words, progress_of(args))
    print(text)
    return COULD_NOT_MEASURE if sweep.invalid else 0


def measure_sweep(args: argparse.Namespace, words: Sequence[str], progress: ProgressDisplay) -> tuple[Sweep, str, Path]:
    """The measured loads of a sweep over one setting, the text for stdout, and the directory of the report."""
    named, text = split_load(args.points[0])
    loads = parse_points(text)
    config, quantity = series_load(args, loads[0])
    check_quantity(named or quantity, config, quantity)
    order = list(loads)
    if args.order == "random":
        random.Random(f"order:{config.seed}").shuffle(order)
    with open_series(args, config, quantity, progress) as series:
        needed = independent_requests_needed(args.attainment if config.slo else None)
        measured = {}
        for number, load in enumerate(order, start=1):
            progress.place(Position("point", number, len(order)))
            analysis = series.measure(Point(quantity, load, needed=needed), shares_stream=True)
            measured[load] = LoadPoint(load, (analysis,))
        points = tuple(measured[load] for load in loads)
        sweep = Sweep(quantity, points, args.attainment, ("tgi-bench", *words), order=tuple(order))
        return sweep, series.report(sweep, is_json=args.json), series.out

"""`tgi-bench sweep`: listed loads on one server."""

import argparse
import math
import random
from collections.abc import Sequence

from loadgen.capacity.point_load import Point
from loadgen.capacity.point_time import independent_requests_needed
from loadgen.commands.load_series import add_series_flags, open_series, series_load
from loadgen.errors import UsageError
from loadgen.program import COULD_NOT_MEASURE
from reports.metrics.sweep import LoadPoint, Sweep

MAX_POINTS = 64
DEFAULT_FACTOR = 2.0


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--points",
        required=True,
        metavar="LIST",
        help="Loads: 1,4,16 or a geometric grid 1..64 (factor 2) or 1..64:1.5. Users in mode closed, requests/s in "
        "modes with a rate.",
    )
    parser.add_argument("--order", choices=("random", "ascending"), default="random", help="Default random.")
    add_series_flags(parser)


def run(args: argparse.Namespace, words: Sequence[str]) -> int:
    loads = parse_points(args.points)
    config, quantity = series_load(args, loads[0])
    order = list(loads)
    if args.order == "random":
        random.Random(f"order:{config.seed}").shuffle(order)
    with open_series(args, config, quantity) as series:
        needed = independent_requests_needed(args.attainment if config.slo else None)
        measured = {
            load: LoadPoint(load, (series.measure(Point(quantity, load, needed=needed), shares_stream=True),))
            for load in order
        }
        points = tuple(measured[load] for load in loads)
        sweep = Sweep(quantity, points, args.attainment, ("tgi-bench", *words), order=tuple(order))
        print(series.report(sweep, is_json=args.json))
        return COULD_NOT_MEASURE if sweep.invalid else 0


def parse_points(text: str) -> list[float]:
    """Loads in ascending order, from a list or a geometric grid that ends at its upper bound. Raises UsageError.

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

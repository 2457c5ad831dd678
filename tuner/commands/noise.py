"""`tgi-tune noise`: measures the run-to-run deviation of the defaults."""

import argparse
import json
from collections.abc import Sequence

from loadgen.program import Command
from loadgen.progress import add_verbosity_flags, progress_of
from tuner.commands.study_flags import add_study_flags, opened, print_plan
from tuner.study.prepare_study import prepare


def add_noise_flags(parser: argparse.ArgumentParser) -> None:
    add_study_flags(parser)
    add_verbosity_flags(parser)


def measure_noise(args: argparse.Namespace, _words: Sequence[str]) -> int:
    """Exit code 3 if fewer than two runs were measured."""
    from tuner.study.statistics.noise_floor import render

    prepared = prepare(args)
    if args.dry_run:
        return print_plan(prepared)
    with opened(prepared, progress_of(args)) as search:
        floor = search.measure_noise()
    metric, confirming = search.objective.maximize, prepared.config.confirm
    rounds, finalists = confirming.rounds, confirming.finalists
    deviations = dict(floor.deviations) if floor is not None else {}
    if args.json:
        smallest = floor.smallest_gain(metric, rounds, finalists) if floor is not None else None
        print(json.dumps({"runs": floor.runs if floor else 0, "deviations": deviations, "smallest_gain": smallest}))
    else:
        print(render(floor, metric, rounds, finalists))
        for name, deviation in deviations.items():
            print(f"  {name:>24}  {100 * deviation:5.1f} %")
    return 0 if floor is not None else 3


EXAMPLES = ("--noise-runs 6", "space.toml", "--model-id preset:llama-125m --concurrency 8")
COMMAND = Command(
    "Measure the deviation of each metric between equal launches.", add_noise_flags, measure_noise, EXAMPLES
)

"""`tgi-tune simulate validate`: compares predictions with launches to which the cost model was not fitted.

Each launch of a study is predicted from its other launches. New launches are predicted before they start.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from loadgen.config import parsing
from loadgen.errors import UsageError
from tuner.commands.simulation.simulate_inputs import TOO_POOR, newest_cost, render_table
from tuner.commands.simulation.simulate_outside import add_outside_flags, validate_url
from tuner.config import TuneConfig
from tuner.simulator.fitting.cost_file import COST_FILE, read_costs
from tuner.study.prepare_study import PreparedStudy, load_of, stored, with_implied
from tuner.study.space_file import read_space

if TYPE_CHECKING:
    from tuner.simulator.validate import PredictedLaunch
    from tuner.study.statistics.noise_floor import NoiseFloor

FEWEST_LAUNCHES = 3
DEFAULT_CONFIGS, VALIDATION = 8, "validation"


def add_validate_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "space", nargs="?", type=Path, metavar="SPACE.toml", help="Space file: new configurations of it are launched."
    )
    parser.add_argument(
        "--study", metavar="NAME", help="Study whose held-out launches are compared. Default: the newest."
    )
    parser.add_argument(
        "--configs",
        type=int,
        metavar="N",
        help="Number of new configurations to launch. Default: 8 with a space file, otherwise none.",
    )
    parser.add_argument(
        "--cost", type=Path, metavar="FILE", help="File of step costs. Default: that of the study, or the newest."
    )
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help="Folder to write the new launches to. Default validation/."
    )
    parser.add_argument(
        "--seed", type=int, default=0, metavar="N", help="Seed of the choice of configurations. Default 0."
    )
    parser.add_argument(
        "--repeats", type=int, default=3, metavar="N", help="With --url: number of runs of each load. Default 3."
    )
    add_outside_flags(parser)


def validate(args: argparse.Namespace) -> int:
    """Exit code 3 if there are too few launches, or if the grade of a metric is `refuse`."""
    if args.url is not None:
        return validate_url(args)
    is_stored = args.space is None and args.configs is None
    launches, noise = _launches_of_study(args) if is_stored else _new_launches(args)
    if len(launches) < FEWEST_LAUNCHES:
        print(f"only {len(launches)} launches can be compared: {FEWEST_LAUNCHES} are needed", file=sys.stderr)
        return TOO_POOR
    return _print_errors(launches, noise, is_json=args.json)


def _launches_of_study(args: argparse.Namespace) -> "tuple[list[PredictedLaunch], NoiseFloor | None]":
    from tuner.simulator.validate import LEDGER_FILE, compared_predictions, held_out, traced_launches, write_ledger
    from tuner.study.study_folder import TRIALS, StudyFolder

    prepared = stored(args.study)
    files = StudyFolder(prepared.folder)
    results = files.results(TRIALS)
    launches = held_out(traced_launches(prepared.folder, results, prepared.load), prepared.load)
    if len(launches) >= FEWEST_LAUNCHES:
        write_ledger(prepared.folder / LEDGER_FILE, compared_predictions(results, launches))
    return launches, files.noise()


def _new_launches(args: argparse.Namespace) -> "tuple[list[PredictedLaunch], NoiseFloor | None]":
    """Launch configurations of a space file, or of a study without a file."""
    from loadgen.progress import progress_of
    from tuner.servers.select import server_of
    from tuner.simulator.new_launches import launch_new
    from tuner.simulator.validate import LEDGER_FILE, compared_predictions, write_ledger
    from tuner.study.study_folder import TRIALS, StudyFolder
    from tuner.trial.evaluate import TrialSetup

    count = DEFAULT_CONFIGS if args.configs is None else args.configs
    if count < 1:
        raise UsageError(f"--configs is {count}, but must be at least 1")
    folder = args.out or Path(VALIDATION)
    if args.space is not None:
        config = parsing.load(TuneConfig, read_space(args.space))
        load = load_of(config)
        prepared, files = PreparedStudy(with_implied(config, load), load, folder), None
    else:
        prepared = stored(args.study)
        files = StudyFolder(prepared.folder)
    own = prepared.folder / COST_FILE
    costs = read_costs(args.cost or (own if files is not None and own.exists() else newest_cost()))
    section = prepared.config.server
    setup = TrialSetup(prepared.load, section.ready_timeout_s, progress_of(args), server_of(section))
    seen = files.results(TRIALS) if files is not None else ()
    launches = launch_new(prepared, costs, folder, count, setup, seen=seen, seed=args.seed)
    if launches:
        write_ledger(folder / LEDGER_FILE, compared_predictions((), launches))
    return launches, files.noise() if files is not None else None


def _print_errors(launches: "Sequence[PredictedLaunch]", noise: "NoiseFloor | None", *, is_json: bool) -> int:
    """Print the errors of each metric with its grade."""
    from tuner.simulator.prediction_accuracy import Grade
    from tuner.simulator.validate import NAMES, summary

    found = summary(launches)
    grades = {name: errors.grade(name, (noise.of(name) if noise else None) or 0.0) for name, errors in found.items()}
    rows = [
        {
            f"{name} {kind}": values[name]
            for name in NAMES
            for kind, values in (("measured", each.measured), ("predicted", each.predicted))
        }
        for each in launches
    ]
    if is_json:
        settings = [dict(each.settings) for each in launches]
        table = [{"settings": values, **row} for values, row in zip(settings, rows, strict=True)]
        errors_by_name = {name: {**asdict(errors), "grade": grades[name]} for name, errors in found.items()}
        print(json.dumps({"launches": table, "errors": errors_by_name}, indent=2))
    else:
        print(render_table(rows))
        for name, errors in found.items():
            text = f"median {errors.median:.1%}  p90 {errors.p90:.1%}  level {errors.level:+.1%}"
            print(f"{name:<22}{text}  shape {errors.shape:.1%}  {grades[name]}")
    return TOO_POOR if Grade.REFUSE in grades.values() else 0

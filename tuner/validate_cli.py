"""`tgi-tune simulate validate`: predicted against measured, on launches that the cost model has not seen."""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from loadgen import settings
from loadgen.errors import UsageError
from tuner.config import TuneConfig
from tuner.costs import read_costs
from tuner.guide import Grade
from tuner.noise import NoiseFloor
from tuner.prepare import Prepared, load_of, stored, with_derived_lengths
from tuner.simulate_inputs import COST_FILE, TOO_POOR, newest_cost, render_table
from tuner.study_folder import TRIALS, StudyFolder
from tuner.validate import LEDGER_FILE, NAMES, Held, expectations, held_out, launched_in, summary, write_ledger

FEWEST_HELD_OUT = 3
DEFAULT_CONFIGS, VALIDATION = 8, "validation"


def validate(given: argparse.Namespace) -> int:
    """Launched configurations of a study predicted from the others' traces, or new ones predicted, then launched."""
    held, noise = _held_out(given) if given.space is None and given.configs is None else _unseen(given)
    if len(held) < FEWEST_HELD_OUT:
        print(f"{len(held)} launches can be held out; {FEWEST_HELD_OUT} are needed", file=sys.stderr)
        return TOO_POOR
    return _judged(held, noise, is_json=given.json)


def _held_out(given: argparse.Namespace) -> tuple[list[Held], NoiseFloor | None]:
    prepared = stored(given.study)
    files = StudyFolder(prepared.folder)
    results = files.results(TRIALS)
    held = held_out(launched_in(prepared.folder, results, prepared.load), prepared.load)
    if len(held) >= FEWEST_HELD_OUT:
        write_ledger(prepared.folder / LEDGER_FILE, expectations(results, held))
    return held, files.noise()


def _unseen(given: argparse.Namespace) -> tuple[list[Held], NoiseFloor | None]:
    """Launches of a space file's configurations; without a file, of those that the study has not launched."""
    from loadgen.progress import open_progress
    from tuner.evaluate import Bench
    from tuner.unseen import launch_unseen

    count = DEFAULT_CONFIGS if given.configs is None else given.configs
    if count < 1:
        raise UsageError(f"--configs is {count}, but at least 1 is launched")
    folder = given.out or Path(VALIDATION)
    if given.space is not None:
        config = settings.load(TuneConfig, settings.read_toml(given.space))
        load = load_of(config)
        prepared, files = Prepared(with_derived_lengths(config, load), load, folder), None
    else:
        prepared = stored(given.study)
        files = StudyFolder(prepared.folder)
    own = prepared.folder / COST_FILE
    costs = read_costs(given.cost or (own if files is not None and own.exists() else newest_cost()))
    server = prepared.config.server
    bench = Bench(prepared.load, server.ready_timeout_s, open_progress(), server)
    seen = files.results(TRIALS) if files is not None else ()
    held = launch_unseen(prepared, costs, folder, count, bench, seen=seen, seed=given.seed)
    if held:
        write_ledger(folder / LEDGER_FILE, expectations((), held))
    return held, files.noise() if files is not None else None


def _judged(held: Sequence[Held], noise: NoiseFloor | None, *, is_json: bool) -> int:
    """Print errors with their grades; 3 where a grade refuses."""
    found = summary(held)
    grades = {name: errors.grade(name, (noise.of(name) if noise else None) or 0.0) for name, errors in found.items()}
    rows = [
        {
            f"{name} {kind}": values[name]
            for name in NAMES
            for kind, values in (("measured", e.measured), ("predicted", e.predicted))
        }
        for e in held
    ]
    if is_json:
        print(
            json.dumps(
                {
                    "launches": [{"settings": dict(e.settings), **row} for e, row in zip(held, rows, strict=True)],
                    "errors": {name: {**asdict(errors), "grade": grades[name]} for name, errors in found.items()},
                },
                indent=2,
            )
        )
    else:
        print(render_table(rows))
        for name, errors in found.items():
            told = f"median {errors.median:.1%}  p90 {errors.p90:.1%}  level {errors.level:+.1%}"
            print(f"{name:<22}{told}  shape {errors.shape:.1%}  {grades[name]}")
    return TOO_POOR if Grade.REFUSE in grades.values() else 0

"""`tgi-tune simulate validate`: predicted against measured, on launches that the cost model has not seen."""

import argparse
import json
import sys

from tuner.simulate_inputs import TOO_POOR, render_table

FEWEST_HELD_OUT = 3


def add_validate_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--study", metavar="NAME", help="Whose launches are held out. Default the newest.")


def validate(given: argparse.Namespace) -> int:
    """Each launched configuration of a study, predicted from the traces of the others."""
    from dataclasses import asdict

    from tuner.guide import Grade
    from tuner.prepare import stored
    from tuner.study_folder import TRIALS, StudyFolder
    from tuner.validate import LEDGER_FILE, NAMES, expectations, held_out, launched_in, summary, write_ledger

    prepared = stored(given.study)
    results = StudyFolder(prepared.folder).results(TRIALS)
    held = held_out(launched_in(prepared.folder, results, prepared.load), prepared.load)
    if len(held) < FEWEST_HELD_OUT:
        print(f"{len(held)} launches can be held out; {FEWEST_HELD_OUT} are needed", file=sys.stderr)
        return TOO_POOR
    write_ledger(prepared.folder / LEDGER_FILE, expectations(results, held))
    found = summary(held)
    noise = StudyFolder(prepared.folder).noise()
    grades = {name: errors.grade(name, (noise.of(name) if noise else None) or 0.0) for name, errors in found.items()}
    rows = [
        {
            f"{name} {kind}": values[name]
            for name in NAMES
            for kind, values in (("measured", e.measured), ("predicted", e.predicted))
        }
        for e in held
    ]
    if given.json:
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

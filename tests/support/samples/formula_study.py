"""A search whose server is a formula, in its own process: `python -m tests.support.samples.formula_study FOLDER`.

Every launch is a line of `launches.log`, next to the folder. With --kill-at STEP it ends itself by SIGKILL there, in
trial --kill-in: asked, launching, measuring, written, told.
"""

import argparse
import os
import signal
import sys
import time
from pathlib import Path

from tests.tuner.studies import FormulaServer, open_search
from tuner.space.configuration import key_of
from tuner.study.optuna_study import OptunaStudy
from tuner.study.search_worker import run_search
from tuner.trial.measure import Measurer

STEPS = ("asked", "launching", "measuring", "written", "told")


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--storage", default="journal")
    parser.add_argument("--trials", type=int, default=8)
    parser.add_argument("--worker", action="store_true")
    parser.add_argument("--pause-s", type=float, default=0.0)
    parser.add_argument("--meet", action="store_true", help="Wait in the third launch for the worker's first.")
    parser.add_argument("--kill-at", choices=STEPS)
    parser.add_argument("--kill-in", type=int, default=4)
    args = parser.parse_args()
    formula = FormulaServer()
    log = args.folder.parent / "launches.log"
    met = args.folder.parent / "met"
    count = 0

    def note(line: str) -> None:
        with log.open("a") as file:
            file.write(f"{line}\n")

    def die(step: str) -> None:
        if args.kill_at == step and count == args.kill_in:
            os.kill(os.getpid(), signal.SIGKILL)

    def evaluate(settings, setup, directory):
        nonlocal count
        count += 1
        key = key_of(settings)
        die("launching")
        note(f"begin {key} {os.getpid()} {time.time()}")
        die("measuring")
        if args.worker:
            met.touch()
        while args.meet and count == 3 and not met.exists():
            time.sleep(0.02)
        time.sleep(args.pause_s)
        outcome = formula(settings, setup, directory)
        note(f"end {key} {os.getpid()} {time.time()}")
        return outcome

    tell, measure = OptunaStudy.tell, Measurer.measure

    def dying_measure(self, *arguments, **named):
        if args.kill_at == "asked" and count + 1 == args.kill_in:
            os.kill(os.getpid(), signal.SIGKILL)
        return measure(self, *arguments, **named)

    def dying_tell(self, *arguments, **named):
        die("written")
        tell(self, *arguments, **named)
        die("told")

    OptunaStudy.tell, Measurer.measure = dying_tell, dying_measure
    search = open_search(
        args.folder,
        evaluate,
        is_leader=not args.worker,
        trials=args.trials,
        storage=args.storage,
        sampler="tpe",
    )
    run_search(search)
    return 0


if __name__ == "__main__":
    sys.exit(main())

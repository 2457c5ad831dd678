"""A search in a process of its own, whose server is a formula: `python -m tests.support.formula_study FOLDER …`.

Every launch is a line of `launches.log` beside the folder. With --kill-at STEP it ends itself by SIGKILL there, in
trial --kill-in: asked, launching, measuring, written, told.
"""

import argparse
import os
import signal
import sys
import time
from pathlib import Path

from tests.tuner.studies import FormulaServer, open_search
from tuner.measure import Measurer
from tuner.resolve import key_of
from tuner.study import Study

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
    given = parser.parse_args()
    formula = FormulaServer()
    log = given.folder.parent / "launches.log"
    met = given.folder.parent / "met"
    count = 0

    def note(line: str) -> None:
        with log.open("a") as file:
            file.write(f"{line}\n")

    def die(step: str) -> None:
        if given.kill_at == step and count == given.kill_in:
            os.kill(os.getpid(), signal.SIGKILL)

    def evaluate(config, bench, directory):
        nonlocal count
        count += 1
        key = key_of(config.model_dump(mode="json", exclude_defaults=True))
        die("launching")
        note(f"begin {key} {os.getpid()} {time.time()}")
        die("measuring")
        if given.worker:
            met.touch()
        while given.meet and count == 3 and not met.exists():
            time.sleep(0.02)
        time.sleep(given.pause_s)
        outcome = formula(config, bench, directory)
        note(f"end {key} {os.getpid()} {time.time()}")
        return outcome

    tell, measure = Study.tell, Measurer.measure

    def dying_measure(self, *arguments, **named):
        if given.kill_at == "asked" and count + 1 == given.kill_in:
            os.kill(os.getpid(), signal.SIGKILL)
        return measure(self, *arguments, **named)

    def dying_tell(self, *arguments, **named):
        die("written")
        tell(self, *arguments, **named)
        die("told")

    Study.tell, Measurer.measure = dying_tell, dying_measure
    search = open_search(
        given.folder,
        evaluate,
        is_leader=not given.worker,
        trials=given.trials,
        storage=given.storage,
        sampler="tpe",
    )
    search.run()
    return 0


if __name__ == "__main__":
    sys.exit(main())

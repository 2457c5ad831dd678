"""`tgi-tune dashboard`: opens a study in optuna-dashboard."""

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from shutil import which

from loadgen.errors import UsageError
from loadgen.program import Command
from loadgen.progress import SilentProgress
from tuner.commands.study_flags import add_stored_flags, opened
from tuner.study.prepare_study import stored

PROGRAM = "optuna-dashboard"


def add_dashboard_flags(parser: argparse.ArgumentParser) -> None:
    add_stored_flags(parser)
    parser.add_argument(
        "--port", type=int, default=8080, metavar="N", help="Port of the dashboard on 127.0.0.1. Default 8080."
    )
    parser.add_argument(
        "--write-only", action="store_true", help="Write the files for the dashboard without starting it."
    )


def dashboard(args: argparse.Namespace, _words: Sequence[str]) -> int:
    """Write a copy of the study as it is now, and serve it until Ctrl-C."""
    prepared = stored(args.study)
    program = which(PROGRAM, path=str(Path(sys.executable).parent)) or which(PROGRAM)
    if program is None and not args.write_only:
        raise UsageError(f"{PROGRAM} is not installed: pip install {PROGRAM}, or write its files with --write-only")
    from tuner.study.artefacts import read_verdict
    from tuner.study.dashboard_copy import ARTIFACTS, STORAGE_FILE, write_dashboard_copy
    from tuner.study.study_folder import TRIALS

    with opened(prepared, SilentProgress(), is_leader=False) as search:
        verdict = read_verdict(prepared.folder)
        facts = {"sentence": str(verdict["sentence"])} if verdict and verdict.get("sentence") else {}
        copy = write_dashboard_copy(
            prepared.folder, search.objective, search.space, search.files.results(TRIALS), facts
        )
    command = [program or PROGRAM, str(copy / STORAGE_FILE), "--artifact-dir", str(copy / ARTIFACTS)]
    command += ["--host", "127.0.0.1", "--port", str(args.port)]
    print(json.dumps({"folder": str(copy), "command": command}) if args.json else str(copy), flush=True)
    if args.write_only:
        return 0
    with subprocess.Popen(command) as process:
        try:
            return process.wait()
        except KeyboardInterrupt:
            process.terminate()
            return 130


EXAMPLES = ("", "--study nightly --port 8090", "--study nightly --write-only")
COMMAND = Command("Open a study in optuna-dashboard.", add_dashboard_flags, dashboard, EXAMPLES)

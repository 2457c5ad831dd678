"""`tgi-tune report`: writes the report of a study from its stored files."""

import argparse
import json
from collections.abc import Sequence

from loadgen.program import Command
from loadgen.progress import SilentProgress
from tuner.commands.study_flags import add_stored_flags, opened
from tuner.study.prepare_study import stored


def report(args: argparse.Namespace, _words: Sequence[str]) -> int:
    prepared = stored(args.study)
    if args.dry_run:
        print(prepared.folder / "report.html")
        return 0
    from tuner.study.study_report import write_study_report

    with opened(prepared, SilentProgress(), is_leader=False) as search:
        path = write_study_report(search)
    print(json.dumps({"report": str(path)}) if args.json else str(path))
    return 0


EXAMPLES = ("", "--study nightly", "--study nightly --json")
COMMAND = Command("Write the report of a study from its stored files.", add_stored_flags, report, EXAMPLES)

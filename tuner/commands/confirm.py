"""`tgi-tune confirm`: launches the finalists and the defaults of a study again, and prints the verdict."""

import argparse
from collections.abc import Sequence

from loadgen.errors import UsageError
from loadgen.program import Command
from loadgen.progress import add_verbosity_flags, progress_of
from tuner.commands.run import conclude
from tuner.commands.study_flags import add_stored_flags, opened, print_plan
from tuner.study.prepare_study import stored


def add_confirm_flags(parser: argparse.ArgumentParser) -> None:
    add_stored_flags(parser)
    add_verbosity_flags(parser)


def confirm(args: argparse.Namespace, _words: Sequence[str]) -> int:
    prepared = stored(args.study)
    if args.dry_run:
        return print_plan(prepared)
    from tuner.study.study_folder import StudyFolder

    with StudyFolder(prepared.folder).lock(), opened(prepared, progress_of(args)) as search:
        results = search.results()
        if not any(result.number == 0 for result in results):
            raise UsageError(f"{prepared.folder} has no measured defaults: run `tgi-tune run` first")
        return conclude(search, results, is_json=args.json)


EXAMPLES = ("", "--study nightly", "--study nightly --json")
COMMAND = Command("Launch finalists and defaults again, and print the verdict.", add_confirm_flags, confirm, EXAMPLES)

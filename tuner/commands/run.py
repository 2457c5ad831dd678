"""`tgi-tune run`: searches, confirms, and writes the result. An existing study continues."""

import argparse
import json
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from loadgen.program import Command
from loadgen.progress import add_verbosity_flags, progress_of
from tuner.commands.study_flags import add_study_flags, opened, print_plan, space_errors_of
from tuner.study.prepare_study import prepare

if TYPE_CHECKING:
    from tuner.study.study_search import StudySearch
    from tuner.trial.outcome import TrialResult


def add_search_flags(parser: argparse.ArgumentParser) -> None:
    add_study_flags(parser)
    add_verbosity_flags(parser)


def run(args: argparse.Namespace, _words: Sequence[str]) -> int:
    with space_errors_of(args.space):
        prepared = prepare(args)
        if args.dry_run:
            return print_plan(prepared)
    from tuner.study.search_worker import run_search
    from tuner.study.study_folder import StudyFolder
    from tuner.study.study_plan import plan_of, render_plan

    with space_errors_of(args.space):
        plan = render_plan(plan_of(prepared))
    with StudyFolder(prepared.folder).lock(), opened(prepared, progress_of(args)) as search:
        search.setup.progress.show(plan)
        return conclude(search, run_search(search), is_json=args.json)


def conclude(search: "StudySearch", results: Sequence["TrialResult"], *, is_json: bool) -> int:
    """Finish a study and print its verdict. Exit code 1 if no configuration meets every limit."""
    from tuner.study.finish_study import finish

    finished = finish(search, results)
    print(json.dumps(finished.verdict, indent=2) if is_json else finished.table)
    print(f"study: {search.folder}\nreport: {finished.report}", file=sys.stderr)
    return 0 if finished.verdict["winner"] is not None else 1


EXAMPLES = (
    "--quick --trials 6",
    '--model-id meta-llama/Llama-3.1-8B --concurrency 32 --slo "ttft_p95_ms < 500"',
    "space.toml --max-hours 8",
)
COMMAND = Command(
    "Search settings, confirm the best ones and write best.toml. Continues an existing study.",
    add_search_flags,
    run,
    EXAMPLES,
)

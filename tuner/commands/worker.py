"""`tgi-tune worker`: joins a study from another process or machine."""

import argparse
import sys
from collections.abc import Sequence

from loadgen.program import Command
from loadgen.progress import add_verbosity_flags, progress_of
from tuner.commands.study_flags import add_stored_flags, opened, print_plan
from tuner.study.prepare_study import stored, stored_in


def add_worker_flags(parser: argparse.ArgumentParser) -> None:
    add_stored_flags(parser)
    add_verbosity_flags(parser)
    parser.add_argument(
        "--storage",
        metavar="URL",
        help="Address of the study's storage, such as grpc://HOST:PORT. Default: the study's folder on this machine.",
    )
    parser.add_argument(
        "--allow-command",
        action="store_true",
        help="Run commands, images, volumes and paths of the study that the storage contains. Default: print them and "
        "refuse the study.",
    )


def work(args: argparse.Namespace, _words: Sequence[str]) -> int:
    """Raises StudyError if there is no study, or if results of this machine are not comparable."""
    if args.storage is None:
        prepared = stored(args.study)
    else:
        prepared = stored_in(args.storage, args.study, is_allowed=args.allow_command)
    if args.dry_run:
        return print_plan(prepared)
    from tuner.study.search_worker import run_search

    with opened(prepared, progress_of(args), is_leader=False) as search:
        results = run_search(search)
    print(f"{search.folder} has {len(results)} trials", file=sys.stderr)
    return 0


EXAMPLES = ("", "--study tiny-llama-a1b2c3d4", "--storage grpc://10.0.0.1:13000 --study nightly")
COMMAND = Command("Join a study from another process or machine.", add_worker_flags, work, EXAMPLES)

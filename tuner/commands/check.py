"""`tgi-tune check`: prints the plan of a study and its server's profile, without a launch."""

import argparse
from collections.abc import Sequence

from loadgen.program import Command
from tuner.commands.study_flags import add_study_flags, print_plan, space_errors_of
from tuner.study.prepare_study import prepare


def add_check_flags(parser: argparse.ArgumentParser) -> None:
    add_study_flags(parser)
    parser.add_argument(
        "-q", "--quiet", action="store_true", help="Print only the first line: number of launches, and hours."
    )
    parser.add_argument("-v", "--verbose", action="store_true", help="Print the settings of the load too.")


def check(args: argparse.Namespace, _words: Sequence[str]) -> int:
    from tuner.study.study_plan import headline, plan_of, render_plan

    with space_errors_of(args.space):
        prepared = prepare(args)
        if args.json or args.dry_run:
            return print_plan(prepared)
        plan = plan_of(prepared)
        print(headline(plan) if args.quiet else render_plan(plan))
        if args.verbose and not args.quiet:
            settings = prepared.load.model_dump(mode="json", exclude_defaults=True)
            print("load: " + ", ".join(f"{name} {value}" for name, value in settings.items()))
    return 0


EXAMPLES = ("space.toml", "--model-id preset:llama-125m", "--quick --trials 6")
COMMAND = Command(
    "Check a space file: its size, plan and duration, and parameters without effect.", add_check_flags, check, EXAMPLES
)

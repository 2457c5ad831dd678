"""`tgi-tune check`: the plan of a study and its server's profile; nothing is launched."""

import argparse
from collections.abc import Sequence

from loadgen.program import Command
from tuner.commands.study_flags import add_study_flags, blaming, print_plan
from tuner.study.prepare import prepare


def check(args: argparse.Namespace, _words: Sequence[str]) -> int:
    from tuner.study.study_plan import plan_of, render_plan

    with blaming(args.space):
        prepared = prepare(args)
        if args.json or args.dry_run:
            return print_plan(prepared)
        print(render_plan(plan_of(prepared)))
    return 0


EXAMPLES = ("space.toml", "--model-id preset:llama-125m", "--quick --trials 6")
COMMAND = Command("Check a space: size, plan, hours, parameters that cannot act.", add_study_flags, check, EXAMPLES)

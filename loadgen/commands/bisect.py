"""`tgi-bench bisect GOOD BAD`: finds the revision that changed a metric, in spite of noise."""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from loadgen.commands.comparison_args import unknown_metric
from loadgen.commands.present import render_table
from loadgen.commands.shared_flags import add_load_flags, load_config
from loadgen.errors import UsageError
from loadgen.gate.bisection import (
    BisectionRuns,
    Bisector,
    Question,
    check_server,
    relative_change,
    rows,
    subject,
)
from loadgen.gate.live_runs import live_measure
from loadgen.progress import add_verbosity_flags, progress_of
from loadgen.run_directory import make_run_directory, new_run_id
from loadgen.workloads.workload_files import check_files
from reports.gate.change_point import Bisection, BisectionOutcome, Conclusion
from reports.gate.side_run import direction_of
from reports.metrics.titles import metric_heading

UNDECIDED = 3
MOST_RUNS, MOST_REVISIONS = 1_000, 100


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("good", metavar="GOOD", help="Revision before the change: the good end.")
    parser.add_argument("bad", metavar="BAD", help="Revision after the change: the bad end, a descendant of GOOD.")
    parser.add_argument(
        "--metric",
        metavar="NAME",
        default="output_tokens_per_s",
        help="Metric that changed. Default output_tokens_per_s.",
    )
    parser.add_argument(
        "--server",
        dest="tree_server",
        metavar="COMMAND",
        help="Command that starts the server of a revision; {tree} is its checkout, {port} or $PORT the port. "
        "Default: this product, installed from the revision.",
    )
    parser.add_argument("--max-runs", type=int, metavar="N", default=60, help="Largest number of runs. Default 60.")
    parser.add_argument(
        "--max-revisions", type=int, metavar="N", default=10, help="Largest number of revisions to build. Default 10."
    )
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help="Directory of the runs; an interrupted bisection continues there."
    )
    parser.add_argument("--json", action="store_true", help="Print the conclusion as JSON.")
    add_load_flags(parser, ("url", "server", "label"))
    add_verbosity_flags(parser)


def run(args: argparse.Namespace, _words: Sequence[str]) -> int:
    """Bisect; returns 0 with a conclusion, 3 without one."""
    load = load_config(args)
    check_files(load)
    check_server(args.tree_server)
    for name, least, most in (("max_runs", 8, MOST_RUNS), ("max_revisions", 3, MOST_REVISIONS)):
        if not least <= getattr(args, name) <= most:
            raise UsageError(f"`{name}` is {getattr(args, name)} but must be {least} to {most}")
    try:
        direction_of(args.metric)
    except KeyError as error:
        raise unknown_metric(error) from error
    question = Question.of(args.good, args.bad, args.metric, load, args.tree_server)
    out: Path = args.out or Path("runs") / new_run_id()
    make_run_directory(out)
    state = BisectionRuns.open(out, question)
    progress = progress_of(args)
    progress.show(f"{len(question.commits)} revisions; {len(state.runs)} runs so far; {out}")
    try:
        bisection = Bisection(len(question.commits), args.max_runs, args.max_revisions)
        conclusion = Bisector(out, load, bisection, progress).run(state, live_measure(load, [args.metric], progress))
    finally:
        progress.place(None)
    if args.json:
        print(json.dumps(_conclusion_json(state, conclusion), indent=2))
    else:
        import pandas as pd

        print(render_table(pd.DataFrame(rows(state))), "", _sentence(state, conclusion), sep="\n")
    return UNDECIDED if conclusion.outcome is BisectionOutcome.UNDECIDED else 0


def _conclusion_json(state: BisectionRuns, conclusion: Conclusion) -> dict[str, object]:
    found: dict[str, object] = {"outcome": str(conclusion.outcome), "runs": len(state.runs)}
    if conclusion.first_changed is not None:
        commit = state.question.commits[conclusion.first_changed]
        change = relative_change(state, conclusion.first_changed)
        found |= {"commit": commit, "probability": conclusion.posterior.confidence, "relative_change": change}
    return found


def _sentence(state: BisectionRuns, conclusion: Conclusion) -> str:
    metric = metric_heading(state.question.metric)
    if conclusion.first_changed is not None:
        commit = state.question.commits[conclusion.first_changed]
        change = relative_change(state, conclusion.first_changed)
        return (
            f"{commit[:12]} changed {metric} by {change:+.1%} "
            f"(probability {conclusion.posterior.confidence:.1%}): {subject(commit)}"
        )
    if conclusion.outcome is BisectionOutcome.NO_DIFFERENCE:
        noise = conclusion.posterior.noise
        return f"no difference in {metric} between the two ends in {len(state.runs)} runs (noise of a run {noise:.1%})"
    return f"not decided after {len(state.runs)} runs; raise --max-runs or --duration and run the same command again"

"""The flags of the commands that judge: `compare`, `noise`, `baseline` and `history`."""

import argparse
from pathlib import Path

from loadgen import settings
from loadgen.config import BenchConfig

# Of a comparison's load: each side is a server of its own, and its label is the side's.
NOT_OF_SIDES = ("url", "server", "label")
BASELINES = Path("baselines")
HISTORY = Path("history.jsonl")
SIDE = "A side is a URL, a server's TOML file, git:REV, git:REV:FILE, image:NAME, command:COMMAND or stored:DIR."


def add_compare_flags(parser: argparse.ArgumentParser) -> None:
    """Sides, judgement and output; then every flag of a load."""
    parser.add_argument("sides", nargs="*", metavar="SIDE", help=f"A, the baseline, and B, the candidate. {SIDE}")
    parser.add_argument("--server-a", metavar="COMMAND", help="Starts side A; the same as command:COMMAND.")
    parser.add_argument("--server-b", metavar="COMMAND", help="Starts side B.")
    parser.add_argument("--against", metavar="NAME", help="Side A is this stored baseline, and SIDE is B.")
    _add_baselines_flag(parser)
    _add_history_flag(parser)
    parser.add_argument("--args-a", metavar="WORDS", help="Added to the launcher of a git, image or TOML side A.")
    parser.add_argument("--args-b", metavar="WORDS", help="Added to that of side B.")
    _add_docker_flag(parser)
    parser.add_argument("--label-a", metavar="NAME", help="Name of side A in reports. Default what it is.")
    parser.add_argument("--label-b", metavar="NAME", help="Name of side B in reports. Default what it is.")
    parser.add_argument(
        "--no-relaunch", action="store_true", help="Accept a URL as a side: it is not launched afresh for every run."
    )
    parser.add_argument("--pairs", type=int, metavar="N", help="Exactly so many pairs. Default 4 to 12, until decided.")
    parser.add_argument("--min-pairs", type=int, metavar="N", default=4, help="Pairs before the first look. Default 4.")
    parser.add_argument("--max-pairs", type=int, metavar="N", default=12, help="Pairs at most. Default 12.")
    _add_minutes_flag(parser)
    parser.add_argument(
        "--min-effect", metavar="PERCENT", default="3%", help="Smallest change of interest, 3%% at least. Default 3%%."
    )
    _add_gate_flag(parser)
    parser.add_argument(
        "--require",
        action="append",
        default=[],
        metavar="LIMIT",
        help='Limit on B: "ttft_p95_ms < 800"; repeatable.',
    )
    parser.add_argument(
        "--allow",
        action="append",
        default=[],
        metavar="DIFFERENCE",
        help='Judge runs that differ in this, such as "model" or "workload hash"; repeatable, and in the report.',
    )
    parser.add_argument(
        "--inconclusive",
        choices=("report", "pass", "fail"),
        default="report",
        help="What it returns: 3, 0 or 1.",
    )
    parser.add_argument("--junit", type=Path, metavar="FILE", help="Write JUnit XML.")
    parser.add_argument("--md", type=Path, metavar="FILE", help="Write Markdown for a comment.")
    parser.add_argument("--metrics", type=Path, metavar="FILE", help="Write GitLab's metrics report.")
    parser.add_argument("--out", type=Path, metavar="DIR", help="Directory of the comparison. Default runs/<id>.")
    parser.add_argument("--json", action="store_true", help="Print comparison.json instead of the table.")
    _add_load_flags(parser)


def add_noise_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("side", metavar="SIDE", help=SIDE)
    parser.add_argument("--args", dest="args_a", metavar="WORDS", help="Added to the launcher of a git or TOML side.")
    _add_docker_flag(parser)
    parser.add_argument("--label", dest="label_a", metavar="NAME", help="Name of the side. Default what it is.")
    parser.add_argument("--no-relaunch", action="store_true", help="Accept a URL: the server is not launched afresh.")
    parser.add_argument("--runs", type=int, metavar="N", default=6, help="Runs of the side. Default 6.")
    _add_minutes_flag(parser)
    _add_gate_flag(parser)
    parser.add_argument("--out", type=Path, metavar="DIR", help="Directory of the runs. Default runs/<id>.")
    parser.add_argument("--json", action="store_true", help="Print noise.json instead of the table.")
    _add_load_flags(parser)


def add_baseline_flags(parser: argparse.ArgumentParser) -> None:
    words = parser.add_subparsers(dest="word", metavar="bless|show|list", required=True)
    bless = words.add_parser("bless", help="Store runs under a name, on purpose.", allow_abbrev=False)
    bless.add_argument("name", metavar="NAME", help="Letters, digits, dots, dashes and underscores.")
    bless.add_argument("directories", nargs="+", type=Path, metavar="DIR", help="Run directories, or one of several.")
    bless.add_argument("--reason", required=True, metavar="TEXT", help="Why these runs are the baseline.")
    bless.add_argument("--author", metavar="NAME", help="Who says so. Default git's user.name.")
    bless.add_argument("--replace", action="store_true", help="Put it in the place of a baseline of that name.")
    show = words.add_parser("show", help="What a baseline holds.", allow_abbrev=False)
    show.add_argument("name", metavar="NAME")
    listed = words.add_parser("list", help="The baselines there are.", allow_abbrev=False)
    for each in (bless, show, listed):
        _add_baselines_flag(each)
        each.add_argument("--json", action="store_true", help="Print JSON.")


def add_history_flags(parser: argparse.ArgumentParser) -> None:
    words = parser.add_subparsers(dest="word", metavar="add|check", required=True)
    add = words.add_parser("add", help="Append the medians of runs as one commit's line.", allow_abbrev=False)
    add.add_argument("directories", nargs="+", type=Path, metavar="DIR", help="Run directories, or one of several.")
    add.add_argument("--commit", metavar="ID", help="What was measured. Default the runs' own commit.")
    check = words.add_parser("check", help="Find the commits at which a metric changed.", allow_abbrev=False)
    check.add_argument("--metric", action="append", metavar="METRIC", help="Look at this one; repeatable.")
    check.add_argument("--fail", action="store_true", help="Exit 1 on a change for the worse in the newest series.")
    for each in (add, check):
        _add_history_flag(each)
        each.add_argument("--json", action="store_true", help="Print JSON.")


def _add_load_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--dry-run", action="store_true", help="Print the server commands and the load as JSON only.")
    parser.add_argument("--config", type=Path, metavar="FILE", help="TOML file of the load; flags win over it.")
    settings.add_flags(parser, BenchConfig, leave_out=NOT_OF_SIDES)


def _add_gate_flag(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--gate", action="append", metavar="METRIC", help="Judge this metric too, such as ttft_p95_ms; repeatable."
    )


def _add_docker_flag(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--docker-args",
        metavar="WORDS",
        help='Added to docker run for an image: --docker-args="--gpus all --shm-size 1g".',
    )


def _add_minutes_flag(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--max-minutes", type=float, metavar="M", help="Judge what there is after so many minutes.")


def _add_baselines_flag(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--baselines", type=Path, metavar="DIR", default=BASELINES, help=f"Where baselines are. Default {BASELINES}."
    )


def _add_history_flag(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--history", type=Path, metavar="FILE", default=HISTORY, help=f"The table of past results. Default {HISTORY}."
    )

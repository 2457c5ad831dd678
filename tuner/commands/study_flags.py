"""Flags of several commands, and functions that open and print a study."""

import argparse
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, get_args

from loadgen.config import load_flags, parsing
from loadgen.config.bench_config import BenchConfig
from loadgen.interrupts import noted
from loadgen.progress import ProgressDisplay
from loadgen.terminal.flags import OneOf, Rare
from tuner.config import TRIALS, SamplerName, SimulatorUse
from tuner.errors import SpaceError
from tuner.servers.find_profile import known_profiles
from tuner.study.prepare_study import DEFAULT_LOAD, NOT_LOAD, PreparedStudy

if TYPE_CHECKING:
    from tuner.study.study_search import StudySearch

WHEN_STOPPED = "stopped; the same command continues the study"
SAMPLER = OneOf.of("NAME", get_args(SamplerName))
SLO = (
    'Objective of each request, such as "ttft_p95_ms < 500"; repeatable. A limit of the study if its file has none: '
    "configurations that miss it are not feasible, and goodput_rps is maximized."
)
SIMULATOR = OneOf.of("HOW", get_args(SimulatorUse))


def add_study_flags(parser: argparse.ArgumentParser) -> None:
    """The flags of every command that takes a space."""
    parser.add_argument(
        "space",
        nargs="?",
        type=Path,
        metavar="SPACE.toml",
        help="Space file: server, load, objective and searched settings (docs/space.md).",
    )
    parser.add_argument(
        "--model-id",
        metavar="ID",
        help="Model to serve: hub id, local directory or preset:NAME. Default preset:tiny-llama.",
    )
    parser.add_argument(
        "--server-profile",
        metavar=OneOf.of("NAME|FILE", known_profiles()),
        help=f"Profile of the server: {', '.join(known_profiles())}, or a TOML file.",
    )
    parser.add_argument(
        "--study", metavar="NAME", help="Folder under studies/. Default: name of the model and digest of the space."
    )
    parser.add_argument(
        "--storage",
        metavar="URL",
        help=Rare(
            "Where trials are stored: journal, journal:PATH, sqlite:PATH, postgresql://, grpc://. Default journal."
        ),
    )
    parser.add_argument(
        "--trials",
        type=int,
        metavar="N",
        help=f"Number of launches of the search, including the defaults. Default {TRIALS}.",
    )
    parser.add_argument(
        "--max-hours", type=float, metavar="H", help="Longest duration of the search, in hours. Default: no limit."
    )
    parser.add_argument(
        "--sampler",
        metavar=SAMPLER,
        help=f"Method that selects configurations: {', '.join(SAMPLER.values)}. Default auto.",
    )
    parser.add_argument("--sampler-seed", type=int, metavar="N", help=Rare("Seed of the sampler. Default 0."))
    parser.add_argument(
        "--simulator",
        metavar=SIMULATOR,
        help=Rare(f"Use of the simulator to propose launches: {', '.join(SIMULATOR.values)}. Default auto."),
    )
    parser.add_argument(
        "--cost",
        metavar="FILE",
        help="File of step costs of `simulate calibrate --url`. It allows the simulator to propose launches of a "
        "server of a profile.",
    )
    parser.add_argument(
        "--noise-runs",
        type=int,
        metavar="N",
        help="Launches of the defaults before the search, to measure the noise. 0: none. Default 4.",
    )
    parser.add_argument(
        "--finalists", type=int, metavar="K", help="Number of best configurations to confirm. Default 3."
    )
    parser.add_argument(
        "--rounds",
        type=int,
        metavar="N",
        help="Launches of each finalist to confirm it. 0: no confirmation. Default 5.",
    )
    parser.add_argument(
        "--reuse",
        action="store_true",
        help="Use results of other studies with the same load, build and device instead of launches.",
    )
    parser.add_argument(
        "--quick", action="store_true", help="Fewer launches: same as --noise-runs 2 --finalists 2 --rounds 3."
    )
    add_output_flags(parser)
    load_flags.add_flags(parser, leave_out=NOT_LOAD, helps=_load_helps())


def _load_helps() -> dict[str, str]:
    """The help of the load's flags that mean something else in a study: its own defaults, and objectives as limits."""
    helps = {}
    for name, value in DEFAULT_LOAD.items():
        field = BenchConfig.model_fields[name]
        helps[name] = parsing.help_of(field, f"{value:g}s" if isinstance(value, float) else str(value))
    return helps | {"slo": SLO}


def add_output_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="Print the result as JSON.")
    parser.add_argument(
        "--dry-run", action="store_true", help="Print the plan with the exact commands, without a launch."
    )


def add_stored_flags(parser: argparse.ArgumentParser) -> None:
    """The flags of every command that takes an existing study."""
    parser.add_argument("--study", metavar="NAME", help="Folder under studies/. Default: the newest study.")
    add_output_flags(parser)


@contextmanager
def space_errors_of(space: Path | None) -> Iterator[None]:
    """A context manager that adds the space file, if there is one, to the message of a SpaceError."""
    try:
        yield
    except SpaceError as error:
        raise SpaceError(f"{space}: {error}" if space is not None else str(error)) from error


@contextmanager
def opened(prepared: PreparedStudy, progress: ProgressDisplay, *, is_leader: bool = True) -> Iterator["StudySearch"]:
    """The search of a study, as a context manager. Its exit stops warm shards."""
    from tuner.study.open_search import open_search

    with noted(WHEN_STOPPED), open_search(prepared, progress, is_leader=is_leader) as search:
        yield search


def print_plan(prepared: PreparedStudy) -> int:
    from tuner.study.study_plan import plan_of

    print(json.dumps(plan_of(prepared), indent=2))
    return 0

"""Flags that several `tgi-bench` commands have."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from loadgen.config import load_flags, parsing
from loadgen.config.bench_config import BenchConfig
from loadgen.config.objectives import objectives_of
from loadgen.terminal.flags import Rare, section

# Each side of a comparison has its own server and its own label.
SET_BY_SIDES = ("url", "replicas", "balance", "metrics_url", "server", "label")
BASELINES = Path("baselines")
HISTORY = Path("history.jsonl")
SIDE = "A side is a URL, a server's TOML file, git:REV, git:REV:FILE, image:NAME, command:COMMAND or stored:DIR."


def add_load_flags(parser: argparse.ArgumentParser, leave_out: Sequence[str] = ()) -> None:
    """Every flag of a load, and `--config` for the file that may hold them."""
    load_flags.add_flags(parser, leave_out)
    section(parser, "Load").add_argument(
        "--config", type=Path, metavar="FILE", help="TOML file of the load, with the same keys; flags override it."
    )


def load_config(args: argparse.Namespace, **changes: str) -> BenchConfig:
    """The load of a command line, with some of its values replaced. Raises UsageError."""
    config = parsing.load(BenchConfig, vars(args) | changes, args.config)
    objectives_of(config.slo)
    return config


def add_side_load_flags(parser: argparse.ArgumentParser) -> None:
    """Flags of the load that every side runs under."""
    parser.add_argument("--dry-run", action="store_true", help="Print the server commands and the load as JSON only.")
    add_load_flags(parser, SET_BY_SIDES)


def add_export_flag(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--export",
        action="append",
        choices=("csv", "events", "otel"),
        default=[],
        help="Also write requests.csv, events.parquet or otel.json (OpenTelemetry histograms) into the run directory; "
        "repeatable.",
    )


def add_gate_flag(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--gate", action="append", metavar="METRIC", help="Judge this metric too, such as ttft_p95_ms; repeatable."
    )


def add_docker_flag(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--docker-args",
        metavar="WORDS",
        help=Rare('Added to docker run for an image: --docker-args="--gpus all --shm-size 1g".'),
    )


def add_minutes_flag(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--max-minutes", type=float, metavar="M", help="Stop measuring after so many minutes and judge the runs so far."
    )


def add_interleave_flag(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--interleave",
        type=int,
        metavar="N",
        help=Rare(
            "Launch both servers of a pair together and measure N slices of the load on each in turn, A B B A …; a "
            "slice is a run of --warmup and --duration. Default: one run of each, one after the other."
        ),
    )


def add_baselines_flag(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--baselines",
        type=Path,
        metavar="DIR",
        default=BASELINES,
        help=Rare(f"Directory of baselines. Default {BASELINES}."),
    )


def add_history_flag(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--history", type=Path, metavar="FILE", default=HISTORY, help=Rare(f"Table of past results. Default {HISTORY}.")
    )

"""The flags of `tgi-bench sweep` and `search`."""

import argparse
from pathlib import Path

from loadgen import settings
from loadgen.config import BenchConfig


def add_sweep_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--points",
        required=True,
        metavar="LIST",
        help="Loads: 1,4,16 or a geometric grid 1..64 (factor 2) or 1..64:1.5. Users in mode closed, requests/s in "
        "modes with a rate.",
    )
    parser.add_argument("--order", choices=("random", "ascending"), default="random", help="Default random.")
    _add_common_flags(parser)


def add_search_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--low", type=float, required=True, metavar="LOAD", help="A load that is surely fine.")
    parser.add_argument("--high", type=float, required=True, metavar="LOAD", help="A load that is surely too much.")
    parser.add_argument(
        "--tolerance", metavar="PERCENT", type=float, default=5.0, help="How near the answer must be. Default 5."
    )
    parser.add_argument("--max-runs", type=int, metavar="N", default=20, help="Runs at most. Default 20.")
    _add_common_flags(parser)


def _add_common_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--attainment",
        type=float,
        metavar="SHARE",
        default=0.95,
        help="Share that must meet every --slo. Default 0.95.",
    )
    parser.add_argument("--cool-down", metavar="TIME", default="2s", help="Pause between two loads. Default 2s.")
    parser.add_argument("--out", type=Path, metavar="DIR", help="Directory of the series. Default runs/<id>.")
    parser.add_argument("--json", action="store_true", help="Print sweep.json instead of the table.")
    parser.add_argument("--config", type=Path, metavar="FILE", help="TOML file of the load; flags win over it.")
    settings.add_flags(parser, BenchConfig)

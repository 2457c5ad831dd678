"""Several loads on one server, as `sweep` and `search` run them: a run directory for each, and one report."""

import argparse
import contextlib
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loadgen.commands.present import render_table
from loadgen.commands.shared_flags import add_load_flags, load_config
from loadgen.config import parsing
from loadgen.config.bench_config import BenchConfig
from loadgen.config.bench_settings import RATE_MODES
from loadgen.config.durations import parse_duration
from loadgen.errors import UsageError
from loadgen.progress import ProgressDisplay, open_progress
from loadgen.runner import make_run_directory, measure, new_run_id
from loadgen.target.target import Target, open_target
from reports.metrics.summary import Analysis, analyse_run
from reports.metrics.sweep import Sweep
from reports.pages.sweep_page import build_sweep_report, points_table, sweep_json, verdict
from reports.renderers.write import write_report
from reports.run_store import SCHEMA_VERSION, write_json

SWEEP_FILE = "sweep.json"


def add_series_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--attainment",
        type=float,
        metavar="SHARE",
        default=0.95,
        help="Fraction of requests that must meet every --slo. Default 0.95.",
    )
    parser.add_argument("--cool-down", metavar="TIME", default="2s", help="Pause between two loads. Default 2s.")
    parser.add_argument("--out", type=Path, metavar="DIR", help="Directory of the series. Default runs/<id>.")
    parser.add_argument("--json", action="store_true", help="Print sweep.json instead of the table.")
    add_load_flags(parser)


@dataclass(frozen=True, slots=True)
class LoadSeries:
    """Loads on one server. `quantity` is the config field that differs between them: `concurrency` or `rate`."""

    load: BenchConfig
    quantity: str
    target: Target
    out: Path
    progress: ProgressDisplay
    cool_down_s: float

    def measure(self, load: float, attempt: int = 0) -> Analysis:
        """One run at a load; its directory is named after the load."""
        directory = self.out / (f"{self.quantity}-{load:g}" + (f"-again{attempt}" if attempt else ""))
        self.progress.show(f"{self.quantity} {load:g}" + (" again" if attempt else ""))
        value = round(load) if self.quantity == "concurrency" else load
        config = BenchConfig.model_validate(
            self.load.model_dump() | {self.quantity: value, "label": self.load.label or f"{self.quantity} {load:g}"}
        )
        measure(config, self.target, directory, self.progress)
        analysis = analyse_run(directory)
        time.sleep(self.cool_down_s)
        return analysis

    def report(self, sweep: Sweep, *, is_json: bool) -> str:
        """Write the report of all loads; returns the text for stdout."""
        content: dict[str, Any] = {"schema_version": SCHEMA_VERSION, **sweep_json(sweep)}
        write_json(self.out / SWEEP_FILE, content)
        report = write_report(build_sweep_report(sweep), self.out)
        self.progress.show(f"report: {report.html}")
        if is_json:
            return json.dumps(content, indent=2, allow_nan=False)
        line = verdict(sweep)
        return "\n".join((f"{line.word}. {line.sentence}", *line.reasons, "", render_table(points_table(sweep))))


def series_load(args: argparse.Namespace, first: float) -> tuple[BenchConfig, str]:
    """The load of a command line at its first point, and the config field that the points set. Raises UsageError."""
    mode = args.mode or (parsing.read_toml(args.config).get("mode") if args.config else None) or "closed"
    quantity = "rate" if mode in RATE_MODES else "concurrency"
    if mode != "closed" and mode not in RATE_MODES:
        raise UsageError(f"`mode` is {mode!r} but must be closed or one of {', '.join(RATE_MODES)} to vary the load")
    value = getattr(args, quantity)
    if value is not None:
        raise UsageError(f"`{quantity}` is {value} but this command sets it for every run; leave it out")
    if not 0 < args.attainment < 1:
        raise UsageError(f"`attainment` is {args.attainment:g} but must be between 0 and 1")
    if quantity == "concurrency" and first != int(first):
        raise UsageError(f"the load {first:g} is not a whole number of users")
    return load_config(args, **{quantity: f"{first:g}"}), quantity


@contextlib.contextmanager
def open_series(args: argparse.Namespace, config: BenchConfig, quantity: str) -> Iterator[LoadSeries]:
    """The series of a command line; its server is started once for all loads."""
    try:
        cool_down_s = float(str(parse_duration(args.cool_down)))
    except ValueError as error:
        raise UsageError(f"`cool_down` is {args.cool_down!r}: {error}") from error
    out: Path = args.out or Path("runs") / new_run_id()
    make_run_directory(out)
    if (out / SWEEP_FILE).exists():
        raise UsageError(f"{out} already holds a series; choose another --out or remove it")
    progress = open_progress()
    if config.url is None:
        progress.show(f"starting {config.server or config.model_id}; log: {out / 'server.log'}")
    try:
        with open_target(config, out / "server.log") as target:
            yield LoadSeries(config, quantity, target, out, progress, cool_down_s)
    finally:
        progress.close()

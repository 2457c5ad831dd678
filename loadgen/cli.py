"""`tgi-bench`: measure a server, and read what was measured."""

import argparse
import contextlib
import datetime
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from loadgen import settings
from loadgen.config import BenchConfig
from loadgen.distribution import Distribution
from loadgen.distribution_flags import (
    add_distribution_flags,
    distribution_of,
    join_address,
    join_key,
    warnings_of,
)
from loadgen.errors import LoadgenError, UsageError
from loadgen.gate_flags import add_baseline_flags, add_compare_flags, add_history_flags, add_noise_flags
from loadgen.objectives import objectives_of
from loadgen.program import COULD_NOT_MEASURE, Command, Program
from loadgen.series_flags import add_search_flags, add_sweep_flags

EXIT_CODES = """exit codes:
  0         done, or pass
  1         the judged thing failed
  2         usage, or a file that is missing or wrong
  3         not decided: inconclusive
  4         could not measure: invalid run, start failed, disk full
  130, 143  interrupted, terminated (what was measured is kept and reported)"""


def main(argv: Sequence[str] | None = None) -> int:
    return Program("tgi-bench", "Benchmark TGI- and OpenAI-compatible servers.", EXIT_CODES, COMMANDS).main(argv)


def add_load_flags(parser: argparse.ArgumentParser) -> None:
    """Every flag of a load, and the file that may hold them."""
    parser.add_argument("--config", type=Path, metavar="FILE", help="TOML file with the same keys; flags win over it.")
    settings.add_flags(parser, BenchConfig)


def load_config(given: argparse.Namespace) -> BenchConfig:
    """The load of a command line. Raises UsageError."""
    config = settings.load(BenchConfig, vars(given), given.config)
    objectives_of(config.slo)
    return config


def _add_run_flags(parser: argparse.ArgumentParser) -> None:
    add_load_flags(parser)
    parser.add_argument("--out", type=Path, metavar="DIR", help="Run directory. Default runs/<id>.")
    parser.add_argument("--json", action="store_true", help="Print summary.json instead of the table.")
    _add_export_flag(parser)
    parser.add_argument(
        "--dry-run", action="store_true", help="Print the server command and the load as JSON, and do nothing."
    )
    add_distribution_flags(parser)


def _run(given: argparse.Namespace, arguments: Sequence[str]) -> int:
    if given.join is not None:
        return _join(given)
    from loadgen.runner import make_run_directory, new_run_id
    from loadgen.target import server_command

    config = load_config(given)
    distribution = distribution_of(given, config)
    if given.dry_run:
        print(json.dumps({"server": server_command(config), "load": config.resolved()}, indent=2))
        return 0
    out: Path = given.out or Path("runs") / new_run_id()
    make_run_directory(out)
    try:
        exit_code = _measure(config, distribution, out, arguments, is_json=given.json)
    except LoadgenError:
        with contextlib.suppress(OSError):
            out.rmdir()  # only where nothing was written
        raise
    _export([out], given.export)
    return exit_code


def _join(given: argparse.Namespace) -> int:
    from loadgen.join import join
    from loadgen.progress import open_progress

    return join(join_address(given), join_key(), open_progress())


def _measure(
    config: BenchConfig, distribution: Distribution, out: Path, arguments: Sequence[str], *, is_json: bool
) -> int:
    from loadgen.progress import open_progress
    from loadgen.runner import InterruptedRun, run
    from loadgen.target import open_target

    progress = open_progress()
    for warning in warnings_of(distribution):
        progress.say(f"warning: {warning}")
    if config.url is None:
        progress.say(f"starting {config.server or config.model_id}, log in {out / 'server.log'}")
    exit_code = None
    waiting = open_target(
        config, out / "server.log", lambda waited_s: progress.say(f"waiting for it, {waited_s:.0f} s")
    )
    with waiting as target:
        progress.say(f"measuring {target.url}")
        try:
            run(config, target, out, progress, ["tgi-bench", *arguments], distribution)
        except InterruptedRun as interrupted:
            progress.say("interrupted; reporting what was measured")
            exit_code = interrupted.exit_code
    judged = _show([out], out, is_json=is_json)
    return exit_code if exit_code is not None else judged


def _add_export_flag(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--export",
        action="append",
        choices=("csv", "events", "otel"),
        default=[],
        help="Write requests.csv, events.parquet or otel.json (OpenTelemetry histograms) into the run directory too; "
        "repeatable.",
    )


def _export(directories: Sequence[Path], formats: Sequence[str]) -> None:
    """Write the exports that were asked for beside the runs."""
    if not formats:
        return
    from reports.export import export_run

    for directory in directories:
        for path in export_run(directory, formats):
            print(f"export: {path}", file=sys.stderr)


def _add_report_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "directories", nargs="+", type=Path, metavar="DIR", help="Run directories, or one of a comparison."
    )
    parser.add_argument("--out", type=Path, metavar="DIR", help="Where to write. Default the (first) run directory.")
    parser.add_argument("--json", action="store_true", help="Print summary.json instead of the table.")
    _add_export_flag(parser)


def _report(given: argparse.Namespace, _arguments: Sequence[str]) -> int:
    if _is_comparison(given.directories):
        from loadgen import compare

        [directory] = given.directories
        print(compare.report_again(directory, given.out or directory, is_json=given.json))
        return 0
    _show(given.directories, given.out or given.directories[0], is_json=given.json)
    _export(given.directories, given.export)
    return 0


def _is_comparison(directories: Sequence[Path]) -> bool:
    """Whether the one directory that is given holds a comparison and not a run."""
    return len(directories) == 1 and (directories[0] / "comparison.json").is_file()


def _show(directories: Sequence[Path], out: Path, *, is_json: bool) -> int:
    """Write the report and print the summary. Returns the exit code of the first run's verdict."""
    from loadgen.present import present

    text, verdict, report = present(directories, out, is_json=is_json)
    print(text)
    print(f"report: {report}", file=sys.stderr)
    return COULD_NOT_MEASURE if verdict == "invalid" else 0


def _compare(given: argparse.Namespace, arguments: Sequence[str]) -> int:
    from loadgen import compare

    text, exit_code = compare.run(given, arguments)
    print(text)
    return exit_code


def _noise(given: argparse.Namespace, _arguments: Sequence[str]) -> int:
    from loadgen import noise

    text, exit_code = noise.run(given)
    print(text)
    return exit_code


def _baseline(given: argparse.Namespace, _arguments: Sequence[str]) -> int:
    from loadgen import stored_sides

    print(stored_sides.run_baseline(given))
    return 0


def _history(given: argparse.Namespace, _arguments: Sequence[str]) -> int:
    from loadgen import history

    text, exit_code = history.run(given)
    print(text)
    return exit_code


def _add_selftest_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--streams", metavar="N,…", default="1,16,64,256", help="Streams at once. Default 1,16,64,256.")
    parser.add_argument("--seconds", type=float, metavar="S", default=4.0, help="Length of each load. Default 4.")
    parser.add_argument("--only", action="store_true", help="Measure these loads and no larger ones; store nothing.")
    parser.add_argument("--json", action="store_true", help="Print the measurements as JSON.")


def _selftest(given: argparse.Namespace, _arguments: Sequence[str]) -> int:
    from loadgen import selftest
    from loadgen.capacity import Capacity, store
    from loadgen.progress import open_progress

    levels = selftest.measure(_streams(given), given.seconds, open_progress(), is_growing=not given.only)
    rate = selftest.capacity_of(levels)
    if given.json:
        print(json.dumps({"capacity_events_per_s": rate, "levels": [asdict(level) for level in levels]}, indent=2))
    else:
        print("\n".join(selftest.render(level) for level in levels))
    if rate is None:
        print("no load had true times: this machine is too busy or too slow to measure from", file=sys.stderr)
        return COULD_NOT_MEASURE
    if not given.only:
        where = store(Capacity(rate, datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")))
        print(f"this machine bears {rate:.0f} events/s per worker; kept in {where}", file=sys.stderr)
    return 0


def _streams(given: argparse.Namespace) -> list[int]:
    """Raises UsageError."""
    words = given.streams.split(",")
    if not all(word.isdigit() and 1 <= int(word) <= 10_000 for word in words):
        raise UsageError(f"`streams` is {given.streams!r}, not a list of numbers from 1 to 10000 such as 1,16,64")
    if not 0.5 <= given.seconds <= 600:
        raise UsageError(f"`seconds` is {given.seconds:g} but must be 0.5 to 600")
    return [int(word) for word in words]


def _sweep(given: argparse.Namespace, arguments: Sequence[str]) -> int:
    from loadgen import series

    text, exit_code = series.run_sweep(given, arguments)
    print(text)
    return exit_code


def _search(given: argparse.Namespace, arguments: Sequence[str]) -> int:
    from loadgen import series

    text, exit_code = series.run_search(given, arguments)
    print(text)
    return exit_code


COMMANDS = {
    "run": Command("Measure one server under one load.", _add_run_flags, _run),
    "compare": Command("Judge whether B is slower than A, in interleaved pairs.", add_compare_flags, _compare),
    "noise": Command("How much runs of one side differ, and what pairs of them can show.", add_noise_flags, _noise),
    "baseline": Command("Store runs under a name, on purpose, and look at them.", add_baseline_flags, _baseline),
    "history": Command("Keep results per commit, and find where they changed.", add_history_flags, _history),
    "report": Command("Report on stored runs, or on a stored comparison.", _add_report_flags, _report),
    "sweep": Command("Measure several loads on one server.", add_sweep_flags, _sweep),
    "search": Command("Find the highest load that keeps the objectives.", add_search_flags, _search),
    "selftest": Command("Measure this machine's own accuracy and capacity.", _add_selftest_flags, _selftest),
}


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        sys.exit(main())

"""`tgi-bench run`: one measurement of one server, by this machine or by several."""

import argparse
import contextlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path

from loadgen.commands.join import join, join_address, join_key
from loadgen.commands.shared_flags import add_export_flag, add_load_flags, load_config
from loadgen.config.bench_config import BenchConfig
from loadgen.config.distribution import (
    JOIN_KEY_VARIABLE,
    LOOPBACK,
    MASTER_PORT,
    WEB_PORT,
    Address,
    Distribution,
    new_join_key,
)
from loadgen.errors import LoadgenError, UsageError
from loadgen.progress import ProgressDisplay, add_verbosity_flags, progress_of
from loadgen.run_directory import make_run_directory, new_run_id
from loadgen.runner import InterruptedRun, measure
from loadgen.target.launched.start_phase import waiting_line
from loadgen.target.open_target import open_target, server_command
from loadgen.terminal.flags import Rare, section
from reports.run_store import SUMMARY_FILE


def add_flags(parser: argparse.ArgumentParser) -> None:
    add_load_flags(parser)
    parser.add_argument("--out", type=Path, metavar="DIR", help="Run directory. Default runs/<id>.")
    parser.add_argument("--json", action="store_true", help="Print summary.json instead of the table.")
    add_export_flag(parser)
    section(parser, "Objectives and price").add_argument(
        "--fail-on-slo",
        action="store_true",
        help="Exit 1 if an objective (--slo) is missed, 3 if the run is too short to decide one; for CI.",
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="Print the server command and the load as JSON; start nothing."
    )
    add_distribution_flags(parser)
    add_verbosity_flags(parser)


def run(args: argparse.Namespace, words: Sequence[str]) -> int:
    if args.join is not None:
        return join(join_address(args), join_key(), progress_of(args))
    config = load_config(args)
    distribution = distribution_of(args, config)
    if args.fail_on_slo:
        from loadgen.commands.fail_on_slo import check_decidable

        check_decidable(config.slo)
    if args.dry_run:
        print(json.dumps({"server": server_command(config), "load": config.resolved()}, indent=2))
        return 0
    progress = progress_of(args)
    exit_code = None
    with new_run_directory(args.out) as out:
        try:
            measure_server(config, distribution, out, words, progress)
        except InterruptedRun as interrupted:
            progress.show("interrupted; reporting the requests measured so far")
            exit_code = interrupted.exit_code
        # The libraries of the report take most of the start of a command.
        from loadgen.commands.present import export_runs, show_runs

        verdict_code = show_runs([out], out, is_json=args.json)
    export_runs([out], args.export)
    if args.fail_on_slo and exit_code is None and verdict_code == 0:
        from loadgen.commands.fail_on_slo import slo_exit_code

        return slo_exit_code(json.loads((out / SUMMARY_FILE).read_bytes()), progress)
    return exit_code if exit_code is not None else verdict_code


@contextlib.contextmanager
def new_run_directory(out: Path | None) -> Iterator[Path]:
    """A run directory, by default runs/<id>; removed again if a run fails before it writes a file."""
    directory = out or Path("runs") / new_run_id()
    make_run_directory(directory)
    try:
        yield directory
    except LoadgenError:
        with contextlib.suppress(OSError):
            directory.rmdir()  # fails where files were written
        raise


def measure_server(
    config: BenchConfig, distribution: Distribution, out: Path, words: Sequence[str], progress: ProgressDisplay
) -> None:
    """One run in its directory, of a running server or of one that is started for it."""
    for warning in warnings_of(distribution):
        progress.show(f"warning: {warning}")
    if config.url is None:
        progress.show(f"starting {config.server or config.model_id}; log: {out / 'server.log'}")
    opened = open_target(
        config, out / "server.log", lambda waited_s: progress.show(waiting_line(waited_s, out / "server.log"))
    )
    with opened as target:
        progress.show(f"measuring {target.url}")
        measure(config, target, out, progress, ["tgi-bench", *words], distribution)


def add_distribution_flags(parser: argparse.ArgumentParser) -> None:
    flags = parser.add_argument_group(
        "Load from several machines",
        "One command is the master and the others join it; the master stores all records. All commands have one secret "
        f"in {JOIN_KEY_VARIABLE}; without it, the master draws one and prints it. The traffic is encrypted with it.",
    )
    flags.add_argument(
        "--master",
        action="store_true",
        help=Rare("Send no requests from here: wait for workers to connect, and divide the load among them."),
    )
    flags.add_argument(
        "--master-bind-host", metavar="HOST", help=Rare(f"Address the master listens at. Default {LOOPBACK}.")
    )
    flags.add_argument(
        "--master-bind-port",
        metavar="PORT",
        help=Rare(f"Port the master listens at. Default {MASTER_PORT}; 0 for a free one."),
    )
    flags.add_argument(
        "--expect-workers", metavar="N", type=int, help=Rare("Start when N workers have joined. Default 1.")
    )
    flags.add_argument(
        "--join",
        metavar="HOST[:PORT]",
        help=Rare("Run as a worker of the master at this address, which sends the settings of the load."),
    )
    parser.add_argument(
        "--web",
        nargs="?",
        const="",
        metavar="HOST:PORT",
        help="Serve locust's web UI during the run, with TTFT, TPOT, tokens per second and running streams. "
        f"Default {LOOPBACK}:{WEB_PORT}.",
    )


def distribution_of(args: argparse.Namespace, config: BenchConfig) -> Distribution:
    """The load-making processes that a command line requests. Raises UsageError."""
    web = None if args.web is None else Address.parse("web", args.web, Address(LOOPBACK, WEB_PORT))
    if not args.master:
        for name in ("master_bind_host", "master_bind_port", "expect_workers"):
            if getattr(args, name) is not None:
                raise UsageError(f"`{name}` needs --master")
        distribution = Distribution(config.workers, web=web)
    else:
        if config.workers != 1:
            raise UsageError(f"`workers` is {config.workers} but a --master makes no load; use --expect-workers")
        text = f"{args.master_bind_host or ''}:{args.master_bind_port or ''}"
        bind = Address.parse("master_bind_host", text, Address(LOOPBACK, MASTER_PORT))
        count = 1 if args.expect_workers is None else args.expect_workers
        key = join_key()
        distribution = Distribution(count, True, bind, web, key or new_join_key(), is_key_drawn=not key)
    distribution.check(config)
    return distribution


def warnings_of(distribution: Distribution) -> list[str]:
    """Warnings about addresses that other hosts can reach."""
    warnings = []
    if distribution.is_open and not distribution.bind.is_loopback:
        warnings.append(
            f"the master listens at {distribution.bind}: each worker with the join key receives the server's API key"
        )
    if distribution.web is not None and not distribution.web.is_loopback:
        warnings.append(
            f"the web UI listens at {distribution.web}: any host that reaches it can watch and stop the run"
        )
    return warnings

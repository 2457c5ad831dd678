"""Flags of `tgi-bench run` that say which processes and machines make a load, and who may watch."""

import argparse
import secrets

from loadgen.config import BenchConfig
from loadgen.distribution import LOOPBACK, MASTER_PORT, WEB_PORT, Address, Distribution
from loadgen.errors import UsageError
from loadgen.settings import environment, flag_name

JOIN_KEY_VARIABLE = "TGI_BENCH_JOIN_KEY"


def add_distribution_flags(parser: argparse.ArgumentParser) -> None:
    flags = parser.add_argument_group(
        "load from several machines",
        f"One command is the master, the others join it; records come back to the master. Set {JOIN_KEY_VARIABLE} to "
        "one secret for all of them where others can reach the master's port: what passes there is not encrypted.",
    )
    flags.add_argument(
        "--master",
        action="store_true",
        help="Make no load here: wait for workers that join, and give them their share.",
    )
    flags.add_argument(
        "--master-bind-host", metavar="HOST", help=f"Where the master listens. Default {LOOPBACK}, this machine alone."
    )
    flags.add_argument("--master-bind-port", metavar="PORT", help=f"Default {MASTER_PORT}; 0 for a free one.")
    flags.add_argument("--expect-workers", metavar="N", type=int, help="Begin when so many have joined. Default 1.")
    flags.add_argument("--join", metavar="HOST[:PORT]", help="Be a worker of the master there, which knows the load.")
    parser.add_argument(
        "--web",
        nargs="?",
        const="",
        metavar="HOST:PORT",
        help=f"Show the run in locust's web UI while it lasts, with TTFT, TPOT, tokens per second and running streams. "
        f"Default {LOOPBACK}:{WEB_PORT}.",
    )


def distribution_of(given: argparse.Namespace, config: BenchConfig) -> Distribution:
    """The processes that a command line asks for. Raises UsageError."""
    web = None if given.web is None else Address.parse("web", given.web, Address(LOOPBACK, WEB_PORT))
    if not given.master:
        for name in ("master_bind_host", "master_bind_port", "expect_workers"):
            if getattr(given, name) is not None:
                raise UsageError(f"`{name}` belongs to --master")
        distribution = Distribution(config.workers, web=web, key=secrets.token_hex(16))
    else:
        if config.workers != 1:
            raise UsageError(f"`workers` is {config.workers} but a --master makes no load; give --expect-workers")
        text = f"{given.master_bind_host or ''}:{given.master_bind_port or ''}"
        bind = Address.parse("master_bind_host", text, Address(LOOPBACK, MASTER_PORT))
        count = 1 if given.expect_workers is None else given.expect_workers
        distribution = Distribution(count, True, bind, web, join_key())
    distribution.check(config)
    return distribution


def join_address(given: argparse.Namespace) -> Address:
    """Where `--join` leads. Raises UsageError where the load is said here too, which only the master may."""
    names = [name for name in (*BenchConfig.model_fields, "config", "out", "web") if getattr(given, name) is not None]
    names += [name for name in ("master", "dry_run", "json") if getattr(given, name)]
    if names:
        raise UsageError(f"{flag_name(names[0])} is for the master: a worker that joins is told its load")
    return Address.parse("join", given.join, Address(LOOPBACK, MASTER_PORT))


def join_key() -> str:
    return environment(JOIN_KEY_VARIABLE).get(JOIN_KEY_VARIABLE, "")


def warnings_of(distribution: Distribution) -> list[str]:
    """What to say of addresses that others can reach."""
    said = []
    if distribution.is_open and not distribution.bind.is_loopback:
        guard = "anyone who reaches it can join" if not distribution.key else "what passes there is not encrypted"
        said.append(f"the master listens at {distribution.bind}: {guard}, and workers are sent the server's API key")
    if distribution.web is not None and not distribution.web.is_loopback:
        said.append(f"the web UI listens at {distribution.web}: anyone who reaches it can watch and stop the run")
    return said

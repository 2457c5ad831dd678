"""`tgi-tune serve`: replaces this process with the server of a study's best configuration."""

import argparse
import os
import shlex
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path

from loadgen.errors import UsageError
from loadgen.program import Command
from tuner.study.best_file import BEST_FILE, is_confirmed
from tuner.study.prepare_study import STUDIES, checked_name, stored

DEFAULT_PORT = "8080"


def add_serve_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--study", metavar="NAME", help="Folder under studies/. Default: the newest study.")
    parser.add_argument(
        "--unconfirmed", action="store_true", help="Serve the configuration even if its gain is not confirmed."
    )
    parser.add_argument("--dry-run", action="store_true", help="Print the command without starting it.")
    parser.add_argument(
        "flags", nargs=argparse.REMAINDER, metavar="-- FLAGS", help="Additional flags of the launcher, after --."
    )


def serve(args: argparse.Namespace, _words: Sequence[str]) -> int:
    from tuner.servers.select import server_of

    best = find_best(STUDIES, args.study)
    if not is_confirmed(tomllib.loads(best.read_text())) and not args.unconfirmed:
        raise UsageError(f"{best} is not confirmed: run `tgi-tune run` with --rounds, or add --unconfirmed")
    extra = args.flags[1:] if args.flags[:1] == ["--"] else args.flags
    launch = server_of(stored(best.parent.name).config.server).serve_command(best, extra)
    command = [word.replace("{port}", os.environ.get("PORT", DEFAULT_PORT)) for word in launch.command]
    if args.dry_run:
        print(shell_line(launch.environment, command))
        return 0
    return os.execvpe(command[0], command, {**os.environ, **launch.environment})


def shell_line(environment: Mapping[str, str], command: Sequence[str]) -> str:
    """A line for a shell that sets variables for one command.

    >>> shell_line({"CACHE": "my cache"}, ["serve", "a b"])
    "CACHE='my cache' serve 'a b'"
    """
    return " ".join([*(f"{name}={shlex.quote(value)}" for name, value in environment.items()), shlex.join(command)])


def find_best(studies: Path, name: str | None) -> Path:
    """The `best.toml` of a study, the newest if no name is given. Raises UsageError."""
    if name is not None:
        best = studies / checked_name(name) / BEST_FILE
        if not best.exists():
            raise UsageError(f"{best} does not exist: the study does not exist or has no best configuration")
        return best
    found = sorted(studies.glob(f"*/{BEST_FILE}"), key=lambda path: path.stat().st_mtime)
    if not found:
        raise UsageError(f"no study under {studies}/ has a best configuration: find one with `tgi-tune run`")
    return found[-1]


EXAMPLES = ("", "--study nightly --dry-run", "-- --port 3000")
COMMAND = Command("Serve the best configuration of a study.", add_serve_flags, serve, EXAMPLES)

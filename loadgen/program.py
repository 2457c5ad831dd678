"""A program of several commands: their flags, exit codes and error output. `tgi-bench` and `tgi-tune` are two."""

import argparse
import errno
import importlib
import os
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loadgen.errors import LoadgenError, UsageError
from loadgen.interrupts import Interrupted, raise_on_signals

COULD_NOT_MEASURE, BROKEN_PIPE = 4, 141
# Packages of the extra `server`.
OF_SERVER = (
    "torch",
    "transformers",
    "safetensors",
    "huggingface_hub",
    "grpc",
    "google",
    "fastapi",
    "uvicorn",
    "orjson",
)


def disk_full(path: Path) -> str:
    """The message of a full disk: the path and its free bytes."""
    existing = next(each for each in (path, *path.absolute().parents) if each.exists())
    free_bytes = shutil.disk_usage(existing).free
    return f"the disk of {path.absolute()} is full: {free_bytes:,} bytes are free; remove files or choose another place"


@dataclass(frozen=True, slots=True)
class Command:
    """One command: its help, its flags and its function. `run` also receives the words of the command line."""

    summary: str
    add_flags: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace, Sequence[str]], int]


def command_in(module: str, summary: str) -> Command:
    """A command whose `add_flags` and `run` are in a module that is imported on first use."""
    return Command(
        summary,
        lambda parser: importlib.import_module(module).add_flags(parser),
        lambda args, words: int(importlib.import_module(module).run(args, words)),
    )


@dataclass(frozen=True, slots=True)
class Program:
    """`later` are documented commands that this version lacks; they are refused by name."""

    name: str
    description: str
    exit_codes: str
    commands: Mapping[str, Command]
    later: Sequence[str] = ()
    when_stopped: str = "stopped"

    def main(self, argv: Sequence[str] | None = None) -> int:
        """Run one command; returns the exit code. Errors are one line on stderr."""
        words = list(sys.argv[1:] if argv is None else argv)
        raise_on_signals()
        try:
            if words and words[0] in self.later:
                raise UsageError(f"`{words[0]}` is not available in this version")
            args = self.parse(words)
            exit_code = self.commands[args.command].run(args, words)
            sys.stdout.flush()
            return exit_code
        except Interrupted as interrupted:
            self._write_error(self.when_stopped)
            return interrupted.exit_code
        except LoadgenError as error:
            self._write_error(f"{self.name}: {error}")
            return error.exit_code
        except BrokenPipeError:
            # The reader of stdout has ended, as `head` does; the interpreter would flush into the pipe once more.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return BROKEN_PIPE
        except ModuleNotFoundError as error:
            if (error.name or "").partition(".")[0] not in OF_SERVER:
                raise
            self._write_error(f"{self.name}: {error.name} is not installed: pip install 'tgi-bench[server]'")
            return UsageError.exit_code
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
            self._write_error(f"{self.name}: {disk_full(Path(error.filename or '.'))}")
            return COULD_NOT_MEASURE

    def parse(self, words: Sequence[str]) -> argparse.Namespace:
        """The flags of a command line. Only the named command adds its flags: others need not be imported."""
        parser = argparse.ArgumentParser(prog=self.name, description=self.description, **self._style())
        subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
        for name, command in self.commands.items():
            subparser = subparsers.add_parser(name, help=command.summary, description=command.summary, **self._style())
            if name == next(iter(words), None):
                command.add_flags(subparser)
        return parser.parse_args(words)

    def _write_error(self, text: str) -> None:
        sys.stderr.write(text + "\n")

    def _style(self) -> dict[str, Any]:
        return {
            "epilog": self.exit_codes,
            "formatter_class": argparse.RawDescriptionHelpFormatter,
            "allow_abbrev": False,
        }

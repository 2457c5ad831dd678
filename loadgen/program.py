"""A program of several commands: its words, their flags, and how it ends. `tgi-bench` and `tgi-tune` are two."""

import argparse
import errno
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from loadgen.errors import LoadgenError, UsageError
from loadgen.interrupts import Interrupted, raise_on_signals

COULD_NOT_MEASURE = 4


@dataclass(frozen=True, slots=True)
class Command:
    """A word of the command line: its help, its flags and what it does. `run` also gets the words as given."""

    summary: str
    add_flags: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace, Sequence[str]], int]


@dataclass(frozen=True, slots=True)
class Program:
    """`later` are words that the documents name and this version does not have: refused by name."""

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
            given = self._parser().parse_args(words)
            return self.commands[given.command].run(given, words)
        except Interrupted as interrupted:
            self._say(self.when_stopped)
            return interrupted.exit_code
        except LoadgenError as error:
            self._say(f"{self.name}: {error}")
            return error.exit_code
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
            self._say(f"{self.name}: the disk is full ({error.filename})")
            return COULD_NOT_MEASURE

    def _say(self, text: str) -> None:
        sys.stderr.write(text + "\n")

    def _parser(self) -> argparse.ArgumentParser:
        parser = argparse.ArgumentParser(prog=self.name, description=self.description, **self._style())
        words = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
        for word, command in self.commands.items():
            command.add_flags(
                words.add_parser(word, help=command.summary, description=command.summary, **self._style())
            )
        return parser

    def _style(self) -> dict[str, Any]:
        return {
            "epilog": self.exit_codes,
            "formatter_class": argparse.RawDescriptionHelpFormatter,
            "allow_abbrev": False,
        }

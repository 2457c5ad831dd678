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

from loadgen.config.parsing import variables
from loadgen.errors import LoadgenError, UsageError
from loadgen.interrupts import Interrupted, raise_on_signals
from loadgen.terminal import completion
from loadgen.terminal.command_parser import CommandParser
from loadgen.terminal.help_page import HelpPage
from loadgen.terminal.legible_output import legible_stdout
from loadgen.terminal.variables import misspelt_variables, variables_of, words_of_variables
from reports.text import legible

COULD_NOT_MEASURE, BROKEN_PIPE = 4, 141
START_FILES = {"bash": "~/.bashrc", "zsh": "~/.zshrc", "fish": "~/.config/fish/config.fish"}
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
    """One command: its help, its flags and its function. `run` also receives the words of the command line.

    Words of environment variables are part of that line, so that it repeats the call elsewhere. examples: of its help,
    without the name of the program.
    """

    summary: str
    add_flags: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace, Sequence[str]], int]
    examples: tuple[str, ...] = ()


def command_in(module: str, summary: str, *examples: str) -> Command:
    """A command whose `add_flags` and `run` are in a module that is imported on first use."""
    return Command(
        summary,
        lambda parser: importlib.import_module(module).add_flags(parser),
        lambda args, words: int(importlib.import_module(module).run(args, words)),
        examples,
    )


@dataclass(frozen=True, slots=True)
class Program:
    """`later` are documented commands that this version lacks; they are refused by name.

    secrets: environment variables with its prefix that have no flag.
    """

    name: str
    description: str
    exit_codes: str
    commands: Mapping[str, Command]
    later: Sequence[str] = ()
    secrets: Sequence[str] = ()

    def main(self, argv: Sequence[str] | None = None) -> int:
        """Run one command; returns the exit code. Errors are one line on stderr."""
        words = list(sys.argv[1:] if argv is None else argv)
        raise_on_signals()
        from_environment: list[str] = []
        try:
            if words and words[0] in self.later:
                raise UsageError(f"`{words[0]}` is not available in this version")
            if words and words[0] == completion.CANDIDATES:
                line = words[1:]
                sys.stdout.writelines(f"{each}\n" for each in completion.candidates(self.parser(line), line))
                return 0
            parser = self.parser(words)
            named = parser.named(words)
            found, from_environment = words_of_variables(named, words, variables(self.prefix), self.prefix)
            self._warn_of_misspelt(named)
            depth = len(named.prog.split()) - 1
            words[depth:depth] = found
            args = self.parse(words, parser)
            if args.command == completion.COMMAND:
                sys.stdout.write(completion.script_of(self.name, args.shell))
                return 0
            with legible_stdout():
                exit_code = self.commands[args.command].run(args, words)
            sys.stdout.flush()
            return exit_code
        except Interrupted as interrupted:
            self._write_error(interrupted.note or "stopped")
            return interrupted.exit_code
        except LoadgenError as error:
            self._write_error(f"{self.name}: {error}")
            if from_environment and isinstance(error, UsageError):
                self._write_error(f"set by the environment: {', '.join(from_environment)}")
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

    @property
    def prefix(self) -> str:
        """Of the environment variables of its flags: `tgi-bench` has TGI_BENCH_."""
        return self.name.replace("-", "_").upper() + "_"

    def parse(self, words: Sequence[str], parser: CommandParser | None = None) -> argparse.Namespace:
        """The flags of a command line, without those of the environment. Ends the process with 2 if one is wrong."""
        parser = parser or self.parser(words)
        args, unknown = parser.parse_known_args(words)
        if unknown:
            parser.named(words).refuse(unknown)
        return args

    def parser(self, words: Sequence[str]) -> CommandParser:
        """The parser of a command line. Only the named command adds its flags: others need not be imported."""
        page = HelpPage((), self.exit_codes, self.prefix)
        parser = CommandParser(page, prog=self.name, description=self.description)
        subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
        for name, command in self.commands.items():
            examples = tuple(f"{self.name} {name} {words}".strip() for words in command.examples)
            subparser = subparsers.add_parser(
                name,
                help=command.summary,
                description=command.summary,
                page=HelpPage(examples, self.exit_codes, self.prefix),
            )
            if name == next(iter(words), None):
                command.add_flags(subparser)
        completing = subparsers.add_parser(completion.COMMAND, help="Print the script that completes words in a shell.")
        lines = ", ".join(f"{file}: {completion.line_of(self.name, shell)}" for shell, file in START_FILES.items())
        completing.add_argument("shell", choices=completion.SHELLS, help=f"The line for {lines}.")
        return parser

    def _warn_of_misspelt(self, named: CommandParser) -> None:
        """Report each variable that sets no flag of any command and looks like one that does."""
        unused = variables(self.prefix).keys() - variables_of(named, self.prefix) - set(self.secrets)
        if not unused:
            return
        known = set(self.secrets).union(*(variables_of(self.parser([name]), self.prefix) for name in self.commands))
        for sentence in misspelt_variables(variables(self.prefix), known, self.prefix):
            self._write_error(f"{self.name}: {sentence}")

    def _write_error(self, text: str) -> None:
        sys.stderr.write(legible(text) + "\n")

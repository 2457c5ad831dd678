"""The parser of a command: sections in its help, `--help-all`, `--version`, switches, and "did you mean" in errors."""

import argparse
import importlib.metadata
import re
import sys
from collections.abc import Sequence
from functools import partial
from typing import Any, NoReturn

from loadgen.terminal.flags import PlainSwitch
from loadgen.terminal.help_page import HelpPage, usage_of
from loadgen.terminal.suggestion import nearest

_INVALID_CHOICE = re.compile(r"invalid choice: '(?P<word>[^']*)' \(choose from (?P<known>.*)\)", re.DOTALL)
DISTRIBUTION = "tgi-bench"


class CommandParser(argparse.ArgumentParser):
    """argparse with a page of help for people. Parsers of its commands are of the same kind."""

    def __init__(self, page: HelpPage | None = None, **settings: Any) -> None:
        super().__init__(add_help=False, **{"allow_abbrev": False, **settings})
        self.page = page or HelpPage()
        self.register("action", "store_true", PlainSwitch)
        self.add_argument("-h", "--help", action="help", help="Print the flags that most uses need.")
        self.add_argument("--help-all", action=_HelpAll, help="Print every flag, and its environment variable.")
        self.add_argument("--version", action=_Version, help="Print the version.")

    def add_subparsers(self, **settings: Any) -> Any:
        page = HelpPage(exit_codes=self.page.exit_codes, prefix=self.page.prefix)
        return super().add_subparsers(**{"parser_class": partial(CommandParser, page=page), **settings})

    def format_help(self) -> str:
        return self.page.render(self, is_whole=False)

    def format_usage(self) -> str:
        return f"usage: {usage_of(self)}\n"

    def error(self, message: str) -> NoReturn:
        """One line that names the problem, with the nearest known value, and where the help is."""
        found = _INVALID_CHOICE.search(message)
        if found is not None:
            message += nearest(found["word"], re.findall(r"[^\s,']+", found["known"]))
        self.exit(2, f"{self.prog}: {message}\ntry '{self.prog} --help'\n")

    def refuse(self, unknown: Sequence[str]) -> NoReturn:
        """End with the first word that is no flag and no value of one."""
        word = unknown[0].partition("=")[0]
        if not word.startswith("-"):
            self.error(f"unexpected argument {word!r}: a flag without a value takes none; see --x and --no-x in --help")
        self.error(f"unknown flag {word}{nearest(word, self._option_string_actions)}")

    def named(self, words: Sequence[str]) -> "CommandParser":
        """The parser of the command that these words name, or this one."""
        for action in self._actions:
            if isinstance(action, argparse._SubParsersAction):
                word = next((word for word in words if not word.startswith("-")), None)
                if word in action.choices:
                    chosen: CommandParser = action.choices[word]
                    return chosen.named(words[words.index(word) + 1 :])
        return self


class _HelpAll(argparse._HelpAction):
    def __call__(self, parser: argparse.ArgumentParser, *_: object, **__: object) -> NoReturn:
        assert isinstance(parser, CommandParser)
        sys.stdout.write(parser.page.render(parser, is_whole=True))
        parser.exit()


class _Version(argparse._HelpAction):
    def __call__(self, parser: argparse.ArgumentParser, *_: object, **__: object) -> NoReturn:
        try:
            version = importlib.metadata.version(DISTRIBUTION)
        except importlib.metadata.PackageNotFoundError:
            version = "(not installed)"
        sys.stdout.write(f"{parser.prog.partition(' ')[0]} {version}\n")
        parser.exit()

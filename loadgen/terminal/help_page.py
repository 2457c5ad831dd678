"""The text of `--help` and `--help-all`: usage, sections of flags with defaults and units, examples, exit codes."""

import argparse
import re
import shutil
import textwrap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from loadgen.terminal.flags import Long, PlainSwitch, Rare, long_name, variable_of

MOST_COLUMNS, HELP_COLUMN, EXIT_CODE_COLUMN = 100, 26, 12
# Stands for a space inside quotes while lines are broken.
NO_BREAK = "\0"
ARGUMENTS, OUTPUT, GENERAL = "Arguments", "Output", "General"
OF_OUTPUT = ("--out", "--json", "--export", "--dry-run", "--junit", "--md", "--metrics", "--output", "--web")
OF_GENERAL = ("--help", "--help-all", "--version", "--quiet", "--verbose")


@dataclass(frozen=True, slots=True)
class HelpPage:
    """The help of one command. prefix: of the environment variables that set its flags."""

    examples: Sequence[str] = ()
    exit_codes: str = ""
    prefix: str = ""

    def render(self, parser: argparse.ArgumentParser, *, is_whole: bool) -> str:
        """is_whole: with the rare flags and the name of each flag's variable."""
        formatter = _Formatter(parser.prog, self.prefix if is_whole else "")
        formatter.add_text(textwrap.fill(parser.description or "", formatter.columns))
        for title, description, actions in _sections(parser):
            shown = [action for action in actions if is_whole or not isinstance(action.help, Rare)]
            if shown:
                formatter.start_section(title)
                formatter.add_text(textwrap.fill(description, formatter.columns) if description else None)
                formatter.add_arguments(shown)
                formatter.end_section()
        usage = "usage: " + usage_of(parser)
        codes = "\n".join(_hanging(line, formatter.columns) for line in self.exit_codes.splitlines())
        examples = self._examples(formatter.columns)
        notes = (textwrap.fill(note, formatter.columns) for note in self._notes(parser, is_whole))
        tail = "\n\n".join(filter(None, (examples, *notes, codes)))
        return "\n\n".join(filter(None, (usage, formatter.format_help().strip("\n"), tail))) + "\n"

    def _examples(self, columns: int) -> str:
        lines = (_continued(line, columns) for line in self.examples)
        return "\n".join(("examples:", *lines)) if self.examples else ""

    def _notes(self, parser: argparse.ArgumentParser, is_whole: bool) -> Iterator[str]:
        if self.prefix and not is_whole:
            hidden = sum(isinstance(action.help, Rare) for action in parser._actions)
            more = f"{hidden} more flags and " if hidden else ""
            yield f"--help-all prints {more}the environment variable of each flag."
        if self.prefix and is_whole:
            yield (
                f"Each flag has an environment variable, such as {self.prefix}OUT. A flag overrides its variable, "
                "which overrides the file, which overrides the default. A switch takes true or false; a repeatable "
                "flag takes one value a line."
            )


def _continued(line: str, columns: int) -> str:
    """An example in lines that a shell takes as one: it is broken before a flag, after a backslash."""
    rows = [""]
    for part in re.split(r" (?=--)", line):
        if rows[-1] and len(rows[-1]) + len(part) + 5 > columns:
            rows.append("")
        rows[-1] += f" {part}" if rows[-1] else part
    return "  " + " \\\n      ".join(rows)


def _hanging(line: str, columns: int) -> str:
    """A row of the exit codes, whose second line begins below its text."""
    return textwrap.fill(line, columns, subsequent_indent=" " * EXIT_CODE_COLUMN, break_on_hyphens=False)


def usage_of(parser: argparse.ArgumentParser) -> str:
    """The command, its flags as one word, and its positional words."""
    formatter = _Formatter(parser.prog, "")
    positional = [
        formatter._format_args(action, _metavar(action)) for action in parser._actions if not action.option_strings
    ]
    return " ".join((parser.prog, "[FLAGS]", *positional))


def _metavar(action: argparse.Action) -> str:
    return action.metavar if isinstance(action.metavar, str) else action.dest.upper()


def _sections(parser: argparse.ArgumentParser) -> Iterator[tuple[str, str | None, list[argparse.Action]]]:
    """Title, description and flags: arguments, the command's own flags, its named sections, output, general flags."""
    own: list[argparse.Action] = []
    output: list[argparse.Action] = []
    general: list[argparse.Action] = []
    for action in parser._optionals._group_actions:
        name = long_name(action)
        (general if name in OF_GENERAL else output if name in OF_OUTPUT else own).append(action)
    yield ARGUMENTS, None, parser._positionals._group_actions
    yield parser.prog.split()[-1].capitalize(), None, own
    for group in parser._action_groups:
        if group.title == OUTPUT:
            output += group._group_actions
        elif group not in (parser._positionals, parser._optionals):
            yield group.title or "", group.description, group._group_actions
    yield OUTPUT, None, output
    yield GENERAL, None, general


class _Formatter(argparse.RawDescriptionHelpFormatter):
    """argparse's own, with one metavar per flag, and the variable of each flag if there is a prefix."""

    def __init__(self, prog: str, prefix: str) -> None:
        self.columns = min(shutil.get_terminal_size().columns, MOST_COLUMNS) - 2
        super().__init__(prog, max_help_position=HELP_COLUMN, width=self.columns)
        self._prefix = prefix

    def _split_lines(self, text: str, width: int) -> list[str]:
        """Lines of a description: names with hyphens, and quoted words of a command, are not broken."""
        whole = re.sub(
            r"\"[^\"]{1,40}\"|`[^`]{1,40}`", lambda found: found[0].replace(" ", NO_BREAK), " ".join(text.split())
        )
        return [line.replace(NO_BREAK, " ") for line in textwrap.wrap(whole, width, break_on_hyphens=False)]

    def _metavar_formatter(self, action: argparse.Action, default_metavar: str) -> Callable[[int], tuple[str, ...]]:
        """Choices as `a|b`, as in the types of settings, instead of argparse's `{a,b}`."""
        if action.metavar is None and action.choices is not None:
            return lambda size: ("|".join(map(str, action.choices or ())),) * size
        return super()._metavar_formatter(action, default_metavar)

    def _format_action_invocation(self, action: argparse.Action) -> str:
        if not action.option_strings or isinstance(action, argparse._SubParsersAction):
            return super()._format_action_invocation(action)
        names = action.option_strings
        if isinstance(action, PlainSwitch):
            names = [name for name in names if name != action.negative]
        shown = ", ".join(names)
        if action.nargs == 0:
            return shown
        return f"{shown} {self._format_args(action, _metavar(action))}"

    def _expand_help(self, action: argparse.Action) -> str:
        if isinstance(action.help, Long) and not self._prefix:
            return action.help.brief
        text = super()._expand_help(action)
        variable = variable_of(action, self._prefix) if self._prefix else None
        return f"{text} [{variable}]" if variable else text

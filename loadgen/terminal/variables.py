"""Environment variables of a command's flags, as words of its command line: a flag overrides its variable."""

import argparse
from collections.abc import Iterator, Mapping, Sequence

from loadgen.errors import UsageError
from loadgen.terminal.flags import Switch, long_name, variable_of

BOOLEANS = {"true": True, "1": True, "false": False, "0": False}


def words_of_variables(
    parser: argparse.ArgumentParser, words: Sequence[str], environ: Mapping[str, str], prefix: str
) -> tuple[list[str], list[str]]:
    """The words that set the flags of a command from the environment, and the variables that were used.

    words: those of the command line after the command; a flag among them leaves its variable unused. An empty variable
    counts as unset. Raises UsageError for a switch that is neither true nor false.
    """
    given = {word.partition("=")[0] for word in words}
    found: list[str] = []
    used: list[str] = []
    for action in parser._actions:
        variable = variable_of(action, prefix)
        value = environ.get(variable, "") if variable else ""
        if variable and value and given.isdisjoint(action.option_strings):
            found += _words(action, variable, value)
            used.append(variable)
    return found, used


def _words(action: argparse.Action, variable: str, value: str) -> Iterator[str]:
    name = long_name(action)
    if isinstance(action, Switch):
        if value.lower() not in BOOLEANS:
            raise UsageError(f"{variable} is {value!r}, but must be true or false")
        word = name if BOOLEANS[value.lower()] else action.negative
        if word is not None:
            yield word
        return
    values = value.splitlines() if isinstance(action, argparse._AppendAction) else [value]
    for each in filter(None, map(str.strip, values)):
        yield f"{name}={each}"

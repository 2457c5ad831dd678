"""Environment variables of a command's flags, as words of its command line: a flag overrides its variable."""

import argparse
from collections.abc import Collection, Iterator, Mapping, Sequence

from loadgen.errors import UsageError
from loadgen.terminal.flags import Switch, long_name, variable_of
from loadgen.terminal.suggestion import nearest_word

# Below this likeness a name with the prefix is of something else, such as a service that Kubernetes names.
MISSPELT_LIKENESS = 0.75
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


def variables_of(parser: argparse.ArgumentParser, prefix: str) -> set[str]:
    """The variables of every flag of a parser and of the words below it."""
    found = {variable_of(action, prefix) for action in parser._actions} - {None}
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            found = found.union(*(variables_of(each, prefix) for each in action.choices.values()))
    return {name for name in found if name}


def misspelt_variables(environ: Mapping[str, str], known: Collection[str], prefix: str) -> Iterator[str]:
    """A sentence for each set variable that is no setting and is like the name of one.

    >>> list(misspelt_variables({"TGI_BENCH_CONCURENCY": "8"}, ["TGI_BENCH_CONCURRENCY"], "TGI_BENCH_"))
    ["TGI_BENCH_CONCURENCY sets nothing; did you mean 'TGI_BENCH_CONCURRENCY'?"]
    """
    names = {name.removeprefix(prefix) for name in known}
    for variable in sorted(set(environ) - set(known)):
        meant = nearest_word(variable.removeprefix(prefix), names, MISSPELT_LIKENESS)
        if meant is not None:
            yield f"{variable} sets nothing; did you mean {prefix + meant!r}?"

"""Keyword arguments of the Python API as the words of a command, so that both have the same checks and defaults."""

import argparse
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

from loadgen.config.bench_config import BenchConfig
from loadgen.config.parsing import flag_name
from loadgen.errors import UsageError

COMMAND_ONLY = ("json", "dry_run", "export", "join", "quiet", "verbose")
"""Flags that a call does not have: for the output of a command, and for work without a result."""


def words_of(arguments: Mapping[str, Any], positional: Sequence[object] = ()) -> list[str]:
    """The words of a command line. Raises UsageError for a flag that only a command has.

    >>> words_of({"max_in_flight": 64, "slo": ["ttft_p95_ms < 500"], "stream": False, "rate": None, "quick": True})
    ['--max-in-flight=64', '--slo=ttft_p95_ms < 500', '--no-stream', '--quick']
    """
    for name in COMMAND_ONLY:
        if arguments.get(name):
            raise UsageError(f"`{name}` is {arguments[name]!r} but is a flag of the command; a call does not take it")
    words = [word for name, value in arguments.items() for word in _words(name, value)]
    return [*(str(word) for word in positional), *words]


def parse_call(add_flags: Callable[[argparse.ArgumentParser], None], words: Sequence[str]) -> argparse.Namespace:
    """The flags of a command, from words. Raises UsageError where the command ends with its usage."""
    parser = _CallParser(add_help=False, allow_abbrev=False)
    add_flags(parser)
    return parser.parse_args(words)


class _CallParser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(message)


def _words(name: str, value: Any) -> Iterator[str]:
    match value:
        case None | ():
            return
        case bool() if name not in BenchConfig.model_fields:
            if value:
                yield flag_name(name)
        case bool():
            yield flag_name(name) if value else flag_name(f"no_{name}")
        case list() | tuple():
            for each in value:
                yield f"{flag_name(name)}={each}"
        case Mapping():
            yield f"{flag_name(name)}={json.dumps(value)}"
        case _:
            yield f"{flag_name(name)}={value}"

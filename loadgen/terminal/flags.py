"""Kinds of flags: switches, values of a list, flags that only `--help-all` shows, and the sections of a help page."""

import argparse
from collections.abc import Sequence
from typing import Any, Self

NO = "--no-"


class Switch(argparse.Action):
    """`--x` and `--no-x`, without a value. None if neither is given."""

    def __init__(self, option_strings: Sequence[str], dest: str, **settings: Any) -> None:
        positive = [name for name in option_strings if name.startswith("--") and not name.startswith(NO)]
        names = [*option_strings, *(NO + name.removeprefix("--") for name in positive)]
        super().__init__(names, dest, nargs=0, **settings)

    def __call__(
        self,
        _parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        _values: object,
        option_string: str | None = None,
    ) -> None:
        is_negated = option_string not in self.option_strings[: self._num_given]
        setattr(namespace, self.dest, not is_negated)

    @property
    def _num_given(self) -> int:
        """Names that switch on; a flag that itself begins with `--no-` has no other form."""
        negated = [name for name in self.option_strings if name.startswith(NO)]
        return len(self.option_strings) - len(negated) or len(self.option_strings)

    @property
    def negative(self) -> str | None:
        """The name that switches off."""
        off = self.option_strings[self._num_given :]
        return off[0] if off else None


class PlainSwitch(Switch):
    """A switch that is off by default; its help shows the positive form alone."""

    def __init__(self, option_strings: Sequence[str], dest: str, **settings: Any) -> None:
        super().__init__(option_strings, dest, **{"default": False, **settings})


class Rare(str):
    """The help of a flag that `--help-all` shows and `--help` leaves out."""

    __slots__ = ()


class Long(str):
    """The help of a flag of which `--help` shows only `brief`."""

    brief: str

    @classmethod
    def of(cls, text: str, brief: str) -> Self:
        long = cls(text)
        long.brief = brief
        return long


class OneOf(str):
    """A metavar whose values are known: `values` complete it."""

    values: tuple[str, ...]

    @classmethod
    def of(cls, name: str, values: Sequence[str]) -> Self:
        metavar = cls(name)
        metavar.values = tuple(values)
        return metavar


def section(parser: argparse.ArgumentParser, title: str, description: str | None = None) -> argparse._ArgumentGroup:
    """The section of a help page, made on first use."""
    found = next((group for group in parser._action_groups if group.title == title), None)
    return found or parser.add_argument_group(title, description)


def variable_of(action: argparse.Action, prefix: str) -> str | None:
    """The environment variable of a flag: `--max-in-flight` is TGI_BENCH_MAX_IN_FLIGHT. None for a positional word."""
    name = long_name(action)
    is_setting = name is not None and not isinstance(action, argparse._HelpAction | argparse._VersionAction)
    return f"{prefix}{name.removeprefix('--').replace('-', '_').upper()}" if is_setting and name else None


def long_name(action: argparse.Action) -> str | None:
    """The first long name of a flag."""
    return next((name for name in action.option_strings if name.startswith("--")), None)

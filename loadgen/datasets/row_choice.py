"""Which rows of a trace or a conversation file make the load."""

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol, TypeVar


class Row(Protocol):
    """What a choice looks at; empty texts where a file does not say."""

    @property
    def input_tokens(self) -> int: ...
    @property
    def output_tokens(self) -> int: ...
    @property
    def model(self) -> str: ...
    @property
    def log_type(self) -> str: ...


AnyRow = TypeVar("AnyRow", bound=Row)


@dataclass(frozen=True, slots=True)
class LengthRange:
    """Token counts from `least` to `most`, both included; None is no bound.

    >>> 5 in LengthRange(4, 8), 9 in LengthRange(4, 8), 9 in LengthRange()
    (True, False, True)
    """

    least: int | None = None
    most: int | None = None

    def __contains__(self, tokens: int) -> bool:
        return (self.least is None or tokens >= self.least) and (self.most is None or tokens <= self.most)


@dataclass(frozen=True, slots=True)
class RowChoice:
    """The rows that pass every filter, of those all but the first `skip`, of those the first `limit`.

    `models` and `log_types` name what BurstGPT's columns must hold; empty lets everything pass.
    """

    skip: int = 0
    limit: int | None = None
    input_tokens: LengthRange = LengthRange()
    output_tokens: LengthRange = LengthRange()
    models: tuple[str, ...] = ()
    log_types: tuple[str, ...] = ()

    def of(self, rows: Iterable[AnyRow]) -> Iterator[AnyRow]:
        """The chosen rows, in order; no more rows are taken than are needed."""
        end = None if self.limit is None else self.skip + self.limit
        return itertools.islice((row for row in rows if self.takes(row)), self.skip, end)

    def takes(self, row: Row) -> bool:
        """Whether a row passes the filters."""
        return (
            row.input_tokens in self.input_tokens
            and row.output_tokens in self.output_tokens
            and (not self.models or row.model in self.models)
            and (not self.log_types or row.log_type in self.log_types)
        )


EVERY_ROW = RowChoice()

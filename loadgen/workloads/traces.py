"""Traces of production services: arrival times and lengths from a file, generated text of those lengths."""

import csv
import datetime
import itertools
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TextIO

from loadgen.errors import UsageError
from loadgen.workloads.prompts.prompt import Prompt, ServerLimits, marker
from loadgen.workloads.prompts.vocabulary import Vocabulary

AZURE_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
BURSTGPT_COLUMNS = ("Timestamp", "Request tokens", "Response tokens")
MOONCAKE_KEYS = ("timestamp", "input_length", "output_length")
MOONCAKE_BLOCK_TOKENS = 512


@dataclass(frozen=True, slots=True)
class TraceRow:
    """One request of a trace; `hash_ids` are the blocks of its prompt, if the trace has them."""

    arrival_ns: int
    input_tokens: int
    output_tokens: int
    hash_ids: tuple[int, ...] = ()
    model: str = ""
    log_type: str = ""


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
    """Filters rows, then skips the first `skip` and takes the first `limit` of the others.

    `models` and `log_types` filter the columns of BurstGPT; an empty filter accepts every row.
    """

    skip: int = 0
    limit: int | None = None
    input_tokens: LengthRange = LengthRange()
    output_tokens: LengthRange = LengthRange()
    models: tuple[str, ...] = ()
    log_types: tuple[str, ...] = ()

    def select(self, rows: Iterable[TraceRow]) -> Iterator[TraceRow]:
        """The chosen rows, in order; reads no more rows than needed."""
        end = None if self.limit is None else self.skip + self.limit
        return itertools.islice((row for row in rows if self.accepts(row)), self.skip, end)

    def accepts(self, row: TraceRow) -> bool:
        """Whether a row passes the filters."""
        return (
            row.input_tokens in self.input_tokens
            and row.output_tokens in self.output_tokens
            and (not self.models or row.model in self.models)
            and (not self.log_types or row.log_type in self.log_types)
        )


EVERY_ROW = RowChoice()


@dataclass(frozen=True, slots=True)
class TracePrompts:
    """The prompts of a trace in order of arrival; with `loops`, repeated with different texts.

    `block_tokens` is the number of tokens per hash in `hash_ids`.
    """

    name: str
    rows: Sequence[TraceRow]
    vocabulary: Vocabulary
    limits: ServerLimits
    seed: int
    text_key: str
    is_cold: bool = False
    loops: bool = False
    block_tokens: int = MOONCAKE_BLOCK_TOKENS

    def __iter__(self) -> Iterator[Prompt]:
        rows: Iterable[TraceRow] = itertools.cycle(self.rows) if self.loops else self.rows
        for index, row in enumerate(rows):
            yield self.prompt(index, row)

    def endless(self) -> Iterator[Prompt]:
        """The prompts, then the trace again and again, each time with a new salt for texts and blocks."""
        again = (
            replace(self, name=f"{self.name}-drain{number}", text_key=f"{self.text_key}:drain{number}")
            for number in itertools.count(1)
        )
        return itertools.chain(self, itertools.chain.from_iterable(again))

    def prompt(self, index: int, row: TraceRow) -> Prompt:
        input_tokens, output_tokens = self.limits.clip(row.input_tokens, row.output_tokens)
        input_tokens = max(input_tokens, self.vocabulary.shortest)
        shared = self._shared_parts(index, row.hash_ids)
        own = (input_tokens, f"text:{self.text_key}:{index}")
        return Prompt(
            prompt_id=f"{self.name}-{index}",
            text="".join(self.vocabulary.compose([*shared, own], input_tokens)),
            planned_input_tokens=row.input_tokens,
            planned_output_tokens=row.output_tokens,
            input_tokens=input_tokens,
            output_tokens=output_tokens,
            arrival_ns=row.arrival_ns,
            parts=shared,
        )

    def _shared_parts(self, index: int, hash_ids: Sequence[int]) -> tuple[tuple[int, str], ...]:
        """Equal blocks for equal hashes: an opener, then one block of words per hash. The tail of a text is unique."""
        blocks = [(self.block_tokens, f"block:{self.text_key}:{hash_id}") for hash_id in hash_ids]
        blocks = [(self.vocabulary.shortest, f"opener:{self.text_key}"), *blocks] if blocks else []
        return (*marker(self.is_cold and bool(hash_ids), f"{self.text_key}:{index}"), *blocks)


def read_azure(path: Path, choice: RowChoice = EVERY_ROW) -> list[TraceRow]:
    """The rows of an Azure LLM inference CSV. Raises UsageError naming file, line and column."""
    with _open(path) as file:
        return _in_order(choice.select(_azure_rows(file, path)), path)


def _azure_rows(file: TextIO, path: Path) -> Iterator[TraceRow]:
    reader = _csv_reader(file, path, "azure_llm", AZURE_COLUMNS)
    for number, row in enumerate(reader, start=2):
        where = f"{path}:{number}"
        yield TraceRow(
            _azure_time_ns(row["TIMESTAMP"], where),
            _count(row["ContextTokens"], "ContextTokens", where),
            _count(row["GeneratedTokens"], "GeneratedTokens", where),
        )


def _csv_reader(file: TextIO, path: Path, name: str, columns: Sequence[str]) -> "csv.DictReader[str]":
    """Raises UsageError if a column is missing."""
    reader = csv.DictReader(file)
    missing = [column for column in columns if column not in (reader.fieldnames or ())]
    if missing:
        an = "an" if name[0] in "aeiou" else "a"
        raise UsageError(f"{path}: no column {missing[0]!r}; {an} {name} trace has {', '.join(columns)}")
    return reader


def read_burstgpt(path: Path, choice: RowChoice = EVERY_ROW) -> list[TraceRow]:
    """The rows of a BurstGPT CSV, without rows that have no answer: those were failures.

    Raises UsageError naming file, line and column.
    """
    with _open(path) as file:
        return _in_order(choice.select(_burstgpt_rows(file, path)), path)


def _burstgpt_rows(file: TextIO, path: Path) -> Iterator[TraceRow]:
    for number, row in enumerate(_csv_reader(file, path, "burstgpt", BURSTGPT_COLUMNS), start=2):
        where = f"{path}:{number}"
        output_tokens = _count(row["Response tokens"], "Response tokens", where, least=0)
        if output_tokens:
            yield TraceRow(
                _seconds_ns(row["Timestamp"], where),
                _count(row["Request tokens"], "Request tokens", where),
                output_tokens,
                model=row.get("Model") or "",
                log_type=row.get("Log Type") or "",
            )


def read_mooncake(path: Path, choice: RowChoice = EVERY_ROW) -> list[TraceRow]:
    """The rows of a Mooncake JSONL trace. Raises UsageError naming file, line and key."""
    with _open(path) as file:
        return _in_order(choice.select(_mooncake_rows(file, path)), path)


def _mooncake_rows(file: TextIO, path: Path) -> Iterator[TraceRow]:
    for number, line in enumerate(file, start=1):
        where = f"{path}:{number}"
        row = _json_object(line, where)
        missing = [key for key in MOONCAKE_KEYS if key not in row]
        if missing:
            raise UsageError(f"{where}: no key {missing[0]!r}; a mooncake trace has {', '.join(MOONCAKE_KEYS)}")
        hash_ids = row.get("hash_ids", [])
        if not isinstance(hash_ids, list) or not all(isinstance(each, int) for each in hash_ids):
            raise UsageError(f"{where}: `hash_ids` is not a list of whole numbers")
        yield TraceRow(
            _count(row["timestamp"], "timestamp", where, least=0) * 1_000_000,
            _count(row["input_length"], "input_length", where),
            _count(row["output_length"], "output_length", where),
            tuple(hash_ids),
        )


READERS = {"azure_llm": read_azure, "burstgpt": read_burstgpt, "mooncake": read_mooncake}


def _open(path: Path) -> TextIO:
    try:
        return path.open(encoding="utf-8", newline="")
    except OSError as error:
        raise UsageError(f"`trace_file` is {str(path)!r}: {error.strerror}; give a readable trace file") from error


def _in_order(rows: Iterable[TraceRow], path: Path) -> list[TraceRow]:
    try:
        ordered = sorted(rows, key=lambda row: row.arrival_ns)
    except (UnicodeDecodeError, csv.Error) as error:
        raise UsageError(f"{path}: {error}") from error
    if not ordered:
        raise UsageError(f"{path}: the trace has no requests, or none passes the filters")
    return ordered


def _json_object(line: str, where: str) -> dict[str, object]:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{where}: not JSON ({error})") from error
    if not isinstance(row, dict):
        raise UsageError(f"{where}: not a JSON object")
    return row


def _azure_time_ns(text: str | None, where: str) -> int:
    """Parse a UTC timestamp with up to seven decimals, which datetime does not accept."""
    whole, _, fraction = (text or "").partition(".")
    try:
        at = datetime.datetime.strptime(whole, "%Y-%m-%d %H:%M:%S").replace(tzinfo=datetime.UTC)
        nanoseconds = int(fraction[:9].ljust(9, "0"))
    except ValueError as error:
        raise UsageError(f"{where}: `TIMESTAMP` is {text!r}, not a time like 2023-11-16 18:15:46.6805900") from error
    return int(at.timestamp()) * 1_000_000_000 + nanoseconds


def _seconds_ns(text: str | None, where: str) -> int:
    try:
        return round(float(text or "") * 1e9)
    except (ValueError, OverflowError):
        raise UsageError(f"{where}: `Timestamp` is {text!r}, not a number of seconds") from None


def _count(value: object, name: str, where: str, least: int = 1) -> int:
    try:
        number = int(value)  # type: ignore[call-overload]
    except (TypeError, ValueError, OverflowError):
        raise UsageError(f"{where}: `{name}` is {value!r}, not a whole number") from None
    if number < least:
        raise UsageError(f"{where}: `{name}` is {number}, below {least}")
    return int(number)

"""Traces of production services: arrival times and lengths from a file, text made to those lengths."""

import csv
import datetime
import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from loadgen.datasets.prompt import Limits, Prompt
from loadgen.datasets.vocabulary import Vocabulary
from loadgen.errors import UsageError

AZURE_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
MOONCAKE_KEYS = ("timestamp", "input_length", "output_length")
MOONCAKE_BLOCK_TOKENS = 512


@dataclass(frozen=True, slots=True)
class TraceRow:
    """One request of a trace; `hash_ids` names the blocks of its prompt where the trace tells them apart."""

    arrival_ns: int
    input_tokens: int
    output_tokens: int
    hash_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Trace:
    """The prompts of a trace in order of arrival, once through."""

    name: str
    rows: Sequence[TraceRow]
    vocabulary: Vocabulary
    limits: Limits
    seed: int

    def __iter__(self) -> Iterator[Prompt]:
        for index, row in enumerate(self.rows):
            yield self.prompt(index, row)

    def prompt(self, index: int, row: TraceRow) -> Prompt:
        input_tokens, output_tokens = self.limits.clip(row.input_tokens, row.output_tokens)
        input_tokens = max(input_tokens, self.vocabulary.shortest)
        return Prompt(
            prompt_id=f"{self.name}-{index}",
            text=self._text(index, input_tokens, row.hash_ids),
            planned_input_tokens=row.input_tokens,
            planned_output_tokens=row.output_tokens,
            input_tokens=input_tokens,
            output_tokens=output_tokens,
            arrival_ns=row.arrival_ns,
        )

    def _text(self, index: int, tokens: int, hash_ids: Sequence[int]) -> str:
        """Equal hashes give equal text: every prompt has the same opener, then one block of words per hash."""
        if not hash_ids:
            return self.vocabulary.write(tokens, f"text:{self.seed}:{index}")
        opener = self.vocabulary.openers[0]
        pieces = [opener.text]
        left = tokens - self.vocabulary.special_tokens - opener.tokens
        for hash_id in hash_ids:
            words = random.Random(f"block:{self.seed}:{hash_id}")
            block = self.vocabulary.continue_text(min(left, MOONCAKE_BLOCK_TOKENS), words)
            pieces.append(block)
            left -= min(left, MOONCAKE_BLOCK_TOKENS)
        if left > 0:
            pieces.append(self.vocabulary.continue_text(left, random.Random(f"tail:{self.seed}:{index}")))
        return "".join(pieces)


def read_azure(path: Path, limit: int | None = None) -> list[TraceRow]:
    """The rows of an Azure LLM inference CSV. Raises UsageError naming file, line and column."""
    rows: list[TraceRow] = []
    with _open(path) as file:
        reader = csv.DictReader(file)
        missing = [name for name in AZURE_COLUMNS if name not in (reader.fieldnames or ())]
        if missing:
            raise UsageError(f"{path}: no column {missing[0]!r}; an azure_llm trace has {', '.join(AZURE_COLUMNS)}")
        for number, row in enumerate(reader, start=2):
            if limit is not None and len(rows) == limit:
                break
            where = f"{path}:{number}"
            rows.append(
                TraceRow(
                    _azure_time_ns(row["TIMESTAMP"], where),
                    _count(row["ContextTokens"], "ContextTokens", where),
                    _count(row["GeneratedTokens"], "GeneratedTokens", where),
                )
            )
    return _in_order(rows, path)


def read_mooncake(path: Path, limit: int | None = None) -> list[TraceRow]:
    """The rows of a Mooncake JSONL trace. Raises UsageError naming file, line and key."""
    rows: list[TraceRow] = []
    with _open(path) as file:
        for number, line in enumerate(file, start=1):
            if limit is not None and len(rows) == limit:
                break
            where = f"{path}:{number}"
            row = _json_object(line, where)
            missing = [key for key in MOONCAKE_KEYS if key not in row]
            if missing:
                raise UsageError(f"{where}: no key {missing[0]!r}; a mooncake trace has {', '.join(MOONCAKE_KEYS)}")
            hash_ids = row.get("hash_ids", [])
            if not isinstance(hash_ids, list) or not all(isinstance(each, int) for each in hash_ids):
                raise UsageError(f"{where}: `hash_ids` is not a list of whole numbers")
            rows.append(
                TraceRow(
                    _count(row["timestamp"], "timestamp", where, least=0) * 1_000_000,
                    _count(row["input_length"], "input_length", where),
                    _count(row["output_length"], "output_length", where),
                    tuple(hash_ids),
                )
            )
    return _in_order(rows, path)


READERS = {"azure_llm": read_azure, "mooncake": read_mooncake}


def _open(path: Path) -> TextIO:
    try:
        return path.open(encoding="utf-8", newline="")
    except OSError as error:
        raise UsageError(f"`trace_file` is {str(path)!r}: {error.strerror}") from error


def _in_order(rows: list[TraceRow], path: Path) -> list[TraceRow]:
    if not rows:
        raise UsageError(f"{path}: the trace has no requests")
    return sorted(rows, key=lambda row: row.arrival_ns)


def _json_object(line: str, where: str) -> dict[str, object]:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise UsageError(f"{where}: not JSON ({error})") from error
    if not isinstance(row, dict):
        raise UsageError(f"{where}: not a JSON object")
    return row


def _azure_time_ns(text: str | None, where: str) -> int:
    """A UTC timestamp with up to seven decimals, which datetime does not take."""
    whole, _, fraction = (text or "").partition(".")
    try:
        at = datetime.datetime.strptime(whole, "%Y-%m-%d %H:%M:%S").replace(tzinfo=datetime.UTC)
        nanoseconds = int(fraction[:9].ljust(9, "0"))
    except ValueError as error:
        raise UsageError(f"{where}: `TIMESTAMP` is {text!r}, not a time like 2023-11-16 18:15:46.6805900") from error
    return int(at.timestamp()) * 1_000_000_000 + nanoseconds


def _count(value: object, name: str, where: str, least: int = 1) -> int:
    try:
        number = int(value)  # type: ignore[call-overload]
    except (TypeError, ValueError):
        raise UsageError(f"{where}: `{name}` is {value!r}, not a whole number") from None
    if number < least:
        raise UsageError(f"{where}: `{name}` is {number}, below {least}")
    return int(number)

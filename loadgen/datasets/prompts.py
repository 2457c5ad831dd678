"""Prompts of the user's own: JSONL, CSV, or a plain file with one prompt a line."""

import csv
import itertools
import json
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from loadgen.datasets.lengths import Lengths
from loadgen.datasets.prompt import Limits, Prompt
from loadgen.errors import UsageError

TEXT_KEYS = ("prompt", "text", "inputs")
MESSAGES_KEY = "messages"


@dataclass(frozen=True, slots=True)
class Columns:
    """Where a file keeps what. `text` None: in the first of `TEXT_KEYS` there is; `output_tokens` None: nowhere."""

    text: str | None = None
    output_tokens: str | None = None

    @property
    def texts(self) -> tuple[str, ...]:
        return TEXT_KEYS if self.text is None else (self.text,)


@dataclass(frozen=True, slots=True)
class PromptRow:
    """One prompt of a file: a text or chat messages, and the length of its answer where the file knows it."""

    text: str = ""
    messages: tuple[dict[str, str], ...] | None = None
    output_tokens: int | None = None

    def begun_with(self, words: str) -> "PromptRow":
        """The same row with words before its text, or before that of its first message."""
        if self.messages is None:
            return replace(self, text=words + self.text)
        first = self.messages[0]
        return replace(self, messages=({**first, "content": words + first["content"]}, *self.messages[1:]))

    def as_text(self) -> str:
        """The prompt for a route that takes text; messages lose their roles."""
        if self.messages is None:
            return self.text
        return "\n".join(message["content"] for message in self.messages)


@dataclass(frozen=True, slots=True)
class PromptFile:
    """The prompts of a file in order, again from the top when all were sent.

    Their token lengths are the server's to say, so they are planned as unknown and only answers are clipped.
    """

    name: str
    rows: Sequence[PromptRow]
    output_tokens: Lengths
    limits: Limits
    seed: int
    is_cold: bool = False

    def __iter__(self) -> Iterator[Prompt]:
        for index in itertools.count():
            row = self.rows[index % len(self.rows)]
            rng = random.Random(f"lengths:{self.seed}:{index}")
            planned = row.output_tokens or self.output_tokens.draw(rng)
            row = row.begun_with(f"{rng.getrandbits(64):016x} ") if self.is_cold else row
            _, output_tokens = self.limits.clip(1, planned)
            yield Prompt(
                prompt_id=f"{self.name}-{index}",
                text=row.as_text(),
                messages=row.messages,
                planned_output_tokens=planned,
                output_tokens=output_tokens,
            )


def read_prompts(path: Path, columns: Columns = Columns()) -> list[PromptRow]:
    """The prompts of a `.jsonl`, `.csv` or plain text file. Raises UsageError naming file and line."""
    reader = READERS.get(path.suffix.lower(), _read_lines)
    try:
        rows = reader(path, columns)
    except OSError as error:
        raise UsageError(f"`prompts_file` is {str(path)!r}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"{path}: not UTF-8 text ({error.reason} at byte {error.start})") from error
    if not rows:
        raise UsageError(f"{path}: no prompts in it")
    return rows


def shuffled(rows: Sequence[PromptRow], seed: int) -> list[PromptRow]:
    """The rows in an order that the seed alone decides."""
    order = list(rows)
    random.Random(f"order:{seed}").shuffle(order)
    return order


def _read_jsonl(path: Path, columns: Columns) -> list[PromptRow]:
    rows = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            raise UsageError(f"{path}:{number}: not JSON ({error})") from error
        rows.append(_row_of(row, columns, f"{path}:{number}"))
    return rows


def _row_of(row: object, columns: Columns, where: str) -> PromptRow:
    if isinstance(row, str):
        return PromptRow(row)
    if not isinstance(row, Mapping):
        raise UsageError(f"{where}: neither a string nor an object")
    output_tokens = _output_tokens(row, columns, where)
    messages = row.get(MESSAGES_KEY) if columns.text is None else row.get(columns.text)
    if (columns.text is None and messages is not None) or isinstance(messages, list):
        return PromptRow(messages=_messages(messages, where), output_tokens=output_tokens)
    for key in columns.texts:
        if isinstance(row.get(key), str):
            return PromptRow(row[key], output_tokens=output_tokens)
    wanted = (*TEXT_KEYS, MESSAGES_KEY) if columns.text is None else columns.texts
    raise UsageError(f"{where}: none of {', '.join(wanted)} in it")


def _output_tokens(row: Mapping[str, object], columns: Columns, where: str) -> int | None:
    """The length of the answer where the file has a column for it. Raises UsageError."""
    if columns.output_tokens is None:
        return None
    value = row.get(columns.output_tokens)
    if value is None or value == "":
        return None
    if isinstance(value, bool) or not str(value).isascii() or not str(value).isdigit() or int(str(value)) < 1:
        raise UsageError(f"{where}: `{columns.output_tokens}` is {value!r}, not a number of tokens")
    return int(str(value))


def _messages(messages: object, where: str) -> tuple[dict[str, str], ...]:
    if not isinstance(messages, list) or not messages:
        raise UsageError(f"{where}: `messages` is no list of messages")
    for message in messages:
        if not isinstance(message, Mapping) or not all(
            isinstance(message.get(key), str) for key in ("role", "content")
        ):
            raise UsageError(f"{where}: a message needs `role` and `content` as strings")
    return tuple({"role": message["role"], "content": message["content"]} for message in messages)


def _read_csv(path: Path, columns: Columns) -> list[PromptRow]:
    with path.open(encoding="utf-8", newline="") as file:
        reader = csv.DictReader(file)
        names = reader.fieldnames or ()
        key = next((key for key in columns.texts if key in names), None)
        if key is None:
            raise UsageError(f"{path}: none of the columns {', '.join(columns.texts)} in it")
        if columns.output_tokens is not None and columns.output_tokens not in names:
            raise UsageError(f"{path}: no column {columns.output_tokens!r} in it")
        return [
            PromptRow(row[key] or "", output_tokens=_output_tokens(row, columns, f"{path}:{number}"))
            for number, row in enumerate(reader, start=2)
        ]


def _read_lines(path: Path, _columns: Columns) -> list[PromptRow]:
    return [PromptRow(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]


READERS = {".jsonl": _read_jsonl, ".ndjson": _read_jsonl, ".csv": _read_csv}

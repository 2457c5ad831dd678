"""Prompts from a file: JSONL, CSV, one prompt per line, or the JSON file of ShareGPT."""

import csv
import hashlib
import itertools
import json
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from loadgen.errors import UsageError
from loadgen.workloads.lengths import Lengths
from loadgen.workloads.prompts.planned_cache import text_parts
from loadgen.workloads.prompts.prompt import Prompt, ServerLimits

TEXT_KEYS = ("prompt", "text", "inputs")
MESSAGES_KEY = "messages"
ROW_NAME = "id"
LENGTH_KEYS = ("max_tokens", "max_completion_tokens", "max_new_tokens")
# Fields of a request that a row cannot set, and why.
REFUSED_KEYS = {
    "stream": "--stream sets it for all requests",
    "n": "each request has one answer",
    "best_of": "each request has one answer",
    "parameters": "its fields stand in the row itself",
}
# A CSV file has only texts, so its columns of these names are refused.
API_COLUMNS = (*LENGTH_KEYS, "tools", "tool_choice", "response_format", "adapter_id", "temperature", "stop", "grammar")


@dataclass(frozen=True, slots=True)
class Columns:
    """Column names. `text` None: the first of `TEXT_KEYS` in the file; `output_tokens` None: no such column."""

    text: str | None = None
    output_tokens: str | None = None

    @property
    def texts(self) -> tuple[str, ...]:
        return TEXT_KEYS if self.text is None else (self.text,)


@dataclass(frozen=True, slots=True)
class PromptRow:
    """One prompt of a file: a text or chat messages, the length of its answer if the file has it, and further fields.

    A message's content is a text, a list of parts, or absent if there are tool calls.
    """

    text: str = ""
    messages: tuple[dict[str, Any], ...] | None = None
    output_tokens: int | None = None
    fields: Mapping[str, Any] = field(default_factory=dict)

    def with_prefix(self, prefix: str) -> "PromptRow":
        """The row with a prefix before its text, or before the text of its first message."""
        if self.messages is None:
            return replace(self, text=prefix + self.text)
        first = self.messages[0]
        return replace(
            self, messages=({**first, "content": _prefixed(prefix, first.get("content"))}, *self.messages[1:])
        )

    def as_text(self) -> str:
        """The prompt for a text route; roles of messages are dropped."""
        if self.messages is None:
            return self.text
        return "\n".join(text_of(message.get("content")) for message in self.messages)

    def described(self) -> dict[str, Any]:
        """The row for the digest of a workload. A row without further fields has that of earlier versions."""
        parts = asdict(self)
        return parts if self.fields else {name: value for name, value in parts.items() if name != "fields"}


def text_of(content: Any) -> str:
    """The text of a message's content, without its other parts."""
    if isinstance(content, list):
        return "".join(text_of(part.get("text")) for part in content if isinstance(part, Mapping))
    return content if isinstance(content, str) else ""


def _prefixed(prefix: str, content: Any) -> Any:
    if not prefix:
        return content
    return [{"type": "text", "text": prefix}, *content] if isinstance(content, list) else prefix + (content or "")


@dataclass(frozen=True, slots=True)
class FilePrompts:
    """The prompts of a file in order, repeated from the start when all were sent.

    Their token lengths are unknown before the server counts them, so only answers are clipped. With a salt, a marker of
    16 characters stands before each prompt: one for the run, or one per prompt if the cache must stay cold.
    """

    name: str
    rows: Sequence[PromptRow]
    output_tokens: Lengths
    limits: ServerLimits
    seed: int
    salt: str | None = None
    is_cold: bool = False

    def __iter__(self) -> Iterator[Prompt]:
        for index in itertools.count():
            row = self.rows[index % len(self.rows)]
            rng = random.Random(f"lengths:{self.seed}:{index}")
            planned = row.output_tokens or self.output_tokens.draw(rng)
            row = row.with_prefix(self._marker(index))
            _, output_tokens = self.limits.clip(1, planned)
            yield Prompt(
                prompt_id=f"{self.name}-{index}",
                text=row.as_text(),
                messages=row.messages,
                planned_output_tokens=planned,
                output_tokens=output_tokens,
                parts=() if self.is_cold else text_parts(row.as_text()),
                fields=row.fields,
            )

    def _marker(self, index: int) -> str:
        if self.is_cold:
            return marker_text(f"{self.salt}:{index}")
        return "" if self.salt is None else marker_text(self.salt)


def marker_text(key: str) -> str:
    """Text before a prompt of a file, so that no earlier prompt has the same beginning."""
    return f"{hashlib.sha256(key.encode()).hexdigest()[:16]} "


def read_prompts(path: Path, columns: Columns = Columns()) -> list[PromptRow]:
    """The prompts of a `.jsonl`, `.csv` or plain text file. Raises UsageError naming file and line."""
    reader = READERS.get(path.suffix.lower(), _read_lines)
    try:
        rows = reader(path, columns)
    except OSError as error:
        raise UsageError(f"`prompts_file` is {str(path)!r}: {error.strerror}; give a readable file") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"{path}: not UTF-8 text ({error.reason} at byte {error.start})") from error
    if not rows:
        raise UsageError(f"{path}: it has no prompts")
    return rows


def shuffled(rows: Sequence[PromptRow], seed: int) -> list[PromptRow]:
    """The rows in an order that depends only on the seed."""
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
        except (ValueError, RecursionError) as error:
            raise UsageError(f"{path}:{number}: not JSON ({error})") from error
        rows.append(_row_of(row, columns, f"{path}:{number}"))
    return rows


def _row_of(row: object, columns: Columns, where: str) -> PromptRow:
    if isinstance(row, str):
        return PromptRow(row)
    if not isinstance(row, Mapping):
        raise UsageError(f"{where}: neither a string nor an object")
    key = _prompt_key(row, columns, where)
    output_tokens = _output_tokens(row, columns, where)
    own = {key, ROW_NAME, *LENGTH_KEYS, columns.output_tokens}
    fields = {name: value for name, value in row.items() if name not in own}
    refused = next((name for name in fields if name in (*TEXT_KEYS, MESSAGES_KEY, *REFUSED_KEYS)), None)
    if refused is not None:
        reason = REFUSED_KEYS.get(refused, f"the prompt is in `{key}`")
        raise UsageError(f"{where}: `{refused}` cannot be sent: {reason}; remove it")
    if isinstance(row[key], list):
        return PromptRow(messages=_messages(row[key], where), output_tokens=output_tokens, fields=fields)
    return PromptRow(row[key], output_tokens=output_tokens, fields=fields)


def _prompt_key(row: Mapping[str, object], columns: Columns, where: str) -> str:
    """The key of the prompt: messages before a text. Raises UsageError if there is none."""
    if columns.text is None and row.get(MESSAGES_KEY) is not None:
        if not isinstance(row[MESSAGES_KEY], list):
            raise UsageError(f"{where}: `messages` is not a list of messages")
        return MESSAGES_KEY
    for key in columns.texts:
        if isinstance(row.get(key), str) or (columns.text is not None and isinstance(row.get(key), list)):
            return key
    wanted = (*TEXT_KEYS, MESSAGES_KEY) if columns.text is None else columns.texts
    raise UsageError(f"{where}: it has none of {', '.join(wanted)}")


def _output_tokens(row: Mapping[str, object], columns: Columns, where: str) -> int | None:
    """The length of the answer, if the file has a column or a field of the API for it. Raises UsageError."""
    names = [columns.output_tokens, *LENGTH_KEYS] if columns.output_tokens is not None else LENGTH_KEYS
    given = [name for name in names if name is not None and row.get(name) not in (None, "")]
    if len(given) > 1:
        raise UsageError(f"{where}: both `{given[0]}` and `{given[1]}` set the length of the answer; remove one")
    if not given:
        return None
    value = row[given[0]]
    if isinstance(value, bool) or not str(value).isascii() or not str(value).isdigit() or int(str(value)) < 1:
        raise UsageError(f"{where}: `{given[0]}` is {value!r}, not a number of tokens")
    return int(str(value))


def _messages(messages: list[Any], where: str) -> tuple[dict[str, Any], ...]:
    if not messages:
        raise UsageError(f"{where}: `messages` is not a list of messages")
    for message in messages:
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str) or not _has_content(message):
            raise UsageError(f"{where}: a message needs `role`, and `content` as a string or as a list of parts")
    return tuple(dict(message) for message in messages)


def _has_content(message: Mapping[str, Any]) -> bool:
    content = message.get("content")
    if isinstance(content, list):
        return bool(content) and all(isinstance(part, Mapping) for part in content)
    return isinstance(content, str) or (content is None and bool(message.get("tool_calls")))


def _read_csv(path: Path, columns: Columns) -> list[PromptRow]:
    with path.open(encoding="utf-8", newline="") as file:
        reader = csv.DictReader(file)
        names = reader.fieldnames or ()
        key = next((key for key in columns.texts if key in names), None)
        if key is None:
            raise UsageError(f"{path}: it has none of the columns {', '.join(columns.texts)}")
        if columns.output_tokens is not None and columns.output_tokens not in names:
            raise UsageError(f"{path}: it has no column {columns.output_tokens!r}")
        unread = next((name for name in names if name in API_COLUMNS and name != columns.output_tokens), None)
        if unread is not None:
            raise UsageError(f"{path}: column `{unread}` is a field of a request; use JSONL, or rename the column")
        return [
            PromptRow(row[key] or "", output_tokens=_output_tokens(row, columns, f"{path}:{number}"))
            for number, row in enumerate(reader, start=2)
        ]


def _read_lines(path: Path, _columns: Columns) -> list[PromptRow]:
    return [PromptRow(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]


READERS = {".jsonl": _read_jsonl, ".ndjson": _read_jsonl, ".csv": _read_csv}

USER_ROLES = frozenset(("human", "user"))
ASSISTANT_ROLES = frozenset(("gpt", "chatgpt", "bard", "assistant"))


@dataclass(frozen=True, slots=True)
class Conversation:
    """The first question of a conversation and its answer."""

    question: str
    answer: str


def read_sharegpt(path: Path, limit: int | None = None) -> list[Conversation]:
    """The conversations that begin with a non-empty question and answer. Raises UsageError."""
    try:
        rows = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"`prompts_file` is {str(path)!r}: {error.strerror}; give a readable file") from error
    except ValueError as error:
        raise UsageError(f"{path}: not JSON ({error})") from error
    if not isinstance(rows, list):
        raise UsageError(f"{path}: not a list of conversations")
    found = [each for row in rows if (each := _conversation(row)) is not None]
    if not found:
        raise UsageError(f"{path}: no conversation begins with a question and an answer")
    return found[:limit]


def _conversation(row: object) -> Conversation | None:
    turns = row.get("conversations") if isinstance(row, Mapping) else None
    if not isinstance(turns, list) or len(turns) < 2:
        return None
    question, answer = (
        _text_of(turn, roles) for turn, roles in zip(turns, (USER_ROLES, ASSISTANT_ROLES), strict=False)
    )
    return Conversation(question, answer) if question and answer else None


def _text_of(turn: object, roles: frozenset[str]) -> str:
    if not isinstance(turn, Mapping) or turn.get("from") not in roles or not isinstance(turn.get("value"), str):
        return ""
    return str(turn["value"]).strip()

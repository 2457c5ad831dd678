"""ShareGPT conversations: the first question of each, and how long its answer was."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from loadgen.errors import UsageError

QUESTIONERS = frozenset(("human", "user"))
ANSWERERS = frozenset(("gpt", "chatgpt", "bard", "assistant"))


@dataclass(frozen=True, slots=True)
class Conversation:
    """The first question of a conversation and its answer."""

    question: str
    answer: str


def read_sharegpt(path: Path, limit: int | None = None) -> list[Conversation]:
    """The conversations that begin with a question and an answer, both not empty. Raises UsageError."""
    try:
        rows = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"`prompts_file` is {str(path)!r}: {error.strerror}") from error
    except ValueError as error:
        raise UsageError(f"{path}: not JSON ({error})") from error
    if not isinstance(rows, list):
        raise UsageError(f"{path}: not a list of conversations")
    found = [each for row in rows if (each := _conversation(row)) is not None]
    if not found:
        raise UsageError(f"{path}: no conversation in it begins with a question and an answer")
    return found[:limit]


def _conversation(row: object) -> Conversation | None:
    turns = row.get("conversations") if isinstance(row, Mapping) else None
    if not isinstance(turns, list) or len(turns) < 2:
        return None
    question, answer = (_said(turn, who) for turn, who in zip(turns, (QUESTIONERS, ANSWERERS), strict=False))
    return Conversation(question, answer) if question and answer else None


def _said(turn: object, who: frozenset[str]) -> str:
    if not isinstance(turn, Mapping) or turn.get("from") not in who or not isinstance(turn.get("value"), str):
        return ""
    return str(turn["value"]).strip()

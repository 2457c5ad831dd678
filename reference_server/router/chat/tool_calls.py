"""Tool calls: parses generated text, whole or token by token, into a function's name and the JSON of its arguments.

The grammar of tools.py forces the text to be `{"function": {"_name": NAME, ARGUMENTS…}}`.
"""

import json
import re
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NoReturn

import orjson

from reference_server.errors import ToolError
from reference_server.router.schemas.openai import ChatMessage

#: The id of a call that is not streamed, and of the first streamed one of a conversation.
FIRST_CALL_ID = "0"

_HEAD = re.compile(r'\s*\{\s*"function"\s*:\s*\{\s*"_name"\s*:\s*("(?:[^"\\]|\\.)*")\s*(,|(?=\}))')
_UNSIGNED = re.compile(r"[0-9]{1,19}")


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call. `arguments` is the compact JSON of an object, with the model's order of keys and spelling of numbers."""

    name: str
    arguments: str


def parse_call(text: str) -> ToolCall:
    """Parse a whole text. Raises `ToolError`.

    >>> parse_call('{ "function": {"_name": "f", "b": 1.50, "a": [ 1 ]}}')
    ToolCall(name='f', arguments='{"b":1.50,"a":[1]}')
    """
    try:
        match _DECODER.decode(text):
            case {"function": {"_name": str(name), **arguments}}:
                return ToolCall(name, orjson.dumps(arguments).decode())
        detail = "`function` with a `_name` is missing"
    except (ValueError, TypeError, RecursionError) as error:
        detail = str(error)
    raise ToolError(f"Failed to parse generated text: {detail} {json.dumps(text, ensure_ascii=False)}")


class CallReader:
    """Parses a call token by token: the texts that `add` returns, joined, are the JSON of the arguments.

    >>> reader = CallReader()
    >>> [reader.add(text) for text in ('{"function": {"_name": "f', '", "a":', ' "}"', '}}')]
    ['', '{ "a":', ' "}"', '}']
    """

    def __init__(self) -> None:
        self.name: str | None = None
        self._texts: list[str] = []
        self._depth = 0
        self._is_string = False
        self._is_escaped = False
        self._is_closed = False

    @property
    def is_closed(self) -> bool:
        """Whether the arguments are complete."""
        return self._is_closed

    @property
    def is_complete(self) -> bool:
        """Whether the text so far is a complete call."""
        if not self._is_closed:
            return False
        try:
            parse_call("".join(self._texts))
        except ToolError:
            return False
        return True

    def add(self, text: str) -> str:
        """The part of the arguments in the next token; the first part begins with their opening brace."""
        self._texts.append(text)
        if self.name is not None:
            return self._until_closed(text)
        so_far = "".join(self._texts)
        head = _HEAD.match(so_far)
        if head is None:
            return ""
        try:
            self.name = orjson.loads(head[1])
        except orjson.JSONDecodeError:
            return ""
        return self._until_closed("{" + so_far[head.end() :])

    def _until_closed(self, text: str) -> str:
        """`text` up to the closing brace of the arguments."""
        if self._is_closed:
            return ""
        for position, character in enumerate(text):
            if self._is_escaped:
                self._is_escaped = False
            elif self._is_string:
                self._is_escaped = character == "\\"
                self._is_string = character != '"'
            elif character == '"':
                self._is_string = True
            elif character in "{[":
                self._depth += 1
            elif character in "}]":
                self._depth -= 1
                if not self._depth:
                    self._is_closed = True
                    return text[: position + 1]
        return text


def next_call_id(messages: Sequence[ChatMessage]) -> str:
    """The id of a streamed call: the highest of the conversation plus one; random if one of them is not a number."""
    ids = [call.id for message in messages for call in message.tool_calls or ()]
    if not all(map(_UNSIGNED.fullmatch, ids)):
        return str(uuid.uuid4())
    return str(max(map(int, ids)) + 1) if ids else FIRST_CALL_ID


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


# Numbers keep their spelling: parsing and formatting would change 1.50 and 1e400.
_DECODER = json.JSONDecoder(parse_int=orjson.Fragment, parse_float=orjson.Fragment, parse_constant=_refuse_constant)

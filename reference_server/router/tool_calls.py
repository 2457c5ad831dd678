"""What a model calls: its text, whole or token by token, as the name of a function and the JSON of its arguments.

http-api.md sections 4.7 and 4.9. The text is `{"function": {"_name": NAME, ARGUMENTS…}}`, by the grammar of tools.py.
"""

import json
import re
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NoReturn

import orjson

from reference_server.errors import ToolError
from reference_server.router.schemas.openai import Message

#: The id of a call that is not streamed, and of the first streamed one of a conversation.
FIRST_CALL_ID = "0"

_HEAD = re.compile(r'\s*\{\s*"function"\s*:\s*\{\s*"_name"\s*:\s*("(?:[^"\\]|\\.)*")\s*(,|(?=\}))')
_UNSIGNED = re.compile(r"[0-9]{1,19}")


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call: `arguments` is the compact JSON of an object, numbers and order of the keys as the model wrote them."""

    name: str
    arguments: str


def parse_call(text: str) -> ToolCall:
    """The call that a whole text is. Raises `ToolError`.

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
    """A call read token by token: together, what `add` returns is the JSON of the arguments as the model spells it.

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
    def is_complete(self) -> bool:
        """Whether all that was added is a call."""
        if not self._is_closed:
            return False
        try:
            parse_call("".join(self._texts))
        except ToolError:
            return False
        return True

    def add(self, text: str) -> str:
        """What the next token adds to the arguments; the first that says something begins with their brace."""
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
        """`text` up to the brace that closes the arguments."""
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


def next_call_id(messages: Sequence[Message]) -> str:
    """The id of a streamed call: one above the highest in the conversation; random where one there is no number."""
    ids = [call.id for message in messages for call in message.tool_calls or ()]
    if not all(map(_UNSIGNED.fullmatch, ids)):
        return str(uuid.uuid4())
    return str(max(map(int, ids)) + 1) if ids else FIRST_CALL_ID


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")


# A number keeps its spelling: parsed and printed, 1.50 and 1e400 would be others.
_DECODER = json.JSONDecoder(parse_int=orjson.Fragment, parse_float=orjson.Fragment, parse_constant=_refuse_constant)

"""Chat templates: messages -> prompt, as TGI's template engine renders them, which differs from transformers.

Templates are untrusted: the environment is sandboxed, and operations that multiply text or numbers are bounded.
"""

import datetime
import functools
import json
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

import jinja2
import jinja2.meta
from jinja2.exceptions import SecurityError
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from reference_server.errors import StartupError, TemplateError

if TYPE_CHECKING:  # not imported in the worker process
    from reference_server.router.chat.tools import ToolOffer
    from reference_server.router.schemas.openai import ChatMessage

MAX_OUTPUT_CHARACTERS = 8_000_000

#: Filters that return iterators in Jinja, and lists in TGI's template engine.
_ITERATING_FILTERS = (
    "batch", "items", "map", "reject", "rejectattr", "reverse", "select", "selectattr", "slice", "unique",
)  # fmt: skip
_REPLACEMENTS = (
    ("messages[0]['content'][0]['text']", "messages[0]['content']"),
    ("{% generation %}", ""),
    ("{% endgeneration %}", ""),
)


@dataclass(frozen=True, slots=True)
class TemplateSource:
    """A template's text, not compiled, and the tokens it may print."""

    source: str
    bos_token: str | None = None
    eos_token: str | None = None

    def compile(self) -> "ChatTemplate":
        """Compile in this process. Raises `StartupError`."""
        return ChatTemplate(self.source, self.bos_token, self.eos_token)


class ChatTemplate:
    """A compiled template and the tokens it may print. Raises `StartupError` if it does not compile."""

    def __init__(
        self,
        source: str,
        bos_token: str | None = None,
        eos_token: str | None = None,
        max_characters: int = MAX_OUTPUT_CHARACTERS,
    ) -> None:
        self._max_characters = max_characters
        for old, new in _REPLACEMENTS:
            source = source.replace(old, new)
        self._constants = {"bos_token": bos_token, "eos_token": eos_token}
        environment = _Environment()
        try:
            self._template = environment.from_string(source)
            self._reads_tools = "tools" in jinja2.meta.find_undeclared_variables(environment.parse(source))
        except jinja2.TemplateError as error:
            raise StartupError(f"the chat template does not compile: {error}") from error

    def render(self, messages: "Sequence[ChatMessage]", offer: "ToolOffer | None" = None) -> str:
        """The prompt of a conversation. A last message of the assistant is left open, to be continued."""
        return self.render_conversation(**conversation_of(messages, offer))

    def render_conversation(
        self,
        turns: list[dict[str, str]],
        tools: list[dict[str, Any]] | None = None,
        tool_prompt: str | None = None,
    ) -> str:
        """Render the result of `conversation_of`."""
        if tools is not None and tool_prompt is not None:
            # If the template does not print the tools, append them to the last message.
            shown = "" if self._reads_tools else f"{json.dumps(tools, ensure_ascii=False, separators=(',', ':'))}\n"
            last = turns[-1]
            turns = [*turns[:-1], {**last, "content": f"{last['content']}\n---\n{shown}{tool_prompt}"}]
        text = self._render(messages=turns, tools=tools, add_generation_prompt=True, **self._constants)
        if turns and turns[-1]["role"] == "assistant":
            return _cut_after(text, turns[-1]["content"])
        return text

    def _render(self, **variables: Any) -> str:
        parts: list[str] = []
        size = 0
        try:
            for part in self._template.generate(**variables):
                size += len(part)
                if size > self._max_characters:
                    raise _RaisedError(f"the prompt has more than {self._max_characters} characters")
                parts.append(part)
        except MemoryError:
            raise
        except Exception as error:
            raise TemplateError(_describe(error)) from error
        return "".join(parts)


def conversation_of(messages: "Sequence[ChatMessage]", offer: "ToolOffer | None" = None) -> dict[str, Any]:
    """The template's variables. A last message that consists of tool calls gets no tool prompt."""
    conversation: dict[str, Any] = {
        "turns": [{"role": message.role, "content": message.flattened} for message in messages]
    }
    if offer is not None:
        conversation["tools"] = offer.described
        if messages and messages[-1].content is not None:
            conversation["tool_prompt"] = offer.prompt
    return conversation


class _RaisedError(Exception):
    """Raised by a template itself."""


class _Environment(ImmutableSandboxedEnvironment):
    """Jinja that renders like TGI's template engine."""

    intercepted_binops = frozenset({"*", "**", "+", "%"})

    def __init__(self) -> None:
        super().__init__(autoescape=False, extensions=[loopcontrols], finalize=_finalize)
        self.globals |= {
            "raise_exception": _raise_exception,
            "strftime_now": _strftime_now,
            "debug": lambda *values: " ".join(map(_display, values)),
        }
        for name in _ITERATING_FILTERS:
            self.filters[name] = _listing(self.filters[name])
        self.filters["tojson"] = to_json

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        _check_size(operator, left, right)
        return super().call_binop(context, operator, left, right)


def _listing(each: Callable[..., Any]) -> Callable[..., Any]:
    """A filter whose iterator becomes a list, which can be indexed and printed."""

    @functools.wraps(each)
    def listed(*args: Any, **options: Any) -> Any:
        value = each(*args, **options)
        return list(value) if isinstance(value, Iterator) else value

    return listed


def to_json(value: Any, indent: int | None = None) -> str:
    """The template filter: keys sorted, no spaces, markup escaped.

    >>> to_json({"b": "<a>", "a": "é"})
    '{"a":"é","b":"\\\\u003ca\\\\u003e"}'
    """
    separators = (",", ":") if indent is None else (",", ": ")
    text = json.dumps(value, ensure_ascii=False, sort_keys=True, separators=separators, indent=indent)
    for character in "<>&'":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def choose_template(candidate: object) -> str | None:
    """A `chat_template` field: a template, or the `default` of a list of named ones."""
    if isinstance(candidate, str):
        return candidate
    if isinstance(candidate, list):
        named = (entry for entry in candidate if isinstance(entry, Mapping) and entry.get("name") == "default")
        return next((entry["template"] for entry in named if isinstance(entry.get("template"), str)), None)
    return None


def token_text(value: object) -> str | None:
    """A token in a configuration file: a string, or an object with `content`."""
    text = value.get("content") if isinstance(value, Mapping) else value
    return text if isinstance(text, str) else None


def load_template(files: Iterable[Mapping[str, Any]], tokenizer_config: Mapping[str, Any]) -> TemplateSource | None:
    """The first template among `files`' `chat_template` fields, with the tokens of `tokenizer_config`."""
    found = (choose_template(file.get("chat_template")) for file in files)
    source = next((template for template in found if template is not None), None)
    if source is None:
        return None
    return TemplateSource(
        source, token_text(tokenizer_config.get("bos_token")), token_text(tokenizer_config.get("eos_token"))
    )


def _cut_after(text: str, content: str) -> str:
    """`text` up to the last occurrence of `content`, trailing blanks removed; all of `text` if there is none."""
    start = text.rfind(content)
    return text if start < 0 else text[: start + len(content)].rstrip()


def _raise_exception(message: object) -> NoReturn:
    raise _RaisedError(str(message))


def _strftime_now(layout: str) -> str:
    return datetime.datetime.now().strftime(layout)


def _finalize(value: object) -> object:
    return value if isinstance(value, str | jinja2.Undefined) else _display(value)


def _display(value: object) -> str:
    """A value as text: none, true and false in lower case, lists and maps like JSON."""
    match value:
        case None:
            return "none"
        case bool():
            return "true" if value else "false"
        case list() | tuple():
            return "[" + ", ".join(map(_quote, value)) + "]"
        case dict():
            return "{" + ", ".join(f"{_quote(key)}: {_quote(each)}" for key, each in value.items()) + "}"
        case _:
            return str(value)


def _quote(value: object) -> str:
    return json.dumps(value, ensure_ascii=False) if isinstance(value, str) else _display(value)


def _check_size(operator: str, left: Any, right: Any) -> None:
    """Refuse an operation with a huge result."""
    if operator == "*":
        count, text = (left, right) if isinstance(left, int) else (right, left)
        if isinstance(text, str | list | tuple) and isinstance(count, int):
            _check_limit(len(text) * count)
        elif isinstance(left, int) and isinstance(right, int):
            _check_limit(left.bit_length() + right.bit_length())
    elif operator == "**" and isinstance(left, int) and isinstance(right, int):
        _check_limit(left.bit_length() * right)
    elif operator == "+" and isinstance(left, str | list | tuple) and isinstance(right, str | list | tuple):
        _check_limit(len(left) + len(right))
    elif operator == "%" and isinstance(left, str):
        raise SecurityError("text formatting with % is not allowed in a template")


def _check_limit(size: int) -> None:
    if size > MAX_OUTPUT_CHARACTERS:
        raise SecurityError(f"a template may not build values larger than {MAX_OUTPUT_CHARACTERS}")


def _describe(error: Exception) -> str:
    """An error in TGI's form: kind, detail and line."""
    kind, detail = _kind(error), str(error)
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == "<template>"]
    return f"{kind}: {detail} (in <string>:{lines[-1] if lines else 1})"


def _kind(error: Exception) -> str:
    for error_type, kind_of in _KINDS:
        if isinstance(error, error_type):
            return kind_of(str(error))
    return "invalid operation"


_KINDS: tuple[tuple[type[Exception], Callable[[str], str]], ...] = (
    (_RaisedError, lambda _: "syntax error"),
    (jinja2.UndefinedError, lambda detail: "unknown method" if "has no attribute" in detail else "undefined value"),
    (jinja2.TemplateAssertionError, lambda detail: "unknown filter" if "filter" in detail else "syntax error"),
    (jinja2.TemplateRuntimeError, lambda detail: "unknown filter" if "filter" in detail else "invalid operation"),
)

"""Makes untrusted text safe to show: control characters, surrogates and direction marks are replaced or escaped.

Markup is escaped by the renderers.
"""

import dataclasses
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

# Characters that XML 1.0 forbids, and marks that reorder text.
_UNFIT = re.compile("[^\t\n\r\x20-\x7e\x85\xa0-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]|[\u202a-\u202e\u2066-\u2069]")


def plain_text(value: str) -> str:
    """The text with the replacement character for control characters, surrogates and direction marks.

    >>> plain_text("a\\x1b[31m\\ud800b")
    'a�[31m�b'
    """
    return _UNFIT.sub("�", value)


MAX_LOG_CHARACTERS = 300


def log_sentence(text: str) -> str:
    """The last line of a log, cut to `MAX_LOG_CHARACTERS`; of a JSON record, the last line of its text.

    >>> log_sentence('ready\\n{"text": "ERROR: died\\\\nShardError: no block fits"}\\n')
    'ShardError: no block fits'
    """
    last = _last_line(text)
    try:
        sentence = _last_line(str(json.loads(last)["text"]))
    except (ValueError, KeyError, TypeError, RecursionError):
        sentence = last
    return sentence if len(sentence) <= MAX_LOG_CHARACTERS else sentence[: MAX_LOG_CHARACTERS - 1] + "…"


def _last_line(text: str) -> str:
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "")


# Controls except tab and line feed; direction marks, embeddings, overrides and isolates; zero width; surrogates.
UNSEEN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u00ad\u061c\u180e\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb"
    "\ud800-\udfff\ufdd0-\ufdef\ufffe\uffff]"
)


def legible(text: str) -> str:
    """The text with each invisible character replaced by its code in brackets.

    >>> legible("a\\x1b[31mb"), legible("\\ud83d\\ude00 \\udc00"), legible("\\u202egnp.exe")
    ('a⟨1B⟩[31mb', '😀 ⟨DC00⟩', '⟨202E⟩gnp.exe')
    """
    return UNSEEN.sub(lambda found: f"⟨{ord(found[0]):X}⟩", _paired(text))


def _paired(text: str) -> str:
    """The text with surrogate pairs joined; JSON can decode them to two characters."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "surrogatepass")


def legible_values(value: Any) -> Any:
    """The value with `legible` applied to every text in lists, tuples, dictionaries and dataclasses."""
    match value:
        case str():
            return legible(value) if type(value) is str else value
        case list() | tuple():
            return type(value)(legible_values(each) for each in value)
        case dict():
            return {legible_values(key): legible_values(each) for key, each in value.items()}
        case _ if dataclasses.is_dataclass(value) and not isinstance(value, type):
            fields = {each.name: legible_values(getattr(value, each.name)) for each in dataclasses.fields(value)}
            return dataclasses.replace(value, **fields)
        case _:
            return value


def file_name(text: str) -> str:
    """The name of a figure without characters that are special in a path or a URL.

    >>> file_name("server-../../x y"), file_name("history")
    ('server-.._.._x_y', 'history')
    """
    return re.sub(r"[^A-Za-z0-9._-]", "_", text)[:120]


def markdown_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    """The lines of a Markdown table, and an empty line.

    >>> list(markdown_table(("key", "meaning"), [("`a`", "x|y")]))
    ['| key | meaning |', '|---|---|', '| `a` | x\\\\|y |', '']
    """
    yield f"| {' | '.join(head)} |"
    yield "|" + "---|" * len(head)
    for row in rows:
        yield f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |"
    yield ""

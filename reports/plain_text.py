"""Text from outside as every renderer can hold it: no controls, no surrogates, no marks that turn the direction."""

import json
import re

# What XML 1.0 has no place for, and what reorders the text around it.
_UNFIT = re.compile("[^\t\n\r\x20-\x7e\x85\xa0-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]|[\u202a-\u202e\u2066-\u2069]")


def plain_text(value: str) -> str:
    """The same text with a mark of replacement for every character that is no text.

    >>> plain_text("a\\x1b[31m\\ud800b")
    'a�[31m�b'
    """
    return _UNFIT.sub("�", value)


MOST_LOG_CHARACTERS = 300


def log_sentence(text: str) -> str:
    """What a log says last; of a record in JSON the end of its text, where an exception is named. Cut in length.

    >>> log_sentence('ready\\n{"text": "ERROR: died\\\\nShardError: no block fits"}\\n')
    'ShardError: no block fits'
    """
    last = _last_line(text)
    try:
        said = _last_line(str(json.loads(last)["text"]))
    except (ValueError, KeyError, TypeError, RecursionError):
        said = last
    return said if len(said) <= MOST_LOG_CHARACTERS else said[: MOST_LOG_CHARACTERS - 1] + "…"


def _last_line(text: str) -> str:
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "")

"""Text from outside as every renderer can hold it: no controls, no surrogates, no marks that turn the direction."""

import re

# What XML 1.0 has no place for, and what reorders the text around it.
_UNFIT = re.compile("[^\t\n\r\x20-\x7e\x85\xa0-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]|[\u202a-\u202e\u2066-\u2069]")


def plain_text(value: str) -> str:
    """The same text with a mark of replacement for every character that is no text.

    >>> plain_text("a\\x1b[31m\\ud800b")
    'a�[31m�b'
    """
    return _UNFIT.sub("�", value)

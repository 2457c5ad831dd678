"""`pattern` and `format` of a JSON schema as they look inside a JSON string: no match ends the string or breaks it.

A pattern is ECMA-262's and is searched for; here the whole string is what the pattern describes, as in TGI. What a
string may not hold unescaped is taken out of its classes, and its literal characters are escaped as JSON escapes them.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

_DATE = (
    r"[0-9]{4}-((0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])|(0[469]|11)-(0[1-9]|[12][0-9]|30)|02-(0[1-9]|1[0-9]|2[0-8]))"
)
_TIME = r"([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](\.[0-9]{1,6})?(Z|[+-]([01][0-9]|2[0-3]):[0-5][0-9])"

#: RFC 3339 dates and times; the 29th of February is left out, for no regex knows leap years well.
FORMATS: Mapping[str, str] = {
    "date-time": f"{_DATE}T{_TIME}",
    "date": _DATE,
    "time": _TIME,
    "uuid": r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}",
}

_UNESCAPED = r'[^"\\\x00-\x1F\x7F-\x9F]'
_CLASSES = {"d": "0-9", "w": "A-Za-z0-9_", "s": " ", "D": "^0-9", "W": "^A-Za-z0-9_", "S": "^\\s"}
_CONTROLS = {"n": "\n", "r": "\r", "t": "\t", "f": "\f", "v": "\v", "0": "\0"}
_HEX_DIGITS = {"x": 2, "u": 4}

_META = frozenset("\\.+*?()|[]{}^$#&-~")


class PatternError(ValueError):
    """A construct that this does not serve; the text names it."""


def string_regex(pattern: str) -> str:
    """The regex of the JSON strings, without their quotes, whose whole value `pattern` describes.

    >>> string_regex('^say "(a|b)"$')
    '(say \\\\\\\\"(a|b)\\\\\\\\")'
    """
    return f"({''.join(_Reader(pattern).pieces())})"


@dataclass
class _Reader:
    pattern: str
    at: int = 0
    depth: int = field(default=0, init=False)

    def pieces(self) -> Iterator[str]:
        while (char := self._next()) is not None:
            match char:
                case "^":
                    self._check_anchor("^", self.at == 1 or self.pattern[self.at - 2] == "|")
                case "$":
                    self._check_anchor("$", self._peek() in (None, "|"))
                case "(":
                    self.depth += 1
                    yield self._group()
                case ")":
                    self.depth -= 1
                    yield char
                case "[":
                    yield self._class()
                case ".":
                    yield _UNESCAPED
                case "\\":
                    yield self._escape()
                case "{":
                    yield self._count()
                case "|" | "*" | "+" | "?":
                    yield char
                case _:
                    yield literal(char)
        if self.depth:
            raise PatternError("a parenthesis that is not closed")

    def _check_anchor(self, anchor: str, is_at_end: bool) -> None:
        """An anchor at an end of the whole pattern, or of one of its alternatives, says what is so already."""
        if self.depth or not is_at_end:
            raise PatternError(f"`{anchor}` inside the pattern")

    def _group(self) -> str:
        if self._peek() != "?":
            return "("
        self._next()
        kind = self._next()
        if kind == ":":
            return "("
        if kind == "<" and self._peek() not in ("=", "!"):
            while (char := self._next()) != ">":
                if char is None:
                    raise PatternError("a group's name that does not end")
            return "("
        raise PatternError(f"`(?{kind or ''}`")

    def _count(self) -> str:
        """A counted repetition as it stands; any other brace is a character."""
        end = self.pattern.find("}", self.at)
        inner = self.pattern[self.at : end] if end >= 0 else ""
        low, comma, high = inner.partition(",")
        if not (low.isdecimal() and low.isascii() and (not high or (high.isdecimal() and high.isascii()))):
            return literal("{")
        self.at = end + 1
        return "{" + low + comma + high + "}"

    def _escape(self) -> str:
        char = self._escaped()
        return literal(char) if len(char) == 1 else f"[{char}&&{_UNESCAPED}]"

    def _escaped(self) -> str:
        """What follows a backslash: one character, or a class in brackets."""
        char = self._next()
        if char is None:
            raise PatternError("a backslash at the end")
        if char in _CLASSES:
            return f"[{_CLASSES[char]}]"
        if char in _CONTROLS:
            return _CONTROLS[char]
        if char in _HEX_DIGITS:
            return self._code_point(_HEX_DIGITS[char])
        if char in "pP":
            end = self.pattern.find("}", self.at)
            if self._peek() != "{" or end < 0:
                raise PatternError(f"`\\{char}`")
            name = self.pattern[self.at : end + 1]
            self.at = end + 1
            return f"[\\{char}{name}]"
        if char.isalnum():
            raise PatternError(f"`\\{char}`")
        return char

    def _code_point(self, digits: int) -> str:
        if digits == 4 and self._peek() == "{":
            end = self.pattern.find("}", self.at)
            text = self.pattern[self.at + 1 : end] if end >= 0 else ""
            self.at = end + 1
        else:
            text = self.pattern[self.at : self.at + digits]
            self.at += digits
        try:
            char = chr(int(text, 16))
        except (ValueError, OverflowError):
            char = "\ud800"
        if 0xD800 <= ord(char) < 0xE000:
            raise PatternError("a code point that is none")
        return char

    def _class(self) -> str:
        is_negated = self._peek() == "^"
        if is_negated:
            self._next()
        items: list[str] = []
        while True:
            first = self._class_item()
            if first is None:
                break
            if self._peek() == "-" and self.pattern[self.at + 1 : self.at + 2] not in ("]", ""):
                self._next()
                last = self._class_item()
                if len(first) > 1 or last is None or len(last) > 1:
                    raise PatternError("a range between classes")
                items.append(f"{_in_class(first)}-{_in_class(last)}")
            else:
                items.append(first if len(first) > 1 else _in_class(first))
        if not items:
            if is_negated:
                return _UNESCAPED
            raise PatternError("a class that holds nothing")
        return f"[[{'^' * is_negated}{''.join(items)}]&&{_UNESCAPED}]"

    def _class_item(self) -> str | None:
        """One character of a class, or a class inside it in brackets; None at its end."""
        char = self._next()
        if char is None:
            raise PatternError("a class that is not closed")
        if char == "]":
            return None
        if char != "\\":
            return char
        if self._peek() == "b":
            self._next()
            return "\b"
        return self._escaped()

    def _peek(self) -> str | None:
        return self.pattern[self.at] if self.at < len(self.pattern) else None

    def _next(self) -> str | None:
        char = self._peek()
        self.at += char is not None
        return char


def literal(text: str) -> str:
    """A regex of `text` as it stands in a JSON string.

    >>> literal('a."')
    'a\\\\.\\\\\\\\"'
    """
    encoded = json.dumps(text, ensure_ascii=False)[1:-1]
    return "".join(f"\\{char}" if char in _META else char for char in encoded)


def _in_class(char: str) -> str:
    return f"\\{char}" if char in _META else f"\\x{{{ord(char):X}}}" if char < " " else char

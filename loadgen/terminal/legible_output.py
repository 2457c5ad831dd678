"""Standard output for text from outside: a terminal receives no control sequence of a server, a run or a storage."""

import contextlib
import sys
from collections.abc import Iterator
from typing import Any, TextIO

from reports.text import legible


@contextlib.contextmanager
def legible_stdout() -> Iterator[None]:
    """Within it, `print` writes each invisible character as its code in brackets."""
    with contextlib.redirect_stdout(_Legible(sys.stdout)):
        yield


class _Legible:
    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        self._stream.write(legible(text))
        return len(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

"""The output of child processes in the launcher's log: JSON records keep their level, other lines have debug level."""

import asyncio
import json
import logging
import sys
from collections import deque
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field

MAX_LINE_BYTES = 1 << 20
MAX_ERROR_LINES = 400

_LEVELS = {
    "TRACE": logging.DEBUG, "DEBUG": logging.DEBUG, "INFO": logging.INFO, "SUCCESS": logging.INFO,
    "WARNING": logging.WARNING, "WARN": logging.WARNING, "ERROR": logging.ERROR, "CRITICAL": logging.ERROR,
}  # fmt: skip


async def lines_of(stream: asyncio.StreamReader) -> AsyncIterator[str]:
    """The lines of a stream; a line longer than the reader's limit is split."""
    while True:
        try:
            line = await stream.readuntil(b"\n")
        except asyncio.IncompleteReadError as error:
            line = error.partial
        except asyncio.LimitOverrunError as error:
            line = await stream.readexactly(error.consumed)
        if not line:
            return
        yield line.decode("utf-8", "replace").rstrip("\r\n")


@dataclass(frozen=True, slots=True)
class Scope:
    """The logger's last name and the fields of every record, such as the rank.

    as_one: a text of several lines is one record, for logs in JSON; otherwise each line is a record, since logs in text
    escape line ends.
    """

    name: str
    fields: Mapping[str, object] = field(default_factory=dict)
    as_one: bool = False

    def log(self, level: int, text: str) -> None:
        """Log `text` under this scope."""
        scoped = logging.getLogger(f"{__package__}.{self.name}")
        for part in [text] if self.as_one else text.splitlines():
            scoped.log(level, "%s", part, extra=self.fields)


async def relay_records(stream: asyncio.StreamReader, scope: Scope) -> None:
    """Log each line of `stream` under `scope`."""
    async for line in lines_of(stream):
        scope.log(*(parse_record(line) or (logging.DEBUG, line)))


async def relay_unchanged(stream: asyncio.StreamReader, to_stderr: bool = False) -> None:
    """Echo each line of `stream`, even if the output has no reader any more."""
    async for line in lines_of(stream):
        target = sys.stderr if to_stderr else sys.stdout
        try:
            print(line, file=target, flush=True)
        except (BrokenPipeError, ValueError):
            continue


async def collect(stream: asyncio.StreamReader) -> str:
    """The last lines of `stream`, once it has ended."""
    last: deque[str] = deque(maxlen=MAX_ERROR_LINES)
    async for line in lines_of(stream):
        last.append(line)
    return "\n".join(last).strip()


def parse_record(line: str) -> tuple[int, str] | None:
    """Level and text of a JSON log record; None for any other line.

    Two formats are read: `{"text", "record": {"level": {"name"}}}` and `{"level", "message"}`.
    """
    try:
        content = json.loads(line)
        if "record" in content:
            record = content["record"]
            level, text = record["level"]["name"], record.get("message", content["text"])
            text += f"\n{record['exception']}" if isinstance(record.get("exception"), str) else ""
        else:
            level, text = content["level"], content.get("message") or content["fields"]["message"]
        return _LEVELS[str(level).upper()], str(text).rstrip()
    except (ValueError, KeyError, TypeError):
        return None

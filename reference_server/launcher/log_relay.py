"""Children's output in the launcher's log: JSON records keep their level, other lines show at debug level only."""

import asyncio
import json
import logging
import sys
from collections import deque
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field

MAX_LINE_BYTES = 1 << 20
KEPT_ERROR_LINES = 400

_LEVELS = {
    "TRACE": logging.DEBUG, "DEBUG": logging.DEBUG, "INFO": logging.INFO, "SUCCESS": logging.INFO,
    "WARNING": logging.WARNING, "WARN": logging.WARNING, "ERROR": logging.ERROR, "CRITICAL": logging.ERROR,
}  # fmt: skip


async def lines_of(stream: asyncio.StreamReader) -> AsyncIterator[str]:
    """The lines of a child's output; a line longer than the reader's limit comes in pieces."""
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
    """Whose records they are: the logger's last name, and the fields that every line gets, such as the rank."""

    name: str
    fields: Mapping[str, object] = field(default_factory=dict)


async def relay_records(stream: asyncio.StreamReader, scope: Scope) -> None:
    """Log each line of `stream` under `scope`."""
    scoped = logging.getLogger(f"{__package__}.{scope.name}")
    async for line in lines_of(stream):
        record = parse_record(line)
        if record is not None:
            scoped.log(*record, extra=scope.fields)
        elif line and scoped.isEnabledFor(logging.DEBUG):
            scoped.debug("%s", line, extra=scope.fields)


async def relay_unchanged(stream: asyncio.StreamReader, to_stderr: bool = False) -> None:
    """Echo each line of `stream`. A reader of ours that has gone does not matter."""
    async for line in lines_of(stream):
        target = sys.stderr if to_stderr else sys.stdout
        try:
            print(line, file=target, flush=True)
        except (BrokenPipeError, ValueError):
            continue


async def collect(stream: asyncio.StreamReader) -> str:
    """The last lines of `stream`, once it has ended."""
    kept: deque[str] = deque(maxlen=KEPT_ERROR_LINES)
    async for line in lines_of(stream):
        kept.append(line)
    return "\n".join(kept).strip()


def parse_record(line: str) -> tuple[int, str, str] | None:
    """Level, format and text of a JSON log record; None for any other line.

    Two shapes are known: `{"text", "record": {"level": {"name"}}}` and `{"level", "message"}`.
    """
    try:
        content = json.loads(line)
        if "record" in content:
            record = content["record"]
            level, text = record["level"]["name"], record.get("message", content["text"])
            text += f"\n{record['exception']}" if isinstance(record.get("exception"), str) else ""
        else:
            level, text = content["level"], content.get("message") or content["fields"]["message"]
        return _LEVELS[str(level).upper()], "%s", str(text).rstrip()
    except (ValueError, KeyError, TypeError):
        return None

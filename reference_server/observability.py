"""Logging of all server processes: text, JSON lines, and the records that a shard sends to its launcher.

A record (`LogFormat.RECORD`, for `--json-output` of the model server's commands) is one line of JSON:

    {"text": "2026-01-31T12:00:00.000000Z  INFO reference_server.model_server.cli: Server started\\n",
     "record": {"level": {"name": "INFO", "no": 20}, "message": "Server started", "name": "reference_server...",
                "time": {"repr": "2026-01-31T12:00:00.000000Z", "timestamp": 1769860800.0},
                "function": "serve", "line": 70, "process": {"id": 1}, "exception": null, "extra": {}}}

`level.name` is DEBUG, INFO, WARNING, ERROR or CRITICAL; `exception` is a traceback or null; `text` is the
line in text format. `LogFormat.JSON`, for launcher and router, is flat: timestamp, level, message, target, filename,
line_number, then the fields of the event.

In every format control characters are escaped, so that text from outside cannot start a line or control a terminal.
Lines that cannot be written are dropped.
"""

import contextlib
import json
import logging
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from enum import StrEnum
from typing import TextIO

from reference_server.errors import ArgumentError

PACKAGE = "reference_server"
MAX_LINE_CHARACTERS = 16 * 1024

LEVELS: Mapping[str, int] = {
    "TRACE": logging.DEBUG,
    "DEBUG": logging.DEBUG,
    "INFO": logging.INFO,
    "SUCCESS": logging.INFO,
    "WARN": logging.WARNING,
    "WARNING": logging.WARNING,
    "ERROR": logging.ERROR,
    "CRITICAL": logging.CRITICAL,
    "OFF": logging.CRITICAL + 10,
}

# C0, DEL and C1, the Unicode line separators, and the marks that reorder text in a terminal.
_ESCAPES = {
    code: f"\\u{code:04x}" if code > 0xFF else f"\\x{code:02x}"
    for code in (
        *range(0x20),
        *range(0x7F, 0xA0),
        0x061C,
        0x200E,
        0x200F,
        *range(0x2028, 0x202F),
        *range(0x2066, 0x206A),
    )
} | {ord("\n"): "\\n", ord("\r"): "\\r", ord("\t"): "\\t"}

_STANDARD_FIELDS = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


class LogFormat(StrEnum):
    """Format of the log lines."""

    TEXT = "text"
    JSON = "json"
    RECORD = "record"


def set_up_logging(level: str, log_format: LogFormat, stream: TextIO | None = None) -> None:
    """Send this process's log to `stream` (stdout), one line for each event.

    `level` is a level's name, for this package, while libraries log warnings, or a list like
    `warn,reference_server.router=debug`. Raises ArgumentError for an unknown level.
    """
    handler = _LineHandler(sys.stdout if stream is None else stream)
    handler.setFormatter(_FORMATTERS[log_format]())
    levels = parse_levels(level)
    root = logging.getLogger()
    root.handlers[:] = [handler]
    for name, number in levels.items():
        logging.getLogger(name).setLevel(number)
    logging.captureWarnings(True)


def parse_levels(text: str) -> dict[str, int]:
    """Level by logger name; `""` is the root.

    >>> parse_levels("info")
    {'': 30, 'reference_server': 20}
    >>> parse_levels("error,reference_server.router=debug")
    {'': 40, 'reference_server.router': 10}
    """
    if "," not in text and "=" not in text:
        number = _level(text, text)
        return {"": max(number, logging.WARNING), PACKAGE: number}
    levels = {"": logging.WARNING}
    for part in text.split(","):
        name, _, level = part.strip().rpartition("=")
        levels[name] = _level(level, text)
    return levels


def escape(text: str) -> str:
    """`text` on one line, harmless to a terminal.

    >>> print(escape("bad\\nINFO forged \\x1b[31m"))
    bad\\nINFO forged \\x1b[31m
    """
    return text.translate(_ESCAPES)


def _level(name: str, text: str) -> int:
    try:
        return LEVELS[name.strip().upper()]
    except KeyError:
        raise ArgumentError(f"the log level {text!r} is none of {', '.join(LEVELS).lower()}") from None


class _LineHandler(logging.StreamHandler[TextIO]):
    """Drops lines without a reader or with a full disk, and reports that once on stderr."""

    _has_reported = False

    def handleError(self, record: logging.LogRecord) -> None:
        if isinstance(sys.exc_info()[1], OSError):
            if not self._has_reported and self.stream is not sys.stderr:
                self._has_reported = True
                with contextlib.suppress(OSError):
                    sys.stderr.write("log lines are lost: the log cannot be written\n")
            return
        super().handleError(record)


class _TextFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        extra = _extra(record)
        extra.pop("spans", None)
        span = _span_text(extra.pop("span", None))
        fields = "".join(f" {name}={escape(str(value))}" for name, value in extra.items())
        line = f"{_timestamp(record)} {record.levelname:>5} {span}{record.name}: {escape(record.getMessage())}{fields}"
        return _cut(line) + "".join(f"\n    {escape(line)}" for line in _traceback(record).splitlines())


class _JsonFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        event = {
            "timestamp": _timestamp(record),
            "level": record.levelname,
            "message": _cut(record.getMessage()),
            "target": record.name,
            "filename": record.pathname,
            "line_number": record.lineno,
        }
        if traceback := _traceback(record):
            event["exception"] = traceback
        return json.dumps(_extra(record) | event, default=str)


class _RecordFormatter(logging.Formatter):
    def __init__(self) -> None:
        super().__init__()
        self._text = _TextFormatter()

    def format(self, record: logging.LogRecord) -> str:
        return json.dumps(
            {
                "text": self._text.format(record) + "\n",
                "record": {
                    "level": {"name": record.levelname, "no": record.levelno},
                    "message": _cut(record.getMessage()),
                    "name": record.name,
                    "time": {"repr": _timestamp(record), "timestamp": record.created},
                    "function": record.funcName,
                    "line": record.lineno,
                    "process": {"id": record.process},
                    "exception": _traceback(record) or None,
                    "extra": _extra(record),
                },
            },
            default=str,
        )


_FORMATTERS: Mapping[LogFormat, type[logging.Formatter]] = {
    LogFormat.TEXT: _TextFormatter,
    LogFormat.JSON: _JsonFormatter,
    LogFormat.RECORD: _RecordFormatter,
}


def _timestamp(record: logging.LogRecord) -> str:
    return datetime.fromtimestamp(record.created, UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")


def _traceback(record: logging.LogRecord) -> str:
    return logging.Formatter().formatException(record.exc_info) if record.exc_info else ""


def _extra(record: logging.LogRecord) -> dict[str, object]:
    """The fields that the call passed as `extra`."""
    return {name: value for name, value in vars(record).items() if name not in _STANDARD_FIELDS}


def _span_text(span: object) -> str:
    """The span of an event, as `name{field=value}: `."""
    if not isinstance(span, dict):
        return ""
    fields = " ".join(f"{name}={escape(str(value))}" for name, value in span.items() if name != "name")
    return f"{escape(str(span.get('name', '')))}{{{fields}}}: "


def _cut(text: str) -> str:
    return text if len(text) <= MAX_LINE_CHARACTERS else text[: MAX_LINE_CHARACTERS - 1] + "…"

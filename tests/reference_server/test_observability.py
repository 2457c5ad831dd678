import doctest
import io
import json
import logging

import pytest

from reference_server import observability
from reference_server.errors import ArgumentError
from reference_server.observability import LogFormat, set_up_logging
from tests.support.samples.logs import kept_logging

logger = logging.getLogger("reference_server.tested")

HOSTILE = "a\nb\x1b[31m\u202eevil\x85\r"


@pytest.fixture
def log():
    """Sets logging up on a buffer; what it changed is put back."""
    stream = io.StringIO()

    def set_up(log_format, level="info"):
        set_up_logging(level, log_format, stream)
        return stream

    with kept_logging():
        yield set_up


def test_a_text_line_has_time_level_place_and_message(log):
    stream = log(LogFormat.TEXT)

    logger.warning("free blocks: %d", 7, extra={"rank": 1})

    stamp, line = stream.getvalue().split(" ", 1)
    assert stamp.endswith("Z")
    assert line == "WARNING reference_server.tested: free blocks: 7 rank=1\n"


@pytest.mark.parametrize("log_format", LogFormat)
def test_reliability_T16_hostile_text_stays_on_its_line(log, log_format):
    stream = log(log_format)

    logger.info("prompt %s", HOSTILE)

    assert stream.getvalue().count("\n") == 1
    assert not set(HOSTILE) & set("\x1b\u202e\x85\r") & set(stream.getvalue())


def test_traceback_lines_cannot_pass_for_log_lines(log):
    stream = log(LogFormat.TEXT)

    try:
        raise ValueError("first\n2026-01-01T00:00:00Z  INFO forged\x1b[0m")
    except ValueError:
        logger.exception("failed")

    first, *rest = stream.getvalue().splitlines()
    assert first.endswith("failed")
    assert all(line.startswith("    ") for line in rest)
    assert "\x1b" not in stream.getvalue()


def test_a_record_has_the_fields_that_the_launcher_reads(log):
    stream = log(LogFormat.RECORD)

    logger.error("out of memory")

    line = json.loads(stream.getvalue())
    assert line["record"]["level"]["name"] == "ERROR"
    assert line["record"]["message"] == "out of memory"
    assert line["record"]["exception"] is None
    assert line["text"].endswith("ERROR reference_server.tested: out of memory\n")


def test_json_line_is_flat(log):
    stream = log(LogFormat.JSON)

    logger.info("request done", extra={"queue_time": "1ms"})

    line = json.loads(stream.getvalue())
    assert (line["level"], line["message"], line["queue_time"]) == ("INFO", "request done", "1ms")
    assert line["target"] == "reference_server.tested"
    assert line["line_number"] > 0


def test_reliability_Q20_long_message_is_cut_by_character(log):
    stream = log(LogFormat.RECORD)

    logger.info("é" * 20_000)

    message = json.loads(stream.getvalue())["record"]["message"]
    assert len(message) == 16 * 1024
    assert message.endswith("é…")


def test_level_holds_for_the_package_and_libraries_only_warn(log):
    stream = log(LogFormat.TEXT, level="DEBUG")

    logger.debug("ours")
    logging.getLogger("somebody").info("theirs")

    assert "ours" in stream.getvalue()
    assert "theirs" not in stream.getvalue()


@pytest.mark.parametrize("level", ["loud", "", "reference_server=loud"])
def test_unknown_level_is_refused(log, level):
    with pytest.raises(ArgumentError, match="log level"):
        log(LogFormat.TEXT, level)


def test_reliability_F13_broken_pipe_stops_nothing(capsys, log):
    class Broken(io.StringIO):
        def write(self, text):
            raise BrokenPipeError

    log(LogFormat.TEXT)
    set_up_logging("info", LogFormat.TEXT, Broken())

    logger.info("lost")
    logger.info("lost too")

    assert capsys.readouterr().err == "log lines are lost: the log cannot be written\n"


def test_examples_in_the_docstrings():
    assert doctest.testmod(observability).failed == 0


def test_reliability_F13_both_streams_broken_stop_nothing(monkeypatch, log):
    class Broken(io.StringIO):
        def write(self, text):
            raise BrokenPipeError

    log(LogFormat.TEXT)
    set_up_logging("info", LogFormat.TEXT, Broken())
    monkeypatch.setattr("sys.stderr", Broken())

    logger.info("lost, and nothing is raised")

import asyncio
import json
import logging

import pytest

from reference_server.launcher.log_relay import Scope, collect, lines_of, parse_record, relay_records, relay_unchanged


def stream_of(data: bytes, limit: int = 64) -> asyncio.StreamReader:
    reader = asyncio.StreamReader(limit=limit)
    reader.feed_data(data)
    reader.feed_eof()
    return reader


@pytest.mark.parametrize(
    ("name", "level"),
    [
        ("TRACE", logging.DEBUG), ("DEBUG", logging.DEBUG), ("INFO", logging.INFO), ("SUCCESS", logging.INFO),
        ("WARNING", logging.WARNING), ("ERROR", logging.ERROR), ("CRITICAL", logging.ERROR),
    ],
)  # fmt: skip
def test_a_record_keeps_its_level(name: str, level: int) -> None:
    line = json.dumps({"text": "hello\n", "record": {"level": {"name": name}}})

    assert parse_record(line) == (level, "hello")


def test_the_message_of_a_record_is_preferred_to_its_rendered_text() -> None:
    record = {"level": {"name": "ERROR"}, "message": "failed", "exception": "Traceback"}

    assert parse_record(json.dumps({"text": "12:00 failed", "record": record})) == (
        logging.ERROR, "failed\nTraceback",
    )  # fmt: skip


def test_flat_records_are_known_too() -> None:
    assert parse_record('{"level": "WARN", "message": "careful"}') == (logging.WARNING, "careful")


@pytest.mark.parametrize("line", ["", "plain", "3", "null", "[]", '{"text": "x"}', '{"text": "x", "record": 1}'])
def test_other_lines_are_no_records(line: str) -> None:
    assert parse_record(line) is None


async def test_records_are_logged_under_their_scope(caplog: pytest.LogCaptureFixture) -> None:
    record = json.dumps({"text": "100% there", "record": {"level": {"name": "INFO"}}})

    with caplog.at_level(logging.INFO):
        await relay_records(stream_of(f"{record}\nnot a record\n".encode(), 4096), Scope("shard-manager", {"rank": 1}))

    assert [entry.getMessage() for entry in caplog.records] == ["100% there"]
    assert caplog.records[0].name == "reference_server.launcher.shard-manager"
    assert vars(caplog.records[0])["rank"] == 1


async def test_other_lines_show_at_debug_level(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG):
        await relay_records(stream_of(b"not a record\n"), Scope("download"))

    assert [entry.getMessage() for entry in caplog.records] == ["not a record"]


@pytest.mark.parametrize(("as_one", "messages"), [(True, ["a\nb"]), (False, ["a", "b"])])
def test_several_lines_are_one_record_where_the_log_is_json(
    as_one: bool, messages: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    Scope("shard-manager", as_one=as_one).log(logging.ERROR, "a\nb")

    assert [entry.getMessage() for entry in caplog.records] == messages


async def test_a_line_over_the_limit_comes_in_pieces_and_loses_nothing() -> None:
    data = b"x" * 200 + b"\nend"

    lines = [line async for line in lines_of(stream_of(data))]

    assert "".join(lines) == "x" * 200 + "end"
    assert lines[-1] == "end"


async def test_unchanged_lines_go_to_the_same_stream(capsys: pytest.CaptureFixture[str]) -> None:
    await relay_unchanged(stream_of(b"out\n"))
    await relay_unchanged(stream_of("fähig".encode()), to_stderr=True)

    assert capsys.readouterr() == ("out\n", "fähig\n")


async def test_collected_output_keeps_its_end() -> None:
    text = "\n".join(str(number) for number in range(1000))

    collected = await collect(stream_of(text.encode()))

    assert collected.splitlines()[0] == "600"
    assert collected.splitlines()[-1] == "999"

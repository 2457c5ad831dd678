"""Raw bytes on a connection: malformed requests, and limits on size, time and connections."""

import asyncio
import contextlib
from typing import Any

import pytest

from reference_server.router.connection import ConnectionLimits, reads_too_slowly
from tests.support.servers.serving import Served, endless, serve_on_socket
from tests.support.wire.scripted_shard import Reply

BODY = b'{"inputs":"hello","parameters":{"max_new_tokens":2}}'
HEAD = b"POST /generate HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
GOOD = HEAD + b"content-length: %d\r\n\r\n" % len(BODY) + BODY


async def connect(served: Served) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_connection("127.0.0.1", served.client.base_url.port)


async def status_of(served: Served, *parts: bytes) -> int | None:
    """The status of the answer to these bytes on a new connection; None if it is closed without an answer."""
    reader, writer = await connect(served)
    try:
        for part in parts:
            writer.write(part)
            await writer.drain()
        line = await asyncio.wait_for(reader.readline(), 20)
    except ConnectionError:
        line = b""
    writer.close()
    return int(line.split()[1]) if line else None


async def still_serves(served: Served) -> bool:
    return (await served.client.get("/health")).status_code == 200 and await status_of(served, GOOD) == 200


@pytest.mark.parametrize(
    ("request_bytes", "statuses"),
    [
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" * 9, {400, None}),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", {400, None}),
        (b"GET /health HTTP/1.1\r\nhost: x\r\na: " + b"x" * 1_000_000 + b"\r\n\r\n", {431}),
        (b"GET /health HTTP/1.1\r\nhost: x\r\n" + b"a: b\r\n" * 10_000 + b"\r\n", {431}),
        (b"GET /health HTTP/1.1\r\nhost: x\r\n" + b"a: b\r\n" * 255 + b"\r\n", {200}),
        (b"GET /health HTTP/1.1\r\nhost: x\r\n" + b"a: b\r\n" * 256 + b"\r\n", {431}),
        (b"GET /" + b"x" * 200_000 + b" HTTP/1.1\r\nhost: x\r\n\r\n", {414}),
        (HEAD + b"content-length: 5\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n", {400}),
        (HEAD + b"content-length: 5\r\ncontent-length: 6\r\n\r\nhello", {400}),
        (HEAD + b"content-length: -1\r\n\r\n", {400}),
        (HEAD + b"content-length: five\r\n\r\n", {400}),
        (HEAD + b"transfer-encoding: chunked\r\n\r\nxyz\r\n{}\r\n0\r\n\r\n", {400, None}),
        (HEAD + b"content-length: 10000000000\r\n\r\n", {413}),
        (b"GET /health HTTP/1.1\r\nhost: x\r\na: b\x00c\r\n\r\n", {400}),
        (b"GET /health HTTP/1.1\r\nhost: x\r\na: b\rc\r\n\r\n", {400}),
        (b"INVENTED /health HTTP/1.1\r\nhost: x\r\n\r\n", {400, 405}),
        (b"GET /docs/%2e%2e/%2e%2e/etc/passwd HTTP/1.1\r\nhost: x\r\n\r\n", {404}),
        (b"GET /health HTTP/1.1\r\nhost: x\r\nconnection: upgrade\r\nupgrade: websocket\r\n\r\n", {200}),
        (b"GET /health HTTP/1.1\r\nhost: x\r\ntraceparent: " + b"z" * 4000 + b"\r\n\r\n", {200}),
        (HEAD + b"content-encoding: gzip\r\ncontent-length: 2\r\n\r\n\x1f\x8b", {415}),
    ],
    ids=[
        "1_tls", "2_http2", "3_header_bytes", "3_header_fields", "3_fields_at_limit", "3_fields_over_limit",
        "4_request_line", "5_length_and_chunked", "5_two_lengths", "5_negative", "5_no_number", "6_chunk_size",
        "7_ten_gigabytes", "9_nul", "9_bare_cr", "13_invented_method", "12_path", "2_upgrade", "15_traceparent",
        "30_gzip",
    ],
)  # fmt: skip
async def test_reliability_4_1_bad_bytes_cost_their_connection_only(request_bytes: bytes, statuses: set[int | None]):
    async with serve_on_socket() as served:
        assert await status_of(served, request_bytes) in statuses
        assert await still_serves(served)


async def test_reliability_4_1_8_a_chunked_body_over_the_limit():
    chunk = b"40000\r\n" + b"x" * 0x40000 + b"\r\n"
    async with serve_on_socket() as served:
        status = await status_of(served, HEAD + b"transfer-encoding: chunked\r\n\r\n", *[chunk] * 9)

        assert status == 413
        assert await still_serves(served)


@pytest.mark.parametrize(
    ("start", "status"),
    [(b"", None), (b"\r\n", None), (HEAD, 408), (HEAD + b"content-length: 9\r\n\r\n{", 408)],
    ids=["nothing", "blank", "headers", "body"],
)
async def test_reliability_Q2_a_request_arrives_in_absolute_time(start: bytes, status: int | None):
    limits = ConnectionLimits(head_s=0.3, request_s=0.4)
    async with serve_on_socket(connections=limits) as served:
        assert await status_of(served, start) == status
        assert served.services.infer.permits.free == 128
        assert await still_serves(served)


async def test_reliability_Q2_dripping_does_not_help():
    async with serve_on_socket(connections=ConnectionLimits(head_s=0.2)) as served:
        reader, writer = await connect(served)

        async def drip() -> None:
            for byte in HEAD:
                writer.write(bytes([byte]))
                await asyncio.sleep(0.02)

        dripping = asyncio.create_task(drip())
        line = await reader.readline()
        dripping.cancel()
        writer.close()

    assert line.startswith(b"HTTP/1.1 408")


async def test_reliability_Q2_a_stream_is_not_touched_by_the_limits():
    async with serve_on_socket(connections=ConnectionLimits(head_s=0.4, request_s=0.4)) as served:
        answered = asyncio.Event()

        async def slow(method: str) -> None:
            if method == "decode" and not answered.is_set():
                await asyncio.sleep(0.6)
                answered.set()

        served.shard.gate = slow
        response = await served.client.post(
            "/generate_stream", content=BODY, headers={"content-type": "application/json"}
        )

    assert response.text.count("data:") == 2


async def test_reliability_Q2_blank_bytes_after_a_request_do_not_cut_its_answer():
    async with serve_on_socket(connections=ConnectionLimits(head_s=0.4)) as served:
        begun, go_on = asyncio.Event(), asyncio.Event()

        async def hold(method: str) -> None:
            if method == "decode":
                begun.set()
                await go_on.wait()

        served.shard.gate = hold
        reader, writer = await connect(served)
        writer.write(GOOD)
        await begun.wait()
        writer.write(b"\r\n")
        await asyncio.sleep(0.6)
        go_on.set()
        line = await reader.readline()
        writer.close()

    assert line.startswith(b"HTTP/1.1 200")


async def test_reliability_Q3_probes_are_answered_when_there_are_too_many_connections():
    async with serve_on_socket(connections=ConnectionLimits(max_connections=3)) as served:
        idle = [await connect(served) for _ in range(3)]
        await asyncio.sleep(0.05)
        refused = await status_of(served, GOOD)
        probed = await status_of(served, b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
        for _, writer in idle:
            writer.close()
        for _ in range(100):
            if (status := await status_of(served, GOOD)) == 200:
                break

    assert (refused, probed, status) == (503, 200, 200)


async def test_reliability_4_1_17_a_connection_serves_again_after_a_stream():
    async with serve_on_socket() as served:
        reader, writer = await connect(served)
        writer.write(GOOD.replace(b"/generate ", b"/generate_stream "))
        await reader.readuntil(b"0\r\n\r\n")
        writer.write(GOOD)
        line = await reader.readline()
        writer.close()

    assert line.startswith(b"HTTP/1.1 200")


async def test_reliability_4_1_14_expect_continue_is_honoured():
    async with serve_on_socket() as served:
        reader, writer = await connect(served)
        writer.write(HEAD + b"expect: 100-continue\r\ncontent-length: %d\r\n\r\n" % len(BODY))
        interim = await reader.readline()
        writer.write(BODY)
        await reader.readline()
        final = await reader.readline()
        writer.close()

    assert interim.startswith(b"HTTP/1.1 100")
    assert final.startswith(b"HTTP/1.1 200")


def long_texts(_: Any) -> Reply:
    return Reply(("x" * 4000,) * 5000)


async def test_reliability_Q16_a_client_that_stops_reading_is_disconnected():
    async with serve_on_socket(script=long_texts, connections=ConnectionLimits(stall_s=0.2)) as served:
        _, writer = await connect(served)
        body = b'{"inputs":"hello","parameters":{"max_new_tokens":2000}}'
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        writer.write(
            b"POST /generate_stream HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
            b"content-length: %d\r\n\r\n" % len(body) + body
        )
        while served.services.infer.permits.free == 128:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        while served.services.infer.permits.free < 128:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        while served.shard.cached_ids:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        writer.close()

        assert await still_serves(served)


@pytest.mark.parametrize(
    ("read", "waited_s", "total_s", "closes"),
    [
        (190_000, 64.0, 64.0, True),  # 3 KB/s
        (190_000, 30.0, 30.0, False),
        (0, 9.0, 9.0, False),
        (0, 120.0, 120.0, True),
        (190_000, 1.0, 599.0, False),
        (190_000, 1.0, 600.0, True),
    ],
)
def test_hardening_R11_a_client_below_the_drain_rate_is_disconnected(read, waited_s, total_s, closes):
    assert reads_too_slowly(read, waited_s, total_s, ConnectionLimits()) == closes


@pytest.mark.slow
async def test_hardening_R11_an_answer_that_waits_for_its_reader_too_long_in_all_is_ended():
    texts = Reply(("x" * 20_000,) * 5000)
    async with serve_on_socket(script=lambda _: texts, connections=ConnectionLimits(delivery_s=0.5)) as served:
        reader, writer = await connect(served)
        body = b'{"inputs":"hello","parameters":{"max_new_tokens":2000}}'
        writer.write(
            b"POST /generate_stream HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
            b"content-length: %d\r\n\r\n" % len(body) + body
        )
        received = 0
        with contextlib.suppress(ConnectionError):
            while part := await reader.read(100_000):
                received += len(part)
                # Less than 0.4 MB/s: also on a busy machine the server waits for the client.
                await asyncio.sleep(0.3)
        writer.close()

        # The tokens alone are 40 MB.
        assert 0 < received < 40_000_000
        assert await still_serves(served)


@pytest.mark.parametrize(
    ("request_bytes", "status"),
    [
        (b"GET /health HTTP/1.1\r\n\r\n", 400),
        (b"GET /health HTTP/1.1\r\nhost: x\r\nhost: y\r\n\r\n", 400),
        (b"GET /health HTTP/1.0\r\n\r\n", 200),
        (b"GET /health HTTP/0.9\r\nhost: x\r\n\r\n", 400),
        (b"GET /health HTTP/2.0\r\nhost: x\r\n\r\n", 400),
        (HEAD + b"transfer-encoding: gzip, chunked\r\n\r\n0\r\n\r\n", 400),
        (HEAD + b"transfer-encoding: chunked\r\n\r\n1;" + b"x" * 1_000_000 + b"\r\n{\r\n0\r\n\r\n", 400),
    ],
    ids=["no_host", "two_hosts", "http_1_0", "http_0_9", "http_2", "gzip_chunked", "chunk_extension"],
)
async def test_hardening_R25_ambiguous_requests_are_refused(request_bytes: bytes, status: int):
    async with serve_on_socket() as served:
        assert await status_of(served, request_bytes) == status
        assert await still_serves(served)


async def test_hardening_R25_the_time_for_a_body_is_bounded_by_the_payload_limit():
    limits = ConnectionLimits(head_s=0.1, request_s=0.1, body_bytes=1000)
    async with serve_on_socket(connections=limits) as served:
        reader, writer = await connect(served)
        writer.write(b"GET /health HTTP/1.1\r\nhost: x\r\ncontent-length: 4294967295\r\n\r\n")
        rest = await asyncio.wait_for(reader.read(), 30)
        writer.close()

    assert b" 200 " in rest or b" 408 " in rest


UPGRADE = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABk\r\n"


async def test_hardening_R27_a_malformed_request_writes_no_line(caplog: pytest.LogCaptureFixture):
    async with serve_on_socket() as served:
        malformed = await status_of(served, b"garbage\r\n\r\n")

    assert malformed == 400
    assert [record.getMessage() for record in caplog.records if record.levelname == "WARNING"] == []


async def test_a_client_with_wrong_requests_writes_one_line(caplog: pytest.LogCaptureFixture):
    wrong = b"POST /generate HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: 2\r\n\r\n{}"
    async with serve_on_socket() as served:
        statuses = [await status_of(served, wrong) for _ in range(20)]

    assert statuses == [422] * 20
    assert len([record for record in caplog.records if record.levelname == "ERROR"]) == 1


async def test_an_offer_of_another_protocol_is_ignored():
    offering = GOOD.replace(b"host: x\r\n", b"host: x\r\n" + UPGRADE)
    async with serve_on_socket() as served:
        reader, writer = await connect(served)
        statuses = []
        for part in (offering, offering[:-20], offering[-20:], GOOD):
            writer.write(part)
            await writer.drain()
            if part.endswith(BODY[-20:]):
                statuses.append((await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 20)).split()[1])
                await reader.readuntil(b"}")
        writer.close()
        split = await status_of(served, offering[:90], offering[90:])

    assert statuses == [b"200"] * 3
    assert split in (200, 400)


async def test_a_client_that_leaves_frees_its_place_within_one_step():
    turns = asyncio.Semaphore(0)
    decoding = asyncio.Event()

    async def take_turn(method: str) -> None:
        if method == "decode":
            decoding.set()
            await turns.acquire()

    async with serve_on_socket(script=endless) as served:
        served.shard.gate = take_turn
        reader, writer = await connect(served)
        writer.write(GOOD.replace(b"/generate ", b"/generate_stream ").replace(b":2}", b":9}"))
        await reader.readuntil(b"data: ")
        await decoding.wait()
        writer.close()
        while served.services.infer.permits.free < 128:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        decodes = len(served.shard.called("decode"))
        turns.release()
        while served.shard.cached_ids or not served.shard.called("clear_cache"):  # noqa: ASYNC110
            await asyncio.sleep(0.001)

        assert len(served.shard.called("decode")) == decodes

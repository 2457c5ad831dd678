"""The link: frames, hellos, refusals, order, back-pressure, and the choice between the link and gRPC."""

import asyncio
import socket
import stat
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import uvloop

from reference_server.errors import ShardConnectionError, ShardError, StartupError
from reference_server.messages import Batch, CachedBatch, ChooserParameters, Request, StoppingParameters
from reference_server.transport.client import connect
from reference_server.transport.codec import WireCodec
from reference_server.transport.compute_thread import ComputeThread
from reference_server.transport.link import (
    ERROR_KIND,
    HEADER,
    HELLO,
    HELLO_KIND,
    MAX_PAYLOAD_BYTES,
    METHODS,
    FrameBuffer,
    FrameError,
    link_path,
    pack,
)
from reference_server.transport.link_channel import LinkChannel
from reference_server.transport.remote_shard import RemoteShard
from reference_server.transport.service import serving
from reference_server.transport.wire_schema import load_schema
from tests.support.wire.blocking_shard import compute_thread
from tests.support.wire.scripted_shard import ScriptedShard, say
from tests.support.wire.wire_shard import served, serving_over, socket_urls, tcp_urls

KINDS = {name: kind for kind, name in METHODS.items()}
HELLO_FRAME = pack(HELLO_KIND, HELLO)
HEALTH_FRAME = pack(KINDS["Health"], b"")


@pytest.fixture
def url(tmp_path: Path) -> str:
    return socket_urls(tmp_path)[0]


@asynccontextmanager
async def raw_connection(url: str) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    reader, writer = await asyncio.open_unix_connection(link_path(url))
    try:
        yield reader, writer
    finally:
        writer.close()


Answer = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@asynccontextmanager
async def scripted_peer(url: str, answer: Answer) -> AsyncIterator[None]:
    """Another program at the link's socket."""
    writers = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers.append(writer)
        await answer(reader, writer)

    server = await asyncio.start_unix_server(serve, link_path(url))
    try:
        yield
    finally:
        server.close()
        for writer in writers:
            writer.close()
        await asyncio.gather(*(writer.wait_closed() for writer in writers), return_exceptions=True)


async def read_frame(reader: asyncio.StreamReader) -> tuple[int, bytes]:
    async with asyncio.timeout(30):
        size, kind = HEADER.unpack(await reader.readexactly(HEADER.size))
        return kind, await reader.readexactly(size)


async def is_closed(reader: asyncio.StreamReader) -> bool:
    """Whether the shard closes the connection; it may send bytes before."""
    async with asyncio.timeout(30):
        try:
            while await reader.read(1 << 16):
                pass
        except ConnectionResetError:
            return True
    return True


@pytest.mark.parametrize("size", [1, 3, 7, 1000])
def test_frames_are_found_in_reads_of_any_size(size: int):
    frames = [(0, HELLO), (5, b""), (5, b"x" * 300), (255, b"error")]
    data = b"".join(pack(*frame) for frame in frames)
    buffer = FrameBuffer()
    buffer.max_payload_bytes = MAX_PAYLOAD_BYTES

    found = []
    for start in range(0, len(data), size):
        buffer.feed(data[start : start + size])
        while (frame := buffer.next_frame()) is not None:
            found.append(frame)

    assert found == frames


def test_header_over_the_limit_is_refused_before_its_payload_arrives():
    buffer = FrameBuffer()
    buffer.feed(HEADER.pack(len(HELLO) + 1, HELLO_KIND))

    with pytest.raises(FrameError, match=f"a frame of {len(HELLO) + 1} bytes, the limit is {len(HELLO)}"):
        buffer.next_frame()


def test_limit_is_that_of_messages_once_the_hello_is_known():
    buffer = FrameBuffer()
    buffer.accept_hello(HELLO_KIND, HELLO)
    buffer.feed(HEADER.pack(MAX_PAYLOAD_BYTES, 4))
    assert buffer.next_frame() is None

    over = FrameBuffer()
    over.accept_hello(HELLO_KIND, HELLO)
    over.feed(HEADER.pack(MAX_PAYLOAD_BYTES + 1, 4))
    with pytest.raises(FrameError, match="the limit is 2147483647"):
        over.next_frame()


async def test_both_ends_send_their_hello_and_calls_are_answered_in_order(url: str):
    async with serving_over("link", ScriptedShard(), url, [url]), raw_connection(url) as (reader, writer):
        writer.write(HELLO_FRAME + HEALTH_FRAME + pack(KINDS["Info"], b"") + HEALTH_FRAME)
        frames = [await read_frame(reader) for _ in range(4)]

    assert frames[0] == (HELLO_KIND, HELLO)
    assert [kind for kind, _ in frames[1:]] == [KINDS["Health"], KINDS["Info"], KINDS["Health"]]


@pytest.mark.parametrize(
    "sent",
    [
        pytest.param(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", id="HTTP/2"),
        pytest.param(pack(HELLO_KIND, b"text-generation-link 9"), id="another version"),
        pytest.param(HEALTH_FRAME, id="no hello"),
        pytest.param(HEADER.pack(1 << 20, HELLO_KIND), id="long hello"),
        pytest.param(HELLO_FRAME + pack(max(KINDS.values()) + 1, b""), id="unknown method"),
        pytest.param(HELLO_FRAME + pack(ERROR_KIND, b"x"), id="a reply"),
        pytest.param(HELLO_FRAME + HELLO_FRAME, id="two hellos"),
        pytest.param(HELLO_FRAME + pack(KINDS["Decode"], b"\xff\xff\xff"), id="no protobuf"),
        pytest.param(HELLO_FRAME + HEADER.pack(2**32 - 1, KINDS["Prefill"]), id="oversized"),
    ],
)
async def test_hardening_K4_a_wrong_frame_closes_its_connection_only(url: str, sent: bytes):
    shard = ScriptedShard()
    async with served([shard], [url], transport="link") as group, raw_connection(url) as (reader, writer):
        writer.write(sent)

        assert await is_closed(reader)
        await group.health()

    assert shard.called("health") == [()]


@pytest.mark.parametrize("sent", [b"", HELLO_FRAME[:3], HELLO_FRAME, HELLO_FRAME + HEADER.pack(100, 4) + b"half"])
async def test_hardening_K4_an_unfinished_frame_delays_no_other_client(url: str, sent: bytes):
    async with served([ScriptedShard()], [url], transport="link") as group, raw_connection(url) as (_, writer):
        writer.write(sent)
        await writer.drain()
        await group.health()
        writer.close()
        await group.health()


async def test_client_of_another_version_receives_the_shards_hello(url: str):
    async with serving_over("link", ScriptedShard(), url, [url]), raw_connection(url) as (reader, writer):
        writer.write(pack(HELLO_KIND, b"text-generation-link 9"))

        assert await read_frame(reader) == (HELLO_KIND, HELLO)
        assert await is_closed(reader)


async def test_backpressure_a_peer_that_does_not_read_delays_no_other_client(url: str):
    prefilled = asyncio.Event()

    async def gate(method: str) -> None:
        if method == "prefill":
            prefilled.set()

    shard = ScriptedShard(say("x" * 3_000_000), gate=gate)
    batch = Batch(1, (Request(1, ("a",), 10, ChooserParameters(), StoppingParameters(5)),))
    async with served([shard], [url], transport="link") as group, raw_connection(url) as (reader, writer):
        frame = pack(
            KINDS["Prefill"], WireCodec(load_schema("v3")).encode_prefill_request(batch, None, 16).SerializeToString()
        )
        writer.write(HELLO_FRAME + frame + HEALTH_FRAME)
        await prefilled.wait()
        await group.clear_cache(7)
        # The second call waits until the first one's reply has been read.
        assert shard.called("health") == []
        frames = [await read_frame(reader) for _ in range(3)]

    assert [kind for kind, _ in frames] == [HELLO_KIND, KINDS["Prefill"], KINDS["Health"]]
    assert len(frames[1][1]) > 3_000_000


async def test_error_is_the_shards_text_and_the_connection_lives(url: str):
    shard = ScriptedShard()
    shard.failures["prefill"] = ShardError("Not enough memory\nadvice")

    async with served([shard], [url], transport="link") as group:
        with pytest.raises(ShardError, match=r"^Not enough memory$") as failed:
            await group.prefill(Batch(1, ()))
        await group.health()

    assert not isinstance(failed.value, ShardConnectionError)


async def test_fatal_error_is_answered_and_then_reported(url: str):
    shard = ScriptedShard()
    shard.failures["decode"] = RuntimeError("CUDA error")

    async with serving_over("link", shard, url, [url]) as service:
        group = await connect(url, transport="link")
        with pytest.raises(ShardError, match=r"^CUDA error$"):
            await group.decode([CachedBatch(1, (1,), 16, 1)])
        async with asyncio.timeout(30):
            fatal = await service.fatal
    await group.close()

    assert str(fatal) == "CUDA error"


async def test_reply_is_sent_before_the_next_step_is_launched(url: str):
    with compute_thread(ScriptedShard()) as thread:
        async with serving(ScriptedShard(), url, [url], thread):
            group = await connect(url, transport="link")
            await group.health()
            with pytest.raises(ShardError, match="Must provide"):
                await group.decode([])
            await group.health()
            await group.close()
        await thread.call(lambda: None)

        assert thread.shard.events[:2] == ["after reply", "after error"]


async def test_calls_over_both_wires_run_one_at_a_time(url: str):
    running: list[str] = []

    async def gate(method: str) -> None:
        running.append(method)
        await asyncio.sleep(0.01)
        running.append(f"{method} done")

    shard = ScriptedShard(gate=gate)
    with compute_thread(shard) as thread:
        async with serving(_Posted(thread), url, [url], thread):
            over = [await connect(url, transport=transport) for transport in ("link", "grpc")]
            await asyncio.gather(*(group.health() for group in over), *(group.clear_cache() for group in over))
            for group in over:
                await group.close()

    assert running[1::2] == [f"{method} done" for method in running[::2]]
    assert len(running) == 8


class _Posted:
    """As a `LocalShard`: calls of the loop are posted to the compute thread."""

    def __init__(self, thread: ComputeThread) -> None:
        self._thread = thread

    async def health(self) -> None:
        await self._thread.call(self._thread.shard.health)

    async def clear_cache(self, batch_id: int | None = None) -> None:
        await self._thread.call(lambda: self._thread.shard.clear_cache(batch_id))


async def test_step_of_a_caller_that_left_is_finished_and_its_reply_ignored(url: str):
    started, go_on, log = asyncio.Event(), asyncio.Event(), []

    async def gate(method: str) -> None:
        log.append(method)
        started.set()
        if method == "health":
            await go_on.wait()
            log.append("finished")

    async with served([ScriptedShard(gate=gate)], [url], transport="link") as group:
        step = asyncio.create_task(group.health())
        await started.wait()
        step.cancel()
        following = asyncio.create_task(group.info())
        await asyncio.sleep(0.05)
        before = log[:]
        go_on.set()
        info = await following

    assert before == ["health"]
    assert log == ["health", "finished", "info"]
    assert info.block_size == 16


async def test_end_of_the_shard_fails_the_call_in_flight_at_once(url: str):
    started, go_on = asyncio.Event(), asyncio.Event()

    async def gate(method: str) -> None:
        if method == "health":
            started.set()
            await go_on.wait()

    async with serving_over("link", ScriptedShard(gate=gate), url, [url]):
        group = await connect(url, transport="link")
        call = asyncio.create_task(group.health())
        await started.wait()
    # The shard still computes; its connections have ended.
    with pytest.raises(ShardConnectionError, match="cannot be reached: the shard closed the connection"):
        async with asyncio.timeout(30):
            await call
    with pytest.raises(ShardConnectionError, match="could not connect"):
        await group.health()
    go_on.set()
    await group.close()


async def test_hardening_R21_the_first_call_after_a_restart_fails_and_the_second_reaches_the_new_shard(url: str):
    async with serving_over("link", ScriptedShard(), url, [url]):
        group = await connect(url, transport="link")
        await group.health()
    again = ScriptedShard()
    async with serving_over("link", again, url, [url]):
        with pytest.raises(ShardConnectionError, match="closed the connection"):
            await group.health()
        await group.health()
        await group.close()

    assert again.called("health") == [()]


def test_router_end_runs_on_uvloop(url: str):
    async def call() -> tuple[int, list[object]]:
        shard = ScriptedShard(say("x" * 1_000_000))
        async with served([shard], [url], transport="link") as group:
            info = await group.info()
            text = "y " * 1_000_000
            request = Request(1, (text,), 10, ChooserParameters(), StoppingParameters(5))
            result = await group.prefill(Batch(1, (request,)))
            with pytest.raises(ShardError, match="Must provide"):
                await group.decode([])
        return info.block_size, [len(generation.tokens.texts[0]) for generation in result.generations]

    assert uvloop.run(call()) == (16, [1_000_000])


async def test_sockets_are_the_owners_alone_and_go_with_the_server(url: str, tmp_path: Path):
    async with serving_over("link", ScriptedShard(), url, [url]):
        modes = modes_in(tmp_path)

    assert modes == {"shard-0": 0o600, "shard-0.link": 0o600}
    assert modes_in(tmp_path) == {}


def modes_in(directory: Path) -> dict[str, int]:
    return {path.name: stat.S_IMODE(path.stat().st_mode) for path in directory.iterdir()}


async def test_stale_link_socket_is_replaced_and_a_live_one_refused(url: str):
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(link_path(url))

    async with served([ScriptedShard()], [url], transport="link") as group:
        with pytest.raises(StartupError, match="another model server is listening"):
            await serving_over("link", ScriptedShard(), url, [url]).__aenter__()
        await group.health()


async def test_auto_uses_the_link_where_it_is_offered(url: str, caplog: pytest.LogCaptureFixture):
    shard = ScriptedShard()
    with compute_thread(shard) as thread:
        async with serving(ShardThatFails(), url, [url], thread):
            group = await connect(url)
            await group.health()
            await group.close()

    assert shard.called("health") == [()]
    assert caplog.records == []


class ShardThatFails:
    """A shard that must not be called."""


async def test_auto_uses_grpc_with_a_shard_that_has_no_link(url: str):
    shard = ScriptedShard()
    async with serving(shard, url, [url]):
        group = await connect(url)
        await group.health()
        await group.close()

    assert shard.called("health") == [()]


async def test_auto_uses_grpc_with_schema_v2(url: str):
    async with serving_over("link", ScriptedShard(), url, [url]):
        group = await connect(url, "v2")
        assert not (await group.info()).support_chunking
        await group.close()


async def test_auto_uses_grpc_if_the_link_has_another_version(url: str, caplog: pytest.LogCaptureFixture):
    async def answer(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(pack(HELLO_KIND, b"text-generation-link 9"))

    async with serving(ScriptedShard(), url, [url]), scripted_peer(url, answer):
        group = await connect(url)
        await group.health()
        await group.close()

    assert "using gRPC: could not connect to the model server" in caplog.text
    assert "text-generation-link 9" in caplog.text


async def test_link_that_was_requested_must_be_offered(url: str):
    (tcp,) = tcp_urls()

    async with serving(ScriptedShard(), url, [url]), serving(ScriptedShard(), tcp, [tcp]):
        with pytest.raises(ShardConnectionError, match="over the link"):
            await connect(url, transport="link")
        with pytest.raises(ShardConnectionError, match="needs a unix socket and schema v3"):
            await connect(tcp, transport="link")


async def test_wrong_replies_end_the_connection(url: str):
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_frame(reader)
        writer.write(HELLO_FRAME)
        kind, _ = await read_frame(reader)
        writer.write(struct.pack("<IB", 0, kind + 1))

    async with scripted_peer(url, answer):
        shard = RemoteShard(await LinkChannel.open(url))
        with pytest.raises(ShardConnectionError, match="a reply of kind 3 to a call of kind 2"):
            await shard.health()
        await shard.close()


async def test_reply_that_cannot_be_decoded_is_a_shard_error(url: str):
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_frame(reader)
        writer.write(HELLO_FRAME)
        kind, _ = await read_frame(reader)
        writer.write(pack(kind, b"\xff\xff"))

    async with scripted_peer(url, answer):
        shard = RemoteShard(await LinkChannel.open(url))
        with pytest.raises(ShardError, match="cannot be decoded"):
            await shard.info()
        await shard.close()


async def test_socket_of_another_user_is_refused(url: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("reference_server.transport.link_channel.peer_uid", lambda _: 17)

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()

    async with scripted_peer(url, answer):
        with pytest.raises(ShardConnectionError, match="belongs to another user"):
            await LinkChannel.open(url)


def test_link_has_every_method_but_discovery():
    assert {*METHODS.values(), "ServiceDiscovery"} == set(load_schema("v3").methods)

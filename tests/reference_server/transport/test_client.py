import asyncio
import socket
from dataclasses import replace

import grpc.aio
import pytest

from reference_server.errors import ShardConnectionError, ShardError
from reference_server.messages import Batch, ChooserParameters, Request, StoppingParameters, WarmupRequest
from reference_server.transport.address import unix_url
from reference_server.transport.client import connect
from reference_server.transport.grpc_channel import GrpcChannel
from reference_server.transport.remote_shard import RemoteShard
from reference_server.transport.service import ShardService, serving
from reference_server.transport.wire_schema import load_schema
from tests.support.wire.scripted_shard import ScriptedShard
from tests.support.wire.wire_shard import served, socket_urls, tcp_urls


async def test_master_names_the_whole_group(tmp_path):
    shards = [ScriptedShard(rank=rank, world_size=3) for rank in range(3)]

    async with served(shards, socket_urls(tmp_path, 3)) as group:
        await group.clear_cache()

    assert len(group) == 3
    assert [shard.calls for shard in shards] == [[("clear_cache", (None,))]] * 3


async def test_urls_without_a_scheme_are_socket_paths(tmp_path):
    path = f"{tmp_path}/shard-0"

    async with serving(ScriptedShard(), unix_url(path), [path]):
        group = await connect(path)
        await group.health()
        await group.close()


async def test_tcp_group_must_be_the_one_given():
    first, second = tcp_urls(2)

    async with serving(ScriptedShard(), first, [first, second]), serving(ScriptedShard(), second, [first, second]):
        group = await connect([first, second])
        await group.close()
        with pytest.raises(ShardConnectionError, match="reports the group"):
            await connect([first, "tcp://127.0.0.1:1"])


async def test_a_socket_without_listener_is_a_connection_error(tmp_path):
    with pytest.raises(ShardConnectionError, match=f"could not connect to the model server at {tmp_path}/none"):
        await connect(f"{tmp_path}/none")


async def test_unreachable_rank_is_a_connection_error(tmp_path):
    present, absent = socket_urls(tmp_path, 2)

    async with serving(ScriptedShard(), present, [present, absent]):
        with pytest.raises(ShardConnectionError, match="shard-1"):
            await connect(present)


async def test_schema_that_the_server_lacks_is_a_connection_error(tmp_path):
    server = grpc.aio.server()
    server.add_generic_rpc_handlers([ShardService(ScriptedShard(), []).handlers(load_schema("v3"))])
    server.add_insecure_port(f"unix:{tmp_path}/v3-only")
    await server.start()

    with pytest.raises(ShardConnectionError, match=r"lacks the interface generate\.v2\.TextGenerationService"):
        await connect(f"{tmp_path}/v3-only", "v2")
    await server.stop(None)


async def test_server_that_names_no_shard_is_a_connection_error(tmp_path):
    (url,) = socket_urls(tmp_path)

    async with serving(ScriptedShard(), url, []):
        with pytest.raises(ShardConnectionError, match="reports no shard"):
            await connect(url)


async def test_server_that_goes_mid_call_is_a_connection_error(tmp_path):
    (url,) = socket_urls(tmp_path)
    started = asyncio.Event()

    async def gate(method):
        if method == "health":
            started.set()
            await asyncio.Event().wait()

    async with serving(ScriptedShard(gate=gate), url, [url]):
        shard = RemoteShard(await GrpcChannel.open(url))
        call = asyncio.create_task(shard.health())
        await started.wait()
    with pytest.raises(ShardConnectionError, match="cannot be reached"):
        await call
    await shard.close()


async def test_shard_error_has_the_servers_message(tmp_path):
    shard = ScriptedShard()
    shard.failures["warmup"] = ShardError("Not enough memory")

    async with served([shard], socket_urls(tmp_path)) as group:
        with pytest.raises(ShardError, match=r"^Not enough memory$") as failed:
            await group.warmup(WarmupRequest(Batch(0, ()), 512))

    assert not isinstance(failed.value, ShardConnectionError)


async def test_slots_are_expanded_with_the_shards_block_size(tmp_path):
    shard = ScriptedShard()
    request = Request(
        1, ("a b c",), 10, ChooserParameters(), StoppingParameters(4), blocks=(5, 2), num_slots=6 + 16
    )  # fmt: skip

    async with served([shard], socket_urls(tmp_path)) as group:
        await group.prefill(Batch(1, (request,)))

    ((received, _),) = shard.called("prefill")
    assert received.requests[0] == request
    assert [name for name, _ in shard.calls] == ["info", "prefill"]


async def test_proxy_of_the_environment_is_not_used(monkeypatch):
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")

    async with served([ScriptedShard()], tcp_urls()) as group:
        await group.health()


async def test_opening_can_be_given_up(tmp_path):
    """A socket that accepts and never speaks HTTP/2 would keep the caller for gRPC's own twenty seconds."""
    with socket.socket(socket.AF_UNIX) as mute:
        mute.bind(str(tmp_path / "mute"))
        mute.listen()

        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await GrpcChannel.open(f"{tmp_path}/mute")


@pytest.mark.parametrize("request_", [{"chunks": ("\ud800",)}, {"truncate": 2**32}], ids=["surrogate", "too large"])
async def test_request_that_the_wire_cannot_carry_is_a_shard_error(tmp_path, request_):
    request = replace(Request(1, ("a",), 10, ChooserParameters(), StoppingParameters(4)), **request_)

    async with served([ScriptedShard()], socket_urls(tmp_path)) as group:
        with pytest.raises(ShardError, match="a request cannot be sent"):
            await group.prefill(Batch(1, (request,)))
        await group.health()


class _Metadata(grpc.aio.ServerInterceptor):
    """The trace parents in the metadata of each method's calls."""

    def __init__(self) -> None:
        self.parents: dict[str, list[str]] = {}

    async def intercept_service(self, continuation, details):
        found = [value for key, value in details.invocation_metadata if key == "traceparent"]
        self.parents.setdefault(details.method.rpartition("/")[2], []).extend(found)
        return await continuation(details)


@pytest.mark.parametrize("version", ["v2", "v3"])
async def test_a_prefill_over_grpc_has_its_trace_parent_where_tgi_reads_it(tmp_path, version):
    parent = f"00-{1:032x}-{2:016x}-01"
    metadata = _Metadata()
    (url,) = socket_urls(tmp_path)
    server = grpc.aio.server(interceptors=[metadata])
    server.add_generic_rpc_handlers([ShardService(ScriptedShard(), [url]).handlers(load_schema(version))])
    server.add_insecure_port(url.replace("unix://", "unix:"))
    await server.start()
    shard = RemoteShard(await GrpcChannel.open(url, version))
    plain = Request(1, ("plain",), 8, ChooserParameters(), StoppingParameters(max_new_tokens=4))

    await shard.prefill(Batch(1, (plain,)))
    result = await shard.prefill(Batch(2, (replace(plain, id=2), replace(plain, id=3, traceparent=parent))))
    assert result.batch is not None
    await shard.decode([result.batch])
    await shard.close()
    await server.stop(None)

    assert metadata.parents["Prefill"] == [parent]
    assert metadata.parents["Decode"] == []

import asyncio
import logging
import socket
import stat

import grpc
import grpc.aio
import pytest
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from reference_server.errors import ShardConnectionError, ShardError, StartupError
from reference_server.messages import Batch, ChooserParameters, Request, StoppingParameters
from reference_server.transport.address import grpc_target, unix_url
from reference_server.transport.client import connect
from reference_server.transport.grpc_channel import GrpcChannel
from reference_server.transport.remote_shard import RemoteShard
from reference_server.transport.service import serving
from reference_server.transport.wire_schema import load_schema
from tests.support.wire.scripted_shard import ScriptedShard
from tests.support.wire.wire_shard import served, tcp_urls


@pytest.fixture
def url(tmp_path):
    return unix_url(f"{tmp_path}/shard-0")


def one_request(text: str = "hello") -> Batch:
    return Batch(1, (Request(1, (text,), 10, ChooserParameters(), StoppingParameters(5)),))


async def test_both_schemas_answer_on_one_socket(url):
    shard = ScriptedShard()

    async with serving(shard, url, [url]):
        for version in ("v3", "v2"):
            group = await connect(url, version)
            await group.health()
            await group.close()

    assert len(shard.called("health")) == 2


async def test_exception_becomes_internal_with_its_text_and_the_shard_lives(url, caplog):
    shard = ScriptedShard()
    shard.failures["prefill"] = ValueError("broken tokenizer")

    async with serving(shard, url, [url]) as service, grpc.aio.insecure_channel(grpc_target(url)) as channel:
        method = load_schema("v3").methods["Prefill"]
        call = channel.unary_unary(method.path, method.request.SerializeToString, method.response.FromString)
        with pytest.raises(grpc.aio.AioRpcError) as failed:
            await call(method.request())
        await call(method.request())

    error = failed.value
    assert error.code() is grpc.StatusCode.INTERNAL
    assert error.details() == "broken tokenizer"
    assert dict(error.trailing_metadata())["grpc-status-details-bin"] == b"\x08\x0d\x12\x10broken tokenizer"
    assert not service.fatal.done()
    # gRPC's poller sometimes logs an error of its own while another channel closes.
    own = [record for record in caplog.records if record.name.startswith("reference_server")]
    assert [record.levelno for record in own if record.exc_info] == [logging.ERROR]


async def test_a_long_error_text_is_cut_to_the_limit_of_a_client(url):
    shard = ScriptedShard()
    shard.failures["health"] = ValueError("é" * 5000)

    async with served([shard], [url]) as group:
        with pytest.raises(ShardError) as failed:
            await group.health()

    assert str(failed.value) == "é" * 750


async def test_error_without_text_is_named(url):
    shard = ScriptedShard()
    shard.failures["health"] = KeyError()

    async with served([shard], [url]) as group:
        with pytest.raises(ShardError, match=r"^KeyError$"):
            await group.health()


async def test_model_server_M20_runtime_error_is_answered_and_then_fatal(url):
    shard = ScriptedShard()
    shard.failures["prefill"] = RuntimeError("CUDA out of memory. Tried to allocate 2 GiB.\nAdvice on debugging")

    async with serving(shard, url, [url]) as service:
        group = await connect(url)
        with pytest.raises(ShardError, match=r"^CUDA out of memory\. Tried to allocate 2 GiB\.$"):
            await group.prefill(one_request())
        fatal = await service.fatal
    with pytest.raises(ShardConnectionError):
        await group.health()
    await group.close()

    assert str(fatal).endswith("Advice on debugging")


async def test_shard_error_is_not_fatal(url):
    shard = ScriptedShard()
    shard.failures["decode"] = ShardError("Batch ID 7 not found in cache.")

    async with serving(shard, url, [url]) as service:
        group = await connect(url)
        with pytest.raises(ShardError, match="Batch ID 7"):
            await group.decode([])
        await group.close()

    assert not service.fatal.done()


async def test_calls_run_one_at_a_time_in_order(url):
    running = []

    async def gate(method):
        running.append(method)
        await asyncio.sleep(0.01)
        running.append(f"{method} done")

    async with served([ScriptedShard(gate=gate)], [url]) as group:
        await asyncio.gather(group.health(), group.info(), group.clear_cache())

    assert sorted(running[::2]) == ["clear_cache", "health", "info"]
    assert running[1::2] == [f"{method} done" for method in running[::2]]


async def test_discovery_answers_while_a_step_runs(url):
    started, go_on = asyncio.Event(), asyncio.Event()

    async def gate(method):
        started.set()
        await go_on.wait()

    async with serving(ScriptedShard(gate=gate), url, [url]):
        channel = await GrpcChannel.open(url)
        step = asyncio.create_task(RemoteShard(channel).health())
        await started.wait()
        urls = await channel.discover()
        go_on.set()
        await step
        await channel.close()

    assert urls == [url.removeprefix("unix://")]


async def test_step_of_a_caller_that_left_is_finished_before_the_next(url):
    started, go_on, log = asyncio.Event(), asyncio.Event(), []

    async def gate(method):
        log.append(method)
        started.set()
        if method == "health":
            await go_on.wait()
            log.append("finished")

    async with served([ScriptedShard(gate=gate)], [url]) as group:
        step = asyncio.create_task(group.health())
        await started.wait()
        step.cancel()
        following = asyncio.create_task(group.clear_cache())
        await asyncio.sleep(0.05)
        before = log[:]
        go_on.set()
        await following

    assert before == ["health"]
    assert log == ["health", "finished", "clear_cache"]


async def test_large_replies_are_not_limited(url):
    async with served([ScriptedShard()], [url]) as group:
        result = await group.prefill(one_request("x" * 5_000_000))

    assert result.batch is not None


async def test_reflection_lists_both_services(url):
    async with serving(ScriptedShard(), url, [url]), grpc.aio.insecure_channel(grpc_target(url)) as channel:
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        ask = reflection_pb2.ServerReflectionRequest
        requests = [
            ask(list_services=""),
            ask(file_containing_symbol="generate.v3.TextGenerationService"),
            ask(file_containing_symbol="generate.v2.Batch"),
        ]
        listed, v3, v2 = [reply async for reply in stub.ServerReflectionInfo(iter(requests))]

    assert [service.name for service in listed.list_services_response.service] == [
        "generate.v2.TextGenerationService",
        "generate.v3.TextGenerationService",
        "grpc.reflection.v1alpha.ServerReflection",
    ]
    assert b"generate.v3" in v3.file_descriptor_response.file_descriptor_proto[0]
    assert b"generate.v2" in v2.file_descriptor_response.file_descriptor_proto[0]


async def test_socket_is_the_owners_alone_and_goes_with_the_server(url, tmp_path):
    async with serving(ScriptedShard(), url, [url]):
        mode = stat.S_IMODE((tmp_path / "shard-0").stat().st_mode)

    assert mode == 0o600
    assert list(tmp_path.iterdir()) == []


async def test_stale_socket_is_replaced(url, tmp_path):
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(tmp_path / "shard-0"))

    async with served([ScriptedShard()], [url]) as group:
        await group.health()


async def test_socket_of_a_live_server_is_refused(url):
    async with served([ScriptedShard()], [url]) as group:
        with pytest.raises(StartupError, match="another model server is listening"):
            await serving(ScriptedShard(), url, [url]).__aenter__()
        await group.health()


async def test_file_in_the_sockets_place_is_left_alone(url, tmp_path):
    (tmp_path / "shard-0").write_text("precious")

    with pytest.raises(StartupError, match="is not a socket"):
        await serving(ScriptedShard(), url, [url]).__aenter__()

    assert (tmp_path / "shard-0").read_text() == "precious"


async def test_socket_path_that_is_too_long_is_refused(tmp_path):
    url = unix_url(f"{tmp_path}/{'s' * 120}")

    with pytest.raises(StartupError, match="longer than 107 bytes"):
        await serving(ScriptedShard(), url, [url]).__aenter__()


async def test_port_in_use_is_refused():
    (url,) = tcp_urls()

    async with serving(ScriptedShard(), url, [url]):
        with pytest.raises(StartupError, match="cannot listen at"):
            await serving(ScriptedShard(), url, [url]).__aenter__()


async def test_reliability_T67_listener_beyond_loopback_is_warned_of(caplog):
    url = tcp_urls()[0].replace("127.0.0.1", "0.0.0.0")

    async with serving(ScriptedShard(), url, [url]):
        pass

    assert "no authentication" in caplog.text

import asyncio
from dataclasses import replace

import pytest

from reference_server.configuration.config import RouterConfig
from reference_server.configuration.settings import load
from reference_server.errors import ServerError
from reference_server.messages import ModelInfo
from reference_server.router.app import create_app
from reference_server.router.batching import Batcher
from reference_server.router.scheduling.scheduler import Scheduler
from reference_server.router.scheduling.scheduler_options import SchedulerOptions
from reference_server.router.server import HttpServer, bind
from reference_server.router.start.graceful_stop import run_until_stopped
from reference_server.router.start.start_options import scheduler_options, step_timeout_s
from reference_server.router.start.startup import warn_of_open_routes
from reference_server.router.validation.token_limits import TokenLimits
from tests.support.servers.serving import Setup, services_on
from tests.support.wire.scripted_shard import ScriptedShard
from tests.support.wire.valid_requests import valid_request

LIMITS = TokenLimits(1000, 2000, 4096, 65536)


@pytest.mark.parametrize(
    ("attention", "block_size"), [(None, 16), ("paged", 16), ("flashdecoding", 256), ("flashinfer", 1)]
)
def test_schema_v2_takes_the_page_size_from_the_name_of_the_attention(attention: str | None, block_size: int):
    environ = {} if attention is None else {"ATTENTION": attention}
    info = ModelInfo(requires_padding=False, dtype="f", device_type="cpu")

    v2 = load(RouterConfig, ["--grpc-schema", "v2"], environ).config
    v3 = load(RouterConfig, [], environ).config

    assert scheduler_options(v2, LIMITS, info).block_size == block_size
    assert scheduler_options(v3, LIMITS, replace(info, block_size=64)).block_size == 64


@pytest.mark.parametrize(
    ("configured", "device", "limit"), [(None, "cpu", 600.0), (None, "cuda", 120.0), (5.0, "cpu", 5.0)]
)
def test_the_default_depends_on_the_device(configured: float | None, device: str, limit: float):
    assert step_timeout_s(configured, device) == limit


async def test_hardening_R1_a_loop_that_fails_stops_the_server_although_a_connection_is_busy():
    setup = Setup()
    shard = ScriptedShard()
    async with services_on(shard, setup) as (services, _, task):
        task.cancel()  # this test runs the loop itself
        batcher = Batcher(shard, Scheduler(SchedulerOptions(4096, 65536)))
        with bind("127.0.0.1", 0) as listener:
            server = HttpServer(create_app(services, setup.transport), listener)
            running = asyncio.create_task(run_until_stopped(batcher, [server], grace_s=0.05))
            while not server.started:  # noqa: ASYNC110  # uvicorn offers nothing to wait for
                await asyncio.sleep(0.001)
            _, writer = await asyncio.open_connection(*listener.getsockname())
            writer.write(
                b"POST /generate HTTP/1.1\r\nhost: h\r\ncontent-type: application/json\r\ncontent-length: 99\r\n\r\n{"
            )
            await writer.drain()
            while not server.server_state.tasks:  # noqa: ASYNC110  # the request has begun
                await asyncio.sleep(0.001)
            shard.failures["prefill"] = RuntimeError("bug")
            batcher.submit(valid_request(4, 4))

            with pytest.raises(ServerError, match="the batching loop failed: bug"):
                await asyncio.wait_for(running, 30)
            writer.close()


@pytest.mark.parametrize(
    ("flags", "warns"),
    [
        (["--hostname", "0.0.0.0"], True),
        (["--hostname", "127.0.0.1"], False),
        (["--hostname", "0.0.0.0", "--api-key", "k"], False),
    ],
)
def test_hardening_R12_a_server_that_others_reach_without_a_key_is_warned_of(flags, warns, caplog):
    warn_of_open_routes(load(RouterConfig, flags, {}).config)

    assert ("listening on 0.0.0.0 without an API key" in caplog.text) == warns

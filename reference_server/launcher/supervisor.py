"""Runs a plan: starts download, shards and router in that order, and stops the router first, then the shards.

If one process ends, all end. No process or file is left when this returns, raises or is killed.
"""

import asyncio
import contextlib
import logging
import signal
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from reference_server.errors import ArgumentError, ShardError, StartupError
from reference_server.launcher.child import Child, Guardian, describe_end
from reference_server.launcher.children import (
    ChildCommand,
    Programs,
    download_adapter_command,
    download_command,
    hub_adapters,
    needs_download,
    router_command,
    shard_command,
)
from reference_server.launcher.log_relay import Scope
from reference_server.launcher.plan import LaunchPlan
from reference_server.launcher.signals import StopSignals
from reference_server.launcher.sockets import check_address, check_port, private_directory
from reference_server.presets.catalog import PRESETS
from reference_server.transport.address import tcp_url
from reference_server.transport.grpc_channel import GrpcChannel
from reference_server.transport.remote_shard import RemoteShard

logger = logging.getLogger(__name__)

POLL_S = 0.1
WAITING_LINE_S = 10.0
HEALTH_TIMEOUT_S = 5.0
DOWNLOAD_GRACE_S = 10.0
FAILURE_GRACE_S = 3.0
NODE_POLL_S = 2.0
NODE_MISSES = 3
# `timeout` and some process managers signal the process and its group: that is one request.
SAME_SIGNAL_S = 0.5


class LaunchError(StartupError):
    """A failed launch; `kind` is the first word of the `Error:` line."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


@dataclass(frozen=True, slots=True)
class PlannedLaunch:
    """A plan with its programs and environment. `sources`: where each setting came from."""

    plan: LaunchPlan
    programs: Programs
    environ: Mapping[str, str]
    sources: Mapping[str, str]


async def supervise(launch: PlannedLaunch, signals: StopSignals) -> None:
    """Serve until one of `signals`, then return. Raises `LaunchError` when a child process fails.

    Raises `ArgumentError`, before any process starts, if the port or a socket is not available.
    """
    config = launch.plan.config
    with private_directory() as directory:
        prefix = config.shard_uds_path or str(directory / "shard")
        if launch.plan.has_router:
            check_port(config.hostname, config.port)
            if config.prometheus_port is not None:
                check_port(config.hostname, config.prometheus_port)
        if not config.no_shards:
            for rank in launch.plan.ranks:
                check_address(shard_address(launch.plan, prefix, rank))
        async with _guardian(directory) as guardian:
            supervisor = _Supervisor(launch, guardian, directory, prefix)
            loop = asyncio.get_running_loop()
            with signals.received_by(lambda number: loop.call_soon_threadsafe(supervisor.stop, number)):
                await supervisor.run()


class _Supervisor:
    """Owns the child processes of a launch."""

    def __init__(self, launch: PlannedLaunch, guardian: Guardian, directory: Path, prefix: str) -> None:
        self._launch = launch
        self._plan = launch.plan
        self._timeout_s = float(launch.plan.config.graceful_termination_timeout)
        self._guardian = guardian
        self._directory = directory
        self._prefix = prefix
        self._stop = asyncio.Event()
        self._stopping_since: float | None = None
        self._running: list[Child] = []
        self._shards: list[Child] = []
        self._router: Child | None = None

    async def run(self) -> None:
        try:
            await self._serve()
        except LaunchError:
            # The remaining processes cannot finish a request.
            self._timeout_s = min(self._timeout_s, FAILURE_GRACE_S)
            raise
        finally:
            await self._shut_down()

    def stop(self, number: signal.Signals) -> None:
        """Handle a stop signal: the first one stops gracefully, the next one kills."""
        now = time.monotonic()
        if self._stopping_since is None:
            logger.info("%s: stopping", number.name)
            self._stopping_since = now
            self._stop.set()
        elif now - self._stopping_since > SAME_SIGNAL_S:
            logger.warning("%s again: killing the remaining processes", number.name)
            for child in self._running:
                child.kill_group()

    async def _serve(self) -> None:
        if not self._plan.config.no_shards:
            await self._download()
            if not self._stop.is_set():
                await self._start_shards()
        if self._stop.is_set():
            return
        if self._plan.has_router:
            await self._start_router()
            await self._watch()
        else:
            await self._watch_shards()

    async def _download(self) -> None:
        """Get the weights of the model, then the adapters that the hub has."""
        config, programs, environ = self._plan.config, self._launch.programs, self._launch.environ
        if needs_download(config):
            names = ", ".join(preset.model_id for preset in PRESETS)
            await self._download_one(
                f"the weights of {config.model_id}",
                download_command(self._plan, programs, environ),
                f"Without a hub, set --model-id to a local directory or a built-in model: {names}",
            )
        for source in hub_adapters(config):
            if self._stop.is_set():
                return
            await self._download_one(
                f"the adapter {source.location}",
                download_adapter_command(source, self._plan, programs, environ),
                f"Without a hub, set --lora-adapters {source.name}=PATH to a local directory",
            )

    async def _download_one(self, name: str, command: ChildCommand, remedy: str) -> None:
        logger.info("Downloading %s", name)
        scope = Scope("download", as_one=self._plan.config.json_output)
        child = await self._spawn("download", command, scope, "DownloadError")
        await self._first(child)
        if child.running:
            await child.stop(DOWNLOAD_GRACE_S)
            self._forget(child)
            return
        status = await child.wait()
        self._forget(child)
        if status == 0:
            logger.info("Downloaded %s", name)
            return
        scope.log(logging.ERROR, f"the download {describe_end(status)}: {await child.errors()}")
        raise LaunchError("DownloadError", f"could not load {name}: the download {describe_end(status)}. {remedy}")

    async def _start_shards(self) -> None:
        started = time.monotonic()
        rendezvous = self._directory / "rendezvous"
        for rank in self._plan.ranks:
            command = shard_command(
                self._plan, self._launch.programs, self._launch.environ, rank, self._prefix, rendezvous
            )
            scope = self._shard_scope(rank)
            self._shards.append(await self._spawn(f"shard {rank}", command, scope, "ShardCannotStart"))
        logger.info("Waiting for %d shard(s)", len(self._shards))
        waiting_line = started + WAITING_LINE_S
        # The router connects to the shards of all nodes; the other nodes wait for their own.
        waiting = list(range(self._plan.world_size) if self._plan.has_router else self._plan.ranks)
        while waiting and not self._stop.is_set():
            await self._refuse_dead_shards("ShardCannotStart")
            ready = await asyncio.gather(*(_is_ready(self._address(rank)) for rank in waiting))
            waiting = [rank for rank, is_ready in zip(waiting, ready, strict=True) if not is_ready]
            if time.monotonic() >= waiting_line:
                waiting_line += WAITING_LINE_S
                logger.info("Waiting for shard(s) %s to be ready", ", ".join(map(str, waiting)))
            if waiting:
                await asyncio.sleep(POLL_S)
        if not self._stop.is_set():
            logger.info("All shards are ready after %.1f s", time.monotonic() - started)

    async def _start_router(self) -> None:
        launch = self._launch
        command = router_command(self._plan, launch.programs, launch.environ, self._prefix, launch.sources)
        self._router = await self._spawn("router", command, None, "WebserverCannotStart")

    async def _watch(self) -> None:
        """Return at a stop signal. Raises `LaunchError` when a child process ends."""
        assert self._router is not None
        await self._first(self._router, *self._shards)
        if self._stop.is_set():
            return
        await self._refuse_dead_shards("ShardFailed")
        status = await self._router.wait()
        # If the router ended because of a shard, report the shard, which may end a moment later.
        await asyncio.sleep(POLL_S)
        await self._refuse_dead_shards("ShardFailed")
        raise LaunchError("WebserverFailed", f"the router {describe_end(status)}")

    async def _watch_shards(self) -> None:
        """On a node without the router: as `_watch`, and raise when the first node is gone."""
        logger.info("The router is on the first node")
        missed = 0
        while not self._stop.is_set():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(NODE_POLL_S):
                    await self._first(*self._shards)
            if self._stop.is_set():
                return
            await self._refuse_dead_shards("ShardFailed")
            missed = 0 if await _is_ready(self._address(0)) else missed + 1
            if missed == NODE_MISSES:
                raise LaunchError("ShardDisconnected", f"the first node's shard at {self._address(0)} is gone")

    def _address(self, rank: int) -> str:
        return shard_address(self._plan, self._prefix, rank)

    async def _refuse_dead_shards(self, kind: str) -> None:
        dead = [shard for shard in self._shards if not shard.running]
        if not dead:
            return
        ends = []
        for shard in dead:
            end, errors = f"{shard.name} {describe_end(shard.returncode)}", await shard.errors()
            self._shard_scope(self._plan.ranks[self._shards.index(shard)]).log(
                logging.ERROR, f"{end}: {errors}" if errors else end
            )
            ends.append(": ".join([end, *errors.splitlines()[-1:]]))
        raise LaunchError(kind, "; ".join(ends))

    def _shard_scope(self, rank: int) -> Scope:
        return Scope("shard-manager", {"rank": rank}, as_one=self._plan.config.json_output)

    async def _shut_down(self) -> None:
        """Stop the router first, then all shards together. A second stop signal kills them at once."""
        if self._router is not None:
            logger.info("Stopping the router")
            await self._end(self._router)
        if self._shards:
            logger.info("Stopping %d shard(s)", len(self._shards))
            await asyncio.gather(*(self._end(shard) for shard in self._shards))

    async def _end(self, child: Child) -> None:
        await child.stop(self._timeout_s)
        self._forget(child)

    def _forget(self, child: Child) -> None:
        self._running.remove(child)
        self._guardian.forget(child)

    async def _first(self, *children: Child) -> None:
        """Wait until a child process has ended or a stop is requested."""
        tasks = [asyncio.create_task(child.wait()) for child in children]
        stop = asyncio.create_task(self._stop.wait())
        try:
            await asyncio.wait([stop, *tasks], return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (stop, *tasks):
                task.cancel()

    async def _spawn(self, name: str, command: ChildCommand, scope: Scope | None, kind: str) -> Child:
        logger.info("Starting %s: %s", name, " ".join(command.argv))
        try:
            child = await Child.spawn(name, command, scope)
        except StartupError as error:
            raise LaunchError(kind, str(error)) from error
        self._running.append(child)
        self._guardian.watch(child, drains=name == "router")
        return child


def shard_address(plan: LaunchPlan, prefix: str, rank: int) -> str:
    """The address of a shard: a socket's path, or with several nodes a TCP url. Raises ArgumentError."""
    if plan.config.num_nodes == 1:
        return f"{prefix}-{rank}"
    try:
        return tcp_url(plan.config.shard_addr[rank])
    except ValueError as error:
        raise ArgumentError(f"`shard_addr`: {error}") from None


async def _is_ready(address: str) -> bool:
    """Whether a shard answers Health at its address."""
    try:
        async with asyncio.timeout(HEALTH_TIMEOUT_S):
            shard = RemoteShard(await GrpcChannel.open(address))
            try:
                await shard.health()
            finally:
                await shard.close()
    except (ShardError, TimeoutError) as error:
        logger.debug("%s is not ready: %s", address, error)
        return False
    return True


@contextlib.asynccontextmanager
async def _guardian(directory: Path) -> AsyncIterator[Guardian]:
    guardian = await Guardian.start()
    guardian.remove_at_end(directory)
    try:
        yield guardian
    finally:
        await guardian.dismiss()

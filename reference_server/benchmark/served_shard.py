"""A model server for the time of a benchmark: started on a socket in a private directory, stopped at the end."""

import asyncio
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager

from reference_server.errors import ShardConnectionError, StartupError
from reference_server.launcher.child import Child, Guardian, describe_end
from reference_server.launcher.children import ChildCommand, Programs
from reference_server.launcher.log_relay import Scope
from reference_server.launcher.sockets import private_directory
from reference_server.transport.grpc_channel import GrpcChannel

STOP_S = 10.0
POLL_S = 0.1


@asynccontextmanager
async def served_shard(model_id: str, flags: Sequence[str], environ: Mapping[str, str]) -> AsyncIterator[str]:
    """Serve `model_id` with flags of `text-generation-server serve`; yields the path of its socket.

    The process ends with this one, even if this one is killed. Raises StartupError, with the log of a failed start.
    """
    program = Programs.beside(sys.executable).server
    with private_directory() as directory:
        guardian = await Guardian.start()
        guardian.remove_at_end(directory)
        prefix = directory / "shard"
        argv = (*program, "serve", model_id, "--uds-path", str(prefix), "--json-output", *flags)
        try:
            child = await Child.spawn("the model server", ChildCommand(argv, environ), Scope("shard-manager"))
            guardian.watch(child, drains=False)
            try:
                socket = f"{prefix}-0"
                await _wait_for(child, socket)
                yield socket
            finally:
                await child.stop(STOP_S)
                guardian.forget(child)
        finally:
            await guardian.dismiss()


async def _wait_for(child: Child, socket: str) -> None:
    """Return when the model server answers."""
    while True:
        if not child.running:
            raise StartupError(f"{child.name} {describe_end(child.returncode)}: {await child.errors()}")
        try:
            channel = await GrpcChannel.open(socket)
        except ShardConnectionError:
            await asyncio.sleep(POLL_S)
        else:
            await channel.close()
            return

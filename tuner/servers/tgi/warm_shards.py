"""Keeps a model server running between trials. If only router settings change, only the router is restarted.

The weights stay loaded. The router connects as it does in a full launch, so results equal those of a fresh launch.
Confirmation always uses fresh launches.
"""

import json
import os
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from loadgen.errors import StartError
from loadgen.target.launched.launch import LaunchedProcess
from reference_server.configuration.config import ServerConfig
from reference_server.launcher.children import Programs, router_command, shard_command
from reference_server.launcher.plan import LaunchPlan
from tuner.servers.launch_command import LaunchCommand
from tuner.servers.tgi.derive import facts_of, local_devices
from tuner.servers.tgi.settings import server_config

# Settings that only the router reads.
ROUTER_ONLY = frozenset(("max_waiting_tokens", "waiting_served_ratio", "max_batch_size", "max_concurrent_requests"))
SHARD_LOG = "shard.log"
POLL_S = 0.05


@dataclass(slots=True)
class WarmShards:
    """At most one running model server. It is restarted if a trial needs other model settings."""

    ready_timeout_s: float
    state: str = "none"
    _key: str = ""
    _process: LaunchedProcess | None = None
    _folder: tempfile.TemporaryDirectory[str] | None = field(default=None)

    def launch_for(
        self, settings: Mapping[str, Any], launch: LaunchCommand, directory: Path, steps: Path | None
    ) -> LaunchCommand:
        """The router's command for a configuration, after its model server is started.

        A configuration with several shards gets `launch`, the whole command. Raises StartError if the model server does
        not start.
        """
        config = server_config({**settings, **({"step_trace": steps.resolve()} if steps is not None else {})})
        plan = LaunchPlan.resolve(config, facts_of(config.model_id or ""), local_devices())
        if plan.num_shards > 1 or config.shard_addr:
            self.stop()
            return launch
        key = model_settings_key(config)
        if key != self._key or self._process is None or self._process.exit_code is not None:
            self.stop()
            self._start(plan, directory)
            self._key, self.state = key, "started"
        else:
            self.state = "kept"
        child = router_command(plan, _programs(), os.environ, self._socket, {})
        return LaunchCommand(tuple(_with_port(child.argv)), dict(child.environ))

    def stop(self) -> None:
        """Stop the model server if one runs."""
        if self._process is not None:
            self._process.stop()
        if self._folder is not None:
            self._folder.cleanup()
        self._process, self._folder, self._key, self.state = None, None, "", "none"

    @property
    def exit_code(self) -> int | None:
        return self._process.exit_code if self._process is not None else None

    def log_tail(self) -> str:
        return self._process.log_tail() if self._process is not None else ""

    @property
    def _socket(self) -> str:
        assert self._folder is not None, "no model server runs"
        return str(Path(self._folder.name) / "shard")

    def _start(self, plan: LaunchPlan, directory: Path) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="tgi-", ignore_cleanup_errors=True)
        rendezvous = Path(self._folder.name) / "rendezvous"
        child = shard_command(plan, _programs(), os.environ, 0, self._socket, rendezvous)
        self._process = LaunchedProcess(child.argv, directory / SHARD_LOG, dict(child.environ))
        self._process.start()
        deadline_s = time.monotonic() + self.ready_timeout_s
        while not Path(f"{self._socket}-0").exists():
            self._process.check_alive()
            if time.monotonic() > deadline_s:
                raise StartError(
                    f"the model server was not ready after {self.ready_timeout_s:g} s", self._process.log_tail()
                )
            time.sleep(POLL_S)


def model_settings_key(config: ServerConfig) -> str:
    """A key of the settings that need a restart of the model server: all except those of the router."""
    return json.dumps(config.model_dump(mode="json", exclude={*ROUTER_ONLY, "step_trace"}), sort_keys=True, default=str)


def _programs() -> Programs:
    return Programs.beside(sys.executable)


def _with_port(argv: tuple[str, ...]) -> list[str]:
    """The command with the loopback interface and a placeholder for the port."""
    words = list(argv)
    words[words.index("--port") + 1] = "{port}"
    words[words.index("--hostname") + 1] = "127.0.0.1"
    return words

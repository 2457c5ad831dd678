"""Model servers that stand between trials: where only router settings change, the router alone is started again.

The weights stay loaded and the socket is the launcher's kind, so what is measured is what a launch would measure;
confirmation is always on fresh launches all the same.
"""

import json
import os
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

from loadgen.errors import StartError
from loadgen.launch import LaunchedProcess
from reference_server.config import ServerConfig
from reference_server.launcher.children import Programs, router_command, shard_command
from reference_server.launcher.plan import LaunchPlan
from tuner.derive import facts_of
from tuner.identity import devices
from tuner.targets import Launch

# What the router alone reads.
ROUTER_ONLY = frozenset(("max_waiting_tokens", "waiting_served_ratio", "max_batch_size", "max_concurrent_requests"))
SHARD_LOG = "shard.log"
POLL_S = 0.05


@dataclass(slots=True)
class StandingShards:
    """At most one model server, started when a trial needs another one than stands."""

    ready_timeout_s: float
    state: str = "none"
    _key: str = ""
    _process: LaunchedProcess | None = None
    _folder: tempfile.TemporaryDirectory[str] | None = field(default=None)

    def launch_for(self, config: ServerConfig, launch: Launch, directory: Path) -> Launch:
        """The router's command line for a configuration, its model server standing.

        Raises StartError when that does not come up. A configuration of several shards is launched whole.
        """
        plan = LaunchPlan.resolve(config, facts_of(config.model_id or ""), devices())
        if plan.num_shards > 1 or config.shard_addr:
            self.stop()
            return launch
        key = model_side(config)
        if key != self._key or self._process is None or self._process.exit_code is not None:
            self.stop()
            self._start(plan, directory)
            self._key, self.state = key, "started"
        else:
            self.state = "kept"
        child = router_command(plan, _programs(), os.environ, self._socket, {})
        return Launch(tuple(_with_port(child.argv)), dict(child.environ))

    def stop(self) -> None:
        """End the model server, if one stands."""
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
        assert self._folder is not None, "a model server stands"
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


def model_side(config: ServerConfig) -> str:
    """What the model server and its warm-up depend on: every setting but the router's own."""
    return json.dumps(config.model_dump(mode="json", exclude={*ROUTER_ONLY, "step_trace"}), sort_keys=True, default=str)


def _programs() -> Programs:
    return Programs.beside(sys.executable)


def _with_port(argv: tuple[str, ...]) -> list[str]:
    """The command with a port that is filled in when it is started, on this machine's loopback interface."""
    words = list(argv)
    words[words.index("--port") + 1] = "{port}"
    words[words.index("--hostname") + 1] = "127.0.0.1"
    return words

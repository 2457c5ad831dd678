"""The command line that starts a server under study, and the removal of its container."""

import subprocess
from dataclasses import dataclass, field
from pathlib import Path

from loadgen.target.launched.launched_target import LaunchedTarget

CIDFILE = "container.id"


@dataclass(frozen=True, slots=True)
class LaunchCommand:
    """A command line with its environment variables.

    container: file to which docker writes the container's id. ready: route that returns 200 when the server is ready.
    """

    command: tuple[str, ...]
    environment: dict[str, str] = field(default_factory=dict)
    container: Path | None = None
    ready: str = "/health"

    def target(self, log: Path, ready_timeout_s: float) -> LaunchedTarget:
        """The launched server as a context manager. Its output is written to `log`."""
        return LaunchedTarget(
            self.command, log, ready_timeout_s=ready_timeout_s, environment=self.environment, ready_route=self.ready
        )


def remove_container(container: Path | None) -> None:
    """Remove the container whose id is in this file, if the file exists."""
    if container is None or not container.exists():
        return
    subprocess.run(["docker", "rm", "-f", container.read_text().strip()], capture_output=True, check=False, timeout=120)
    container.unlink()

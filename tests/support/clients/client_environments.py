"""One virtual environment for each client, created once and kept under a hash of its requirements.

Clients need different versions of shared packages, so they share no environment with each other or with the product.
pip is this interpreter's, with its configuration, indexes and wheels.
"""

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
import venv
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from tests.support.environment import OUTSIDE

#: Names the directory of the environments, if set.
DIRECTORY_VARIABLE = "TGI_BENCH_CLIENTS_DIR"
INSTALL_S = 1800
PROBE_S = 60

_FINISHED = "finished"


class IndexUnreachableError(Exception):
    """No package index answered."""


class InstallError(Exception):
    """A package index answered, but pip failed."""


@dataclass(frozen=True, slots=True)
class Environment:
    """A finished environment."""

    directory: Path

    @property
    def python(self) -> Path:
        return self.directory / "bin" / "python"

    def version_of(self, distribution: str) -> str:
        """Of an installed distribution. Raises `PackageNotFoundError`."""
        paths = [str(path) for path in self.directory.glob("lib/python*/site-packages")]
        found = next(iter(metadata.distributions(name=distribution, path=paths)), None)
        if found is None:
            raise metadata.PackageNotFoundError(distribution)
        return found.version


def root() -> Path:
    directory = os.environ.get(DIRECTORY_VARIABLE)
    return Path(directory) if directory else Path.home() / ".cache" / "tgi-bench" / "clients"


def environment_for(name: str, requirements: Sequence[str], under: Path | None = None) -> Environment:
    """The environment with exactly these requirements, created if missing; the first is the client, `NAME==VERSION`.

    Raises `IndexUnreachableError` if no index answers, `InstallError` if pip fails.
    """
    requested = json.dumps([sys.version_info[:2], sorted(requirements)])
    key = hashlib.sha256(requested.encode()).hexdigest()[:12]
    directory = (under or root()) / f"{name}-{key}"
    with _locked(directory):
        if not (directory / _FINISHED).is_file():
            require_index(requirements[0].partition("=")[0])
            _make(directory, requirements)
    return Environment(directory)


def require_index(distribution: str) -> None:
    """Raise `IndexUnreachableError` unless pip, as configured, reaches an index for a distribution.

    An index without the distribution is reachable.
    """
    command = [sys.executable, "-m", "pip", "index", "versions", distribution, "-vv", "--no-cache-dir"]
    command += ["--retries", "1", "--timeout", "15", "--disable-pip-version-check"]
    try:
        probe = subprocess.run(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=_environ(), text=True, timeout=PROBE_S
        )
    except subprocess.TimeoutExpired as error:
        raise IndexUnreachableError(f"no index answered about {distribution} within {PROBE_S} s") from error
    reason = unreachable(probe.stdout)
    if probe.returncode and reason:
        raise IndexUnreachableError(reason)


def unreachable(output: str) -> str | None:
    """The line of pip's output that explains why no index answered, or None."""
    for line in output.splitlines():
        if line.startswith("Ignoring indexes:"):
            return line
        if line.startswith("Could not fetch URL") and "404 Client Error" not in line:
            return line
    return None


def _environ() -> dict[str, str]:
    """pip needs the proxies, certificates and indexes that the suite hides from the tests."""
    return OUTSIDE | os.environ


def _make(directory: Path, requirements: Sequence[str]) -> None:
    shutil.rmtree(directory, ignore_errors=True)
    venv.create(directory, symlinks=True)
    command = [sys.executable, "-m", "pip", "--python", str(directory / "bin" / "python"), "install", "--quiet"]
    try:
        subprocess.run(
            [*command, *requirements],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=_environ(),
            text=True,
            check=True,
            timeout=INSTALL_S,
        )
    except subprocess.CalledProcessError as error:
        raise InstallError(f"pip could not install {', '.join(requirements)}:\n{error.stdout}") from error
    (directory / _FINISHED).touch()


@contextlib.contextmanager
def _locked(directory: Path) -> Iterator[None]:
    """Alone with a directory among the processes of this machine."""
    directory.parent.mkdir(parents=True, exist_ok=True)
    with (directory.parent / f"{directory.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield

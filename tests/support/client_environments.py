"""A virtual environment of its own for each client, made once and kept by what is asked of it.

Clients disagree about the versions of what they share, so none can live beside another, nor beside the product.
pip is this interpreter's, and so are its configuration, its indexes and its wheels.
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

#: Where environments are kept, unless this variable of the environment says otherwise.
DIRECTORY_VARIABLE = "TGI_BENCH_CLIENTS_DIR"
INSTALL_S = 1800
PROBE_S = 60

_FINISHED = "finished"


class IndexUnreachableError(Exception):
    """No package index could be asked."""


class InstallError(Exception):
    """An index was there, and pip failed all the same."""


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
    given = os.environ.get(DIRECTORY_VARIABLE)
    return Path(given) if given else Path.home() / ".cache" / "tgi-bench" / "clients"


def environment_for(name: str, requirements: Sequence[str], under: Path | None = None) -> Environment:
    """The environment with exactly these requirements, made if there is none; the first is the client, `NAME==VERSION`.

    Raises `IndexUnreachableError` if it has to be made and no index answers, `InstallError` if one does and pip fails.
    """
    asked = json.dumps([sys.version_info[:2], sorted(requirements)])
    key = hashlib.sha256(asked.encode()).hexdigest()[:12]
    directory = (under or root()) / f"{name}-{key}"
    with _locked(directory):
        if not (directory / _FINISHED).is_file():
            require_index(requirements[0].partition("=")[0])
            _make(directory, requirements)
    return Environment(directory)


def require_index(distribution: str) -> None:
    """Raise `IndexUnreachableError` unless pip, as it is configured, can ask an index for a distribution.

    An index that answers and does not have the distribution is reachable.
    """
    command = [sys.executable, "-m", "pip", "index", "versions", distribution, "-vv", "--no-cache-dir"]
    command += ["--retries", "1", "--timeout", "15", "--disable-pip-version-check"]
    try:
        told = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=PROBE_S)
    except subprocess.TimeoutExpired as error:
        raise IndexUnreachableError(f"no index answered about {distribution} within {PROBE_S} s") from error
    reason = unreachable(told.stdout)
    if told.returncode and reason:
        raise IndexUnreachableError(reason)


def unreachable(told: str) -> str | None:
    """Why no index was asked, in pip's own words, or None if one was."""
    for line in told.splitlines():
        if line.startswith("Ignoring indexes:"):
            return line
        if line.startswith("Could not fetch URL") and "404 Client Error" not in line:
            return line
    return None


def _make(directory: Path, requirements: Sequence[str]) -> None:
    shutil.rmtree(directory, ignore_errors=True)
    venv.create(directory, symlinks=True)
    command = [sys.executable, "-m", "pip", "--python", str(directory / "bin" / "python"), "install", "--quiet"]
    try:
        subprocess.run(
            [*command, *requirements],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
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

"""A git revision of this product as a side of a comparison: its worktree, its environment, its launcher.

Where the revision asks for the same packages as the checkout it is built from, its environment reuses the installed
ones, so that building costs seconds.
"""

import contextlib
import os
import shutil
import site
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loadgen.errors import MeasurementError, UsageError

GIT_S = 120.0
INSTALL_S = 1_800.0
LAUNCHER = "text-generation-launcher"
TAIL_CHARACTERS = 2_000


@dataclass(frozen=True, slots=True)
class Revision:
    """A commit and the repository that has it."""

    repository: Path
    commit: str

    @classmethod
    def find(cls, name: str, directory: Path | None = None) -> "Revision":
        """The commit that a name means where we are. Raises UsageError."""
        here = directory or Path()
        root = _git(here, "rev-parse", "--show-toplevel")
        if root is None:
            raise UsageError(f"git:{name}: {here.resolve()} is in no git repository")
        commit = _git(here, "rev-parse", "--verify", "--quiet", "--end-of-options", f"{name}^{{commit}}")
        if commit is None:
            raise UsageError(f"git:{name}: there is no such revision in {root}; a shallow clone has only its newest")
        return cls(Path(root), commit)


@dataclass(frozen=True, slots=True)
class Built:
    """A revision that can be launched. `launcher` keeps the checkouts that a user stands in out of its imports."""

    launcher: tuple[str, ...]
    is_reused: bool
    seconds: float


@contextlib.contextmanager
def build(revision: Revision, directory: Path) -> Iterator[Built]:
    """Check a revision out, install it, and take it away when left.

    Raises MeasurementError when it cannot be installed, UsageError when it has no launcher.
    """
    started_s = time.monotonic()
    source, environment = directory.resolve() / "tree", directory.resolve() / "environment"
    directory.mkdir(parents=True, exist_ok=True)
    _git_or_fail(revision, "worktree", "add", "--detach", "--force", str(source), revision.commit)
    try:
        is_reused = dependencies(source) == dependencies(revision.repository)
        python = _make_environment(environment, is_reused)
        _install(python, source, is_reused)
        launcher = python.with_name(LAUNCHER)
        if not launcher.exists():
            raise UsageError(f"git:{revision.commit[:12]} installs no {LAUNCHER}; compare commands or images instead")
        words = ("env", "-u", "PYTHONPATH", "PYTHONSAFEPATH=1", str(launcher))
        yield Built(words, is_reused, time.monotonic() - started_s)
    finally:
        _git(revision.repository, "worktree", "remove", "--force", str(source))
        shutil.rmtree(directory, ignore_errors=True)


def read_at(revision: Revision, path: str) -> bytes:
    """A file as it is in a revision; the path is from the repository's root. Raises UsageError."""
    done = _run_git(revision.repository, "show", f"{revision.commit}:{path}")
    if done is None or done.returncode:
        raise UsageError(f"git:{revision.commit[:12]}:{path}: there is no such file in that revision")
    return done.stdout


def dependencies(root: Path) -> dict[str, Any]:
    """What decides which packages a checkout needs: its dependency tables and its exact versions."""
    try:
        project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8")).get("project", {})
    except (OSError, tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"{root}: no readable pyproject.toml to install from ({error})") from error
    constraints = root / "constraints.txt"
    return {
        "dependencies": sorted(project.get("dependencies", ())),
        "extras": {name: sorted(packages) for name, packages in project.get("optional-dependencies", {}).items()},
        "python": project.get("requires-python"),
        "constraints": constraints.read_text(encoding="utf-8") if constraints.exists() else "",
    }


def _make_environment(directory: Path, is_reused: bool) -> Path:
    """A virtual environment; its Python."""
    _run([sys.executable, "-m", "venv", "--without-pip", str(directory)], "make an environment")
    python = directory / "bin" / "python"
    if is_reused:
        # What `--system-site-packages` gives is the base Python's packages, and ours may be those of an environment.
        found = [*site.getsitepackages(), site.getusersitepackages()]
        [own] = (directory / "lib").glob("python*/site-packages")
        (own / "reused.pth").write_text("".join(f"{path}\n" for path in found if Path(path).is_dir()))
    return python


def _install(python: Path, source: Path, is_reused: bool) -> None:
    pip = [sys.executable, "-m", "pip", "--python", str(python), "--disable-pip-version-check", "install", "--quiet"]
    if is_reused:
        _run([*pip, "--no-deps", "--no-build-isolation", "--no-index", str(source)], "install the revision")
        return
    constraints = source / "constraints.txt"
    exact = ["--constraint", str(constraints)] if constraints.exists() else []
    _run([*pip, *exact, f"{source}[server]"], "install the revision and its packages")


def _run(words: list[str], purpose: str) -> None:
    """Raises MeasurementError with the end of what it said."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    try:
        done = subprocess.run(
            words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=INSTALL_S, env=environment
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise MeasurementError(f"could not {purpose}: {error}") from error
    if done.returncode:
        raise MeasurementError(f"could not {purpose}:\n{done.stdout[-TAIL_CHARACTERS:].rstrip()}")


def _git_or_fail(revision: Revision, *arguments: str) -> None:
    done = _run_git(revision.repository, *arguments)
    if done is None or done.returncode:
        said = done.stderr.decode(errors="replace").strip() if done is not None else "it did not answer"
        raise MeasurementError(f"git {arguments[0]} {arguments[1]} of {revision.commit[:12]} failed: {said}")


def _git(directory: Path, *arguments: str) -> str | None:
    done = _run_git(directory, *arguments)
    return done.stdout.decode(errors="replace").strip() if done is not None and done.returncode == 0 else None


def _run_git(directory: Path, *arguments: str) -> "subprocess.CompletedProcess[bytes] | None":
    try:
        return subprocess.run(["git", "-C", str(directory), *arguments], capture_output=True, timeout=GIT_S)
    except (OSError, subprocess.TimeoutExpired):
        return None

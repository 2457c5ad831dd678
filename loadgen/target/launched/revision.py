"""A git revision of this product as a side of a comparison: its worktree, environment and launcher.

If the revision needs the same packages as the current checkout, its environment reuses the installed ones and building
takes seconds.
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
CHECKED_OUT, INSTALLED = "checked-out", "installed"
"""Files in a directory of `check_out` and `build`, written when that step is complete."""
TAIL_CHARACTERS = 2_000


@dataclass(frozen=True, slots=True)
class Revision:
    """A commit and its repository."""

    repository: Path
    commit: str

    @classmethod
    def find(cls, name: str, directory: Path | None = None) -> "Revision":
        """The commit of a name in the repository of a directory, by default the current one. Raises UsageError."""
        here = directory or Path()
        root = _git(here, "rev-parse", "--show-toplevel")
        if root is None:
            raise UsageError(f"git:{name}: {here.resolve()} is not in a git repository")
        commit = _git(here, "rev-parse", "--verify", "--quiet", "--end-of-options", f"{name}^{{commit}}")
        if commit is None:
            raise UsageError(f"git:{name}: no such revision in {root}; a shallow clone has only the newest")
        return cls(Path(root), commit)


@dataclass(frozen=True, slots=True)
class Built:
    """A revision that can be started. `launcher` excludes the current directory from its imports."""

    launcher: tuple[str, ...]
    is_reused: bool
    seconds: float


def first_parents(good: Revision, bad: Revision) -> list[str]:
    """Commits from `good` to `bad`, both included, along first parents. Raises UsageError if there is no such line."""
    listed = _git(good.repository, "rev-list", "--first-parent", "--reverse", f"{good.commit}..{bad.commit}") or ""
    commits = [good.commit, *listed.split()]
    parent = _git(good.repository, "rev-parse", "--verify", "--quiet", f"{commits[1]}^") if len(commits) > 1 else None
    if parent != good.commit or commits[-1] != bad.commit:
        raise UsageError(f"{bad.commit[:12]} does not descend from {good.commit[:12]} by first parents")
    return commits


@contextlib.contextmanager
def check_out(revision: Revision, directory: Path, *, is_kept: bool = False) -> Iterator[Path]:
    """The files of a revision in a worktree, which is removed at the end. Raises MeasurementError.

    With `is_kept` they stay in the directory, and the next call finds them there; `remove_check_out` removes them.
    """
    tree = directory.resolve() / "tree"
    if not (is_kept and (directory / CHECKED_OUT).exists()):
        remove_check_out(revision, directory)
        directory.mkdir(parents=True, exist_ok=True)
        _git_or_fail(revision, "worktree", "add", "--detach", "--force", str(tree), revision.commit)
        (directory / CHECKED_OUT).write_text(revision.commit)
    try:
        yield tree
    finally:
        if not is_kept:
            remove_check_out(revision, directory)


def remove_check_out(revision: Revision, directory: Path) -> None:
    """Remove a worktree, with what was built in its directory."""
    if directory.exists():
        _git(revision.repository, "worktree", "remove", "--force", str(directory.resolve() / "tree"))
        shutil.rmtree(directory, ignore_errors=True)


@contextlib.contextmanager
def build(revision: Revision, directory: Path, *, is_kept: bool = False) -> Iterator[Built]:
    """Check out and install a revision; remove it when the context ends, unless `is_kept`.

    Raises MeasurementError if it cannot be installed, UsageError if it has no launcher.
    """
    started_s = time.monotonic()
    with check_out(revision, directory, is_kept=is_kept) as source:
        environment = directory.resolve() / "environment"
        is_reused = dependencies(source) == dependencies(revision.repository)
        installed = directory / INSTALLED
        if not installed.exists():
            shutil.rmtree(environment, ignore_errors=True)
            _install(_make_environment(environment, is_reused), source, is_reused)
            installed.touch()
        launcher = environment / "bin" / LAUNCHER
        if not launcher.exists():
            raise UsageError(f"git:{revision.commit[:12]} has no {LAUNCHER}; compare commands or images instead")
        words = ("env", "-u", "PYTHONPATH", "PYTHONSAFEPATH=1", str(launcher))
        yield Built(words, is_reused, time.monotonic() - started_s)


def read_at(revision: Revision, path: str) -> bytes:
    """The content of a file in a revision; the path is relative to the repository's root. Raises UsageError."""
    done = _run_git(revision.repository, "show", f"{revision.commit}:{path}")
    if done is None or done.returncode:
        raise UsageError(f"git:{revision.commit[:12]}:{path}: no such file in that revision")
    return done.stdout


def dependencies(root: Path) -> dict[str, Any]:
    """Everything that determines which packages a checkout needs: dependencies, extras, exact versions."""
    try:
        project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8")).get("project", {})
    except (OSError, tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"{root}: cannot read pyproject.toml ({error})") from error
    constraints = root / "constraints.txt"
    return {
        "dependencies": sorted(project.get("dependencies", ())),
        "extras": {name: sorted(packages) for name, packages in project.get("optional-dependencies", {}).items()},
        "python": project.get("requires-python"),
        "constraints": constraints.read_text(encoding="utf-8") if constraints.exists() else "",
    }


def _make_environment(directory: Path, is_reused: bool) -> Path:
    """Create a virtual environment; returns its Python."""
    _run([sys.executable, "-m", "venv", "--without-pip", str(directory)], "make an environment")
    python = directory / "bin" / "python"
    if is_reused:
        # `--system-site-packages` gives the base Python's packages, but this Python may be in an environment itself.
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
    """Run a command. Raises MeasurementError with the end of its output."""
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
        output = done.stderr.decode(errors="replace").strip() if done is not None else f"no end within {GIT_S:g} s"
        raise MeasurementError(f"git {arguments[0]} {arguments[1]} of {revision.commit[:12]} failed: {output}")


def _git(directory: Path, *arguments: str) -> str | None:
    done = _run_git(directory, *arguments)
    return done.stdout.decode(errors="replace").strip() if done is not None and done.returncode == 0 else None


def _run_git(directory: Path, *arguments: str) -> "subprocess.CompletedProcess[bytes] | None":
    try:
        return subprocess.run(["git", "-C", str(directory), *arguments], capture_output=True, timeout=GIT_S)
    except (OSError, subprocess.TimeoutExpired):
        return None

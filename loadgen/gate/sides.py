"""The sides of a comparison: parsing them from the command line, and opening a server of each for a run."""

import contextlib
import hashlib
import json
import shlex
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from loadgen.config.bench_config import BenchConfig
from loadgen.config.target_settings import EMBEDDED_PERMITS
from loadgen.errors import MeasurementError, UsageError
from loadgen.progress import ProgressDisplay, SilentProgress
from loadgen.redaction import redacted_argv
from loadgen.target.access import Access
from loadgen.target.launched.file_cache import FileCache
from loadgen.target.launched.launch import find_launcher, split_command
from loadgen.target.launched.launched_target import LaunchedTarget
from loadgen.target.launched.revision import Revision, build, read_at
from loadgen.target.target import Target

FORMS = (
    "a URL, a server's TOML file, git:REV (or git:REV:FILE of a TOML file in it), image:NAME, command:COMMAND, "
    "stored:DIR or baseline:NAME"
)
DOCKER_S = 60.0


class SideServer(Protocol):
    """The server of a side."""

    @property
    def words(self) -> Sequence[str]:
        """The command line that starts it, or its URL, for display."""

    def open(self, load: BenchConfig, log: Path) -> AbstractContextManager[Target]:
        """A server that answers until the context ends. Raises StartError."""


@dataclass(frozen=True, slots=True)
class CommandServer:
    """A command line that is started for every run."""

    words: tuple[str, ...]

    def open(self, load: BenchConfig, log: Path) -> AbstractContextManager[Target]:
        return LaunchedTarget(
            self.words,
            log,
            ready_timeout_s=load.ready_timeout,
            api=load.api,
            access=Access.of(load),
            file_cache=FileCache.of(load.file_cache, load.model_files, self.words),
        )


@dataclass(frozen=True, slots=True)
class ImageServer:
    """A container image that is started for every run and published on the loopback interface only.

    Its server listens on the port in PORT, as TGI's launcher does. The container is removed by its recorded id,
    because `docker run` may end before the container does.
    """

    name: str
    arguments: tuple[str, ...] = ()
    docker_arguments: tuple[str, ...] = ()

    @property
    def words(self) -> tuple[str, ...]:
        published = ("--publish", "127.0.0.1:{port}:{port}", "--env", "PORT={port}", "--env", "HOSTNAME=0.0.0.0")
        return ("docker", "run", "--rm", *published, *self.docker_arguments, self.name, *self.arguments)

    @contextlib.contextmanager
    def open(self, load: BenchConfig, log: Path) -> Iterator[Target]:
        recorded = log.with_name("container-{port}.id")
        words = (*self.words[:3], "--cidfile", str(recorded.resolve()), *self.words[3:])
        try:
            with CommandServer(words).open(load, log) as target:
                yield target
        finally:
            for file in log.parent.glob("container-*.id"):
                _remove_container(file)


@dataclass(frozen=True, slots=True)
class RunningServer:
    """A server that runs already and is not restarted."""

    url: str

    @property
    def words(self) -> tuple[str, ...]:
        return (self.url,)

    @contextlib.contextmanager
    def open(self, load: BenchConfig, log: Path) -> Iterator[Target]:  # noqa: ARG002
        if load.file_cache != "natural":
            raise UsageError(
                f"`file_cache` is {load.file_cache!r} but {self.url} already runs and is not launched; leave it out"
            )
        yield Target(self.url, Access.of(load))


@dataclass(frozen=True, slots=True)
class LiveSide:
    """A side that can be measured. `identity` is stored with its runs: commit, image digest, digest of its config."""

    letter: str
    label: str
    server: SideServer
    identity: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class SideSpec:
    """A side as the command line gives it: kind, name, label and the arguments added to its server's command.

    `docker_arguments` go to `docker run`: devices, shared memory, volumes.
    """

    letter: str
    kind: str
    name: str
    label: str
    arguments: tuple[str, ...] = ()
    docker_arguments: tuple[str, ...] = ()

    @property
    def is_stored(self) -> bool:
        return self.kind in ("stored", "baseline")


def read_side(
    letter: str, text: str, label: str | None, arguments: str | None = None, docker_arguments: str | None = None
) -> SideSpec:
    """Parse one side. Raises UsageError that lists the accepted forms.

    >>> read_side("a", "git:main", None).kind, read_side("b", "http://h:1", "new").label
    ('git', 'new')
    """
    kind, _, name = text.partition(":")
    if kind not in ("git", "image", "command", "config", "stored", "baseline") or not name:
        kind, name = _kind_of(text), text
    added = tuple(split_command(arguments)) if arguments else ()
    if added and kind in ("url", "command", "stored", "baseline"):
        raise UsageError(f"`args-{letter}` is given but side {letter.upper()} is {text!r}, which accepts no arguments")
    if any(word == "--port" or word.startswith("--port=") for word in added):
        raise UsageError(f"`args-{letter}` sets --port, but every launch gets its own free port; leave it out")
    # A command may be long and contain secrets, so its side is named by its letter.
    shown = letter.upper() if kind == "command" else name if kind in ("git", "image", "baseline") else text
    container = tuple(split_command(docker_arguments)) if docker_arguments and kind == "image" else ()
    return SideSpec(letter, kind, name, label or _label(shown, added), added, container)


def _kind_of(text: str) -> str:
    if text.startswith(("http://", "https://")):
        return "url"
    path = Path(text)
    if path.suffix == ".toml":
        return "config"
    if text and path.is_dir():
        return "stored"
    raise UsageError(f"{text!r} is not a side of a comparison; a side is {FORMS}")


def _label(name: str, arguments: Sequence[str]) -> str:
    return " ".join((name, *redacted_argv(arguments)))[:200]


def open_side(
    spec: SideSpec,
    load: BenchConfig,
    out: Path,
    stack: ExitStack,
    progress: ProgressDisplay,
    *,
    is_build_kept: bool = False,
) -> LiveSide:
    """Prepare a side for its runs: a revision is built, and removed when `stack` is closed unless `is_build_kept`.

    Raises UsageError if the side does not exist, MeasurementError if it cannot be built.
    """
    identity: dict[str, str] = {}
    server: SideServer
    match spec.kind:
        case "url":
            server = RunningServer(spec.name.rstrip("/"))
        case "command":
            server = CommandServer(tuple(split_command(spec.name)))
        case "image":
            server = ImageServer(spec.name, ("--model-id", load.model_id, *spec.arguments), spec.docker_arguments)
            identity = {"image": spec.name, **_image_digest(spec.name)}
        case "config":
            server, identity = _configured(Path(spec.name), spec.arguments)
        case "git":
            server, identity = _at_revision(spec, load, out, stack, progress, is_build_kept=is_build_kept)
        case _:
            raise AssertionError(spec.kind)
    return LiveSide(spec.letter, spec.label, server, identity)


def planned_words(spec: SideSpec, load: BenchConfig) -> list[str]:
    """The command line that a side would start, without building it. Raises UsageError if the side does not exist."""
    match spec.kind:
        case "git":
            revision, _, file = spec.name.partition(":")
            Revision.find(revision)
            named = ("--config-file", file) if file else _embedded(load)
            return [f"<{revision}>/bin/text-generation-launcher", *named, *spec.arguments]
        case "stored" | "baseline":
            return []
        case _:
            with ExitStack() as stack:
                return list(open_side(spec, load, Path(), stack, SilentProgress()).server.words)


def describe_sides(sides: Sequence[SideSpec], load: BenchConfig) -> str:
    """The commands that would be started, and the load, as JSON."""
    servers = {side.letter: {"label": side.label, "server": redacted_argv(planned_words(side, load))} for side in sides}
    return json.dumps({"sides": servers, "load": load.resolved()}, indent=2)


def check_docker(sides: Sequence[SideSpec], arguments: str | None) -> None:
    """Raises UsageError for `docker run` arguments if no side is an image."""
    if arguments is not None and all(side.kind != "image" for side in sides):
        raise UsageError(f"`docker_args` is {arguments!r} but no side is an image (image:NAME)")


def check_relaunch(sides: Sequence[SideSpec], is_accepted: bool) -> None:
    """Raises UsageError for a URL unless runs without a restart are accepted."""
    for side in sides:
        if side.kind == "url" and not is_accepted:
            raise UsageError(
                f"{side.name} cannot be restarted for every run, so its caches affect the result; "
                "add --no-relaunch to accept this"
            )


def _embedded(load: BenchConfig) -> tuple[str, ...]:
    return ("--model-id", load.model_id, "--max-concurrent-requests", str(EMBEDDED_PERMITS))


def _configured(path: Path, arguments: Sequence[str]) -> tuple[CommandServer, dict[str, str]]:
    try:
        content = path.read_bytes()
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}") from error
    words = (find_launcher(), "--config-file", str(path.resolve()), *arguments)
    return CommandServer(words), {"config": path.name, "config_digest": hashlib.sha256(content).hexdigest()}


def _at_revision(
    spec: SideSpec, load: BenchConfig, out: Path, stack: ExitStack, progress: ProgressDisplay, *, is_build_kept: bool
) -> tuple[CommandServer, dict[str, str]]:
    name, _, file = spec.name.partition(":")
    revision = Revision.find(name)
    if file:
        copy = out / f"{spec.letter}-{Path(file).name}"
        copy.write_bytes(read_at(revision, file))
        command, identity = _configured(copy, spec.arguments)
        return command, {"commit": revision.commit, **identity}
    progress.show(f"building {name} ({revision.commit[:12]})")
    built = stack.enter_context(build(revision, out / f"source-{spec.letter}", is_kept=is_build_kept))
    progress.show(f"built in {built.seconds:.0f} s with {'reused' if built.is_reused else 'its own'} packages")
    return CommandServer((*built.launcher, *_embedded(load), *spec.arguments)), {"commit": revision.commit}


def _image_digest(name: str) -> dict[str, str]:
    """The digest of an image that this machine has."""
    found = _docker("image", "inspect", "--format", "{{.Id}}", name)
    return {"image_digest": found} if found else {}


def _docker(*words: str) -> str | None:
    try:
        completed = subprocess.run(["docker", *words], capture_output=True, text=True, timeout=DOCKER_S)
    except FileNotFoundError as error:
        raise MeasurementError(
            f"docker is not installed, so the image cannot run ({shlex.join(('docker', *words))})"
        ) from error
    except subprocess.TimeoutExpired:
        return None
    return completed.stdout.strip() if completed.returncode == 0 else None


def _remove_container(recorded: Path) -> None:
    container = recorded.read_text().strip()
    if container:
        _docker("rm", "--force", container)
    recorded.unlink()

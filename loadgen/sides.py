"""The sides of a comparison: what the words of a command line name, and how a server of each is opened for a run."""

import contextlib
import hashlib
import shlex
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from loadgen.config import EMBEDDED_PERMITS, BenchConfig
from loadgen.errors import MeasurementError, UsageError
from loadgen.launch import find_launcher, split_command
from loadgen.progress import Progress, Silent
from loadgen.redaction import redacted_argv
from loadgen.revision import Revision, build, read_at
from loadgen.target import LaunchedTarget, Target

FORMS = (
    "a URL, a server's TOML file, git:REV (or git:REV:FILE of a TOML file in it), image:NAME, command:COMMAND, "
    "stored:DIR or baseline:NAME"
)
DOCKER_S = 60.0


class Server(Protocol):
    """What a side runs."""

    @property
    def words(self) -> Sequence[str]:
        """What is started, for people; the URL of what is not."""

    def open(self, load: BenchConfig, log: Path) -> AbstractContextManager[Target]:
        """A server that answers, and its end when left. Raises StartError."""


@dataclass(frozen=True, slots=True)
class Command:
    """A command line, launched afresh for every run."""

    words: tuple[str, ...]

    def open(self, load: BenchConfig, log: Path) -> AbstractContextManager[Target]:
        return LaunchedTarget(self.words, log, ready_timeout_s=load.ready_timeout, api=load.api, api_key=key_of(load))


@dataclass(frozen=True, slots=True)
class Image:
    """A container image, started afresh for every run and published on the loopback interface only.

    Its server listens on the port in PORT, as TGI's launcher does. The container is removed by its recorded id: the
    client that started it may be gone before it.
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
            with Command(words).open(load, log) as target:
                yield target
        finally:
            for file in log.parent.glob("container-*.id"):
                _remove_container(file)


@dataclass(frozen=True, slots=True)
class Address:
    """A server that runs already, and is not launched afresh."""

    url: str

    @property
    def words(self) -> tuple[str, ...]:
        return (self.url,)

    @contextlib.contextmanager
    def open(self, load: BenchConfig, log: Path) -> Iterator[Target]:  # noqa: ARG002
        yield Target(self.url, key_of(load))


@dataclass(frozen=True, slots=True)
class Side:
    """One side of a comparison. `identity` is what is stored of it: commit, image digest, digest of its config."""

    letter: str
    label: str
    server: Server
    identity: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class SideText:
    """A side as it was asked for: its kind, what it names, its label and the words added to its server's command.

    `docker_arguments` are those of an image's container: devices, shared memory, volumes.
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
) -> SideText:
    """The kind of side that a word names. Raises UsageError, naming the forms there are.

    >>> read_side("a", "git:main", None).kind, read_side("b", "http://h:1", "new").label
    ('git', 'new')
    """
    kind, _, name = text.partition(":")
    if kind not in ("git", "image", "command", "config", "stored", "baseline") or not name:
        kind, name = _kind_of(text), text
    added = tuple(split_command(arguments)) if arguments else ()
    if added and kind in ("url", "command", "stored", "baseline"):
        raise UsageError(f"`args-{letter}` is given but side {letter.upper()} is {text!r}, which takes no arguments")
    if any(word == "--port" or word.startswith("--port=") for word in added):
        raise UsageError(f"`args-{letter}` names a port, but every launch gets one of its own")
    # A command may be long and may hold secrets: its side is called by its letter.
    shown = letter.upper() if kind == "command" else name if kind in ("git", "image", "baseline") else text
    container = tuple(split_command(docker_arguments)) if docker_arguments and kind == "image" else ()
    return SideText(letter, kind, name, label or _label(shown, added), added, container)


def _kind_of(text: str) -> str:
    if text.startswith(("http://", "https://")):
        return "url"
    path = Path(text)
    if path.suffix == ".toml":
        return "config"
    if text and path.is_dir():
        return "stored"
    raise UsageError(f"{text!r} is no side of a comparison; a side is {FORMS}")


def _label(name: str, arguments: Sequence[str]) -> str:
    return " ".join((name, *redacted_argv(arguments)))[:200]


def open_side(text: SideText, load: BenchConfig, out: Path, held: ExitStack, progress: Progress) -> Side:
    """The side made ready to be launched: a revision is built, and removed when `held` is closed.

    Raises UsageError for what is not there, MeasurementError for what cannot be built.
    """
    identity: dict[str, str] = {}
    server: Server
    match text.kind:
        case "url":
            server = Address(text.name.rstrip("/"))
        case "command":
            server = Command(tuple(split_command(text.name)))
        case "image":
            server = Image(text.name, ("--model-id", load.model_id, *text.arguments), text.docker_arguments)
            identity = {"image": text.name, **_image_digest(text.name)}
        case "config":
            server, identity = _configured(Path(text.name), text.arguments)
        case "git":
            server, identity = _at_revision(text, load, out, held, progress)
        case _:
            raise AssertionError(text.kind)
    return Side(text.letter, text.label, server, identity)


def planned_words(text: SideText, load: BenchConfig) -> list[str]:
    """What a side would start, without building it. Raises UsageError for what is not there."""
    match text.kind:
        case "git":
            revision, _, file = text.name.partition(":")
            Revision.find(revision)
            named = ("--config-file", file) if file else _embedded(load)
            return [f"<{revision}>/bin/text-generation-launcher", *named, *text.arguments]
        case "stored" | "baseline":
            return []
        case _:
            with ExitStack() as held:
                return list(open_side(text, load, Path(), held, Silent()).server.words)


def key_of(load: BenchConfig) -> str | None:
    return load.api_key.get_secret_value() if load.api_key else None


def _embedded(load: BenchConfig) -> tuple[str, ...]:
    return ("--model-id", load.model_id, "--max-concurrent-requests", str(EMBEDDED_PERMITS))


def _configured(path: Path, arguments: Sequence[str]) -> tuple[Command, dict[str, str]]:
    try:
        content = path.read_bytes()
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}") from error
    words = (find_launcher(), "--config-file", str(path.resolve()), *arguments)
    return Command(words), {"config": path.name, "config_digest": hashlib.sha256(content).hexdigest()}


def _at_revision(
    text: SideText, load: BenchConfig, out: Path, held: ExitStack, progress: Progress
) -> tuple[Command, dict[str, str]]:
    name, _, file = text.name.partition(":")
    revision = Revision.find(name)
    if file:
        copy = out / f"{text.letter}-{Path(file).name}"
        copy.write_bytes(read_at(revision, file))
        command, identity = _configured(copy, text.arguments)
        return command, {"commit": revision.commit, **identity}
    progress.say(f"building {name} ({revision.commit[:12]})")
    built = held.enter_context(build(revision, out / f"source-{text.letter}"))
    progress.say(f"built in {built.seconds:.0f} s, {'packages reused' if built.is_reused else 'packages of its own'}")
    return Command((*built.launcher, *_embedded(load), *text.arguments)), {"commit": revision.commit}


def _image_digest(name: str) -> dict[str, str]:
    """The digest of an image that is here already."""
    found = _docker("image", "inspect", "--format", "{{.Id}}", name)
    return {"image_digest": found} if found else {}


def _docker(*words: str) -> str | None:
    try:
        done = subprocess.run(["docker", *words], capture_output=True, text=True, timeout=DOCKER_S)
    except FileNotFoundError as error:
        raise MeasurementError(f"there is no docker to run an image with ({shlex.join(('docker', *words))})") from error
    except subprocess.TimeoutExpired:
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _remove_container(recorded: Path) -> None:
    container = recorded.read_text().strip()
    if container:
        _docker("rm", "--force", container)
    recorded.unlink()

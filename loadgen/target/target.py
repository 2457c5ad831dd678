"""The server under test: one that already runs, or one that is started for the run and stopped after it."""

import contextlib
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from loadgen.config.bench_config import BenchConfig
from loadgen.config.bench_settings import EMBEDDED_PERMITS
from loadgen.dialects.dialect import Sampling
from loadgen.dialects.registry import API_NAMES, open_dialect
from loadgen.errors import StartError, TargetError
from loadgen.target.access import NO_ACCESS, Access
from loadgen.target.control import ControlClient
from loadgen.target.launched.file_cache import NATURAL, FileCache
from loadgen.target.launched.launch import LaunchedProcess, find_launcher, split_command
from loadgen.target.server_kind import (
    ANTHROPIC,
    KINDS,
    OLLAMA,
    OPENAI,
    OWN,
    Detection,
    ServerKind,
    detect,
    first_model,
    has_tgi_keys,
    is_messages_error,
)
from loadgen.workloads.prompts.prompt import Prompt, ServerLimits
from loadgen.workloads.prompts.vocabulary import Vocabulary
from loadgen.workloads.workload import check_files

POLL_S = 0.05
REPORT_WAIT_EVERY_S = 5.0
READY_PROMPT = Prompt("ready", text="Hello", output_tokens=1)

OnWait = Callable[[float], None]


@dataclass(frozen=True, slots=True)
class TargetFacts:
    """Facts that a server reports: its API, its kind, `/info` if it has one, and the model's name."""

    api: str
    info: dict[str, Any] = field(default_factory=dict)
    model: str = "tgi"
    config: dict[str, Any] = field(default_factory=dict)
    kind: ServerKind = OPENAI
    detected_by: str = ""

    @property
    def limits(self) -> ServerLimits:
        def positive(name: str) -> int | None:
            value = self.info.get(name)
            return value if isinstance(value, int) and value > 0 else None

        return ServerLimits(positive("max_input_tokens"), positive("max_total_tokens"))

    @property
    def extensions(self) -> frozenset[str]:
        """Extensions beyond TGI, as `/info` lists them under `engine`."""
        engine = self.info.get("engine")
        listed = engine.get("extensions") if isinstance(engine, Mapping) else None
        return frozenset(str(name) for name in listed) if isinstance(listed, list) else frozenset()

    @property
    def can_force_length(self) -> bool:
        if not open_dialect(self.api, Sampling()).can_force_length:
            return False
        if self.kind is OWN:
            return self.extensions >= set(OWN.length_fields)
        return bool(self.kind.length_fields)


@dataclass(frozen=True, slots=True)
class StartUp:
    """Seconds from the launch until the ready route answered, and until the answer to one request for one token.

    Both are polled every `POLL_S`. `file_cache` holds the state of the model's files in the page cache at the launch.
    """

    ready_s: float
    first_token_s: float
    file_cache: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class Target:
    """A server that answers. `launch_argv` is the command that started it, `launch_chosen` the part we added to it.

    vocabularies: the words of prompts by the source of their token counts, for later runs on the same process.
    """

    url: str
    access: Access = NO_ACCESS
    launch_argv: tuple[str, ...] | None = None
    launch_chosen: tuple[str, ...] = ()
    process: LaunchedProcess | None = None
    start_up: StartUp | None = None
    vocabularies: dict[str, Vocabulary] = field(default_factory=dict, compare=False, repr=False)

    def control(self) -> ControlClient:
        return ControlClient(self.url, self.access)

    def facts(self, api: str = "auto", model: str | None = None, engine: str = "auto") -> TargetFacts:
        """Query the server. Raises TargetError if it does not answer or has no known API."""
        control = self.control()
        try:
            info = control.get_json("/info")
            info = info if isinstance(info, dict) else {}
            is_tgi = has_tgi_keys(info)
            api = "tgi" if api == "auto" and is_tgi else api
            models = None if api == "tgi" or is_tgi else control.get_json("/v1/models")
            found = Detection(KINDS[engine], "--engine") if engine != "auto" else _detected(control, info, models)
            if api == "tgi" or is_tgi:
                # TGI takes any other model name for an adapter.
                config = control.get_json("/config")
                config = config if isinstance(config, dict) else {}
                return TargetFacts(api, info, model or "tgi", config, found.kind, found.reason)
            listed = first_model(models).get("id")
            if listed is None and found.kind is OLLAMA:
                listed = first_model(control.get_json("/api/tags")).get("name")
            if found.kind is ANTHROPIC and (listed or model) is None:
                raise TargetError(f"{self.url}: it has Anthropic's /v1/messages, but lists no models; give --model")
            if api == "auto" and listed is None and found.kind is not ANTHROPIC:
                raise TargetError(
                    f"{self.url}: neither /info nor /v1/models answers as in TGI or OpenAI; give --api, one of "
                    + ", ".join(API_NAMES.known()[1:])
                )
            chosen = found.kind.api if api == "auto" else api
            return TargetFacts(chosen, info, model or str(listed or "tgi"), {}, found.kind, found.reason)
        finally:
            control.close()

    def info(self) -> dict[str, Any]:
        """The current `/info`; empty if there is none or the server is gone."""
        control = self.control()
        try:
            info = control.get_json("/info")
        except TargetError:
            return {}
        finally:
            control.close()
        return info if isinstance(info, dict) else {}

    def generate_once(
        self,
        api: str = "auto",
        model: str | None = None,
        prompt: Prompt = READY_PROMPT,
        extra: Mapping[str, Any] | None = None,
    ) -> None:
        """Generate once, one token by default; `extra` are further fields of the request. Raises TargetError."""
        facts = self.facts(api, model)
        dialect = open_dialect(facts.api, Sampling(model=facts.model, extra=extra or {}))
        control = self.control()
        try:
            status, body = control.post(dialect.path, dialect.body(prompt), timeout_s=300.0)
        finally:
            control.close()
        if status != 200 or b'"error"' in body:
            raise TargetError(
                f"{self.url}{dialect.path}: status {status}: {body[:300].decode(errors='replace')}", status
            )


def _detected(control: ControlClient, info: Any, models: Any) -> Detection:
    """The kind of a server. Ollama's and Anthropic's routes are requested only if other replies leave the kind open."""
    found = detect(info, models)
    if found.kind is not OPENAI:
        return found
    found = detect(info, models, control.get_json("/api/version"))
    if found.kind is OPENAI and not first_model(models) and _has_messages(control):
        return Detection(ANTHROPIC, "/v1/messages refuses an empty request as Anthropic's API does")
    return found


def _has_messages(control: ControlClient) -> bool:
    """Whether Anthropic's API answers. The request has no message, so that no token is generated."""
    try:
        _, body = control.post("/v1/messages", b"{}")
        return is_messages_error(json.loads(body))
    except (TargetError, ValueError, RecursionError):
        # A server that closes the connection on an unknown route has other routes.
        return False


class LaunchedTarget:
    """Starts a server command, waits until it answers, and stops it when the context ends.

    >>> with LaunchedTarget(["text-generation-launcher"], log=Path("server.log")) as target:  # doctest: +SKIP
    ...     runner.measure(config, target, out)

    Raises StartError, with the end of the log, if the server ends or is not ready in time.
    """

    def __init__(
        self,
        command: str | Sequence[str],
        log: Path,
        *,
        chosen: Sequence[str] = (),
        ready_timeout_s: float = 600.0,
        api: str = "auto",
        access: Access = NO_ACCESS,
        environment: Mapping[str, str] | None = None,
        on_wait: OnWait | None = None,
        ready_route: str = "/health",
        file_cache: FileCache = NATURAL,
    ) -> None:
        self.process = LaunchedProcess(split_command(command), log, environment)
        self._chosen = tuple(chosen)
        self._ready_timeout_s = ready_timeout_s
        self._api = api
        self._access = access
        self._on_wait = on_wait
        self._ready_route = ready_route
        self._file_cache = file_cache

    def __enter__(self) -> Target:
        try:
            return self._start()
        except BaseException as error:
            self.__exit__(type(error), error, None)
            raise

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: object) -> None:
        if getattr(error, "is_urgent", False):
            self.process.kill()
        else:
            self.process.stop()

    def _start(self) -> Target:
        deadline_s = time.monotonic() + self._ready_timeout_s
        while True:
            file_cache = self._file_cache.prepare()
            launched_s = time.monotonic()
            self.process.start()
            target = Target(
                self.process.url, self._access, tuple(self.process.argv), self._chosen, process=self.process
            )
            try:
                ready_s, first_token_s = self._wait_ready(target, deadline_s)
            except StartError:
                if self.process.port_was_taken and self.process.attempts_left:
                    self.process.kill()
                    continue
                raise
            return replace(target, start_up=StartUp(ready_s - launched_s, first_token_s - launched_s, file_cache))

    def _wait_ready(self, target: Target, deadline_s: float) -> tuple[float, float]:
        """Poll the route of readiness, then generate one token. Returns when each was answered (monotonic s)."""
        control = target.control()
        try:
            return self._poll(target, control, deadline_s)
        finally:
            control.close()

    def _poll(self, target: Target, control: ControlClient, deadline_s: float) -> tuple[float, float]:
        reported_s = started_s = time.monotonic()
        ready_s: float | None = None
        problem = "it does not listen"
        while True:
            self.process.check_alive()
            now_s = time.monotonic()
            if now_s > deadline_s:
                raise StartError(
                    f"the server was not ready after {self._ready_timeout_s:g} s: {problem}", self.process.log_tail()
                )
            if self._on_wait is not None and now_s - reported_s >= REPORT_WAIT_EVERY_S:
                reported_s = now_s
                self._on_wait(now_s - started_s)
            try:
                status, _ = control.get(self._ready_route, timeout_s=5.0)
                if status in (200, 404):
                    ready_s = ready_s or time.monotonic()
                    target.generate_once(self._api)
                    # Another server may have answered if this one could not bind its port.
                    self.process.check_alive()
                    return ready_s, time.monotonic()
                problem = f"{self._ready_route} answers {status}"
            except TargetError as error:
                problem = str(error)
            time.sleep(POLL_S)


def embedded_command(model_id: str) -> tuple[list[str], list[str]]:
    """The command of the default server, and the part of it that we added."""
    chosen = ["--max-concurrent-requests", str(EMBEDDED_PERMITS)]
    return [find_launcher(), "--model-id", model_id, *chosen], chosen


def server_command(config: BenchConfig) -> list[str] | None:
    """The command that a config starts; None if the server already runs."""
    if config.url is not None:
        return None
    return split_command(config.server) if config.server is not None else embedded_command(config.model_id)[0]


@contextlib.contextmanager
def open_target(config: BenchConfig, log: Path, on_wait: OnWait | None = None) -> Iterator[Target]:
    """The target of a config: a URL, a command, or the default server."""
    access = Access.of(config)
    if config.url is not None:
        yield Target(config.url, access)
        return
    check_files(config)
    command: str | Sequence[str]
    command, chosen = (config.server, []) if config.server is not None else embedded_command(config.model_id)
    launched = LaunchedTarget(
        command,
        log,
        chosen=chosen,
        ready_timeout_s=config.ready_timeout,
        api=config.api,
        access=access,
        on_wait=on_wait,
        file_cache=FileCache.of(config.file_cache, config.model_files, split_command(command)),
    )
    with launched as target:
        yield target

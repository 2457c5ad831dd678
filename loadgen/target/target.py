"""The server under test: one that already runs, or one that is started for the run and stopped after it."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from loadgen.dialects.dialect import Sampling
from loadgen.dialects.registry import API_NAMES, open_dialect
from loadgen.errors import TargetError
from loadgen.target.access import NO_ACCESS, Access
from loadgen.target.control import ControlClient
from loadgen.target.launched.launch import LaunchedProcess
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

READY_PROMPT = Prompt("ready", text="Hello", output_tokens=1)


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
            info = _as_object(control.get_json("/info"))
            if api == "tgi" or has_tgi_keys(info):
                return _tgi_facts(control, info, "tgi" if api == "auto" else api, model, engine)
            return self._other_facts(control, info, api, model, engine)
        finally:
            control.close()

    def _other_facts(
        self, control: ControlClient, info: dict[str, Any], api: str, model: str | None, engine: str
    ) -> TargetFacts:
        """The facts of a server that has no `/info` as TGI has it."""
        models = control.get_json("/v1/models")
        found = _detected(control, info, models, engine)
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

    def info(self) -> dict[str, Any]:
        """The current `/info`; empty if there is none or the server is gone."""
        control = self.control()
        try:
            return _as_object(control.get_json("/info"))
        except TargetError:
            return {}
        finally:
            control.close()

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


def _tgi_facts(control: ControlClient, info: dict[str, Any], api: str, model: str | None, engine: str) -> TargetFacts:
    found = _detected(control, info, None, engine)
    # TGI takes any other model name for an adapter.
    return TargetFacts(api, info, model or "tgi", _as_object(control.get_json("/config")), found.kind, found.reason)


def _as_object(reply: Any) -> dict[str, Any]:
    return reply if isinstance(reply, dict) else {}


def _detected(control: ControlClient, info: Any, models: Any, engine: str) -> Detection:
    """The kind of a server, or the one given with --engine.

    Ollama's and Anthropic's routes are requested only if other replies leave the kind open.
    """
    if engine != "auto":
        return Detection(KINDS[engine], "--engine")
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

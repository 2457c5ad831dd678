"""The kinds of servers: how each is recognised, counts tokens, and forces an answer of an exact length."""

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class TokenizeRoute:
    """A route that counts the tokens of a text, special tokens included.

    `field` holds the text in the request, `also` are its other fields. `reply` holds the count or the list of tokens in
    the response; empty: the response is the list. `chat_reply`: the key of the tokens of `messages` with their
    template.
    """

    path: str
    field: str
    reply: str
    also: Mapping[str, Any]
    chat_reply: str = ""

    def body(self, text: str) -> bytes:
        return json.dumps({self.field: text, **self.also}).encode()

    def count(self, content: Any) -> int | None:
        """The number of tokens in a response; None if it has another form."""
        found = content.get(self.reply) if self.reply and isinstance(content, dict) else content
        if isinstance(found, list):
            return len(found)
        return found if isinstance(found, int) and not isinstance(found, bool) and self.reply else None


@dataclass(frozen=True, slots=True)
class ResetRoute:
    """A route that empties the prefix cache, for each `{slot}` of its path; `needs` is a setting that it requires."""

    path: str
    needs: str = ""

    @property
    def is_per_slot(self) -> bool:
        return "{slot}" in self.path


@dataclass(frozen=True, slots=True)
class ServerKind:
    """A server program. `length_fields` of a request together force the length of its answer; empty: it cannot be.

    `metrics_flag` switches its metrics on; empty: they are on by default. `keeps_connections`: known to keep
    connections open after an answer, so that this is not tested. `counts_each_event`: a field of its OpenAI routes adds
    the count of tokens so far to each event of a stream. `hit_counter`: the metric of cached prompt tokens. `api`: the
    one that is used by default. `health_routes`: the first of them that exists is polled during a load.
    """

    name: str
    title: str
    tokenize: TokenizeRoute | None = None
    length_fields: tuple[str, ...] = ()
    metrics_flag: str = ""
    keeps_connections: bool = False
    counts_each_event: bool = False
    reset: ResetRoute | None = None
    hit_counter: str = ""
    api: str = "openai-chat"
    health_routes: tuple[str, ...] = ("/health",)

    @property
    def reset_hint(self) -> str:
        """The end of a message about a failed reset."""
        needs = self.reset.needs if self.reset is not None else ""
        return f"; start {self.title} with {needs}" if needs else ""

    @property
    def without_metrics(self) -> str:
        """The note on a server of this kind that reports no metrics."""
        return f"none; start {self.title} with {self.metrics_flag}" if self.metrics_flag else "none"


_TGI_TOKENIZE = TokenizeRoute("/tokenize", "inputs", "", {})
_PROMPT_TOKENIZE = TokenizeRoute("/tokenize", "prompt", "count", {"add_special_tokens": True})

OWN = ServerKind(
    "own", "the bundled server", _TGI_TOKENIZE, ("ignore_eos_token", "min_new_tokens"), keeps_connections=True
)
TGI = ServerKind("tgi", "TGI", _TGI_TOKENIZE, keeps_connections=True)
VLLM = ServerKind(
    "vllm",
    "vLLM",
    dataclasses.replace(_PROMPT_TOKENIZE, chat_reply="tokens"),
    ("ignore_eos", "min_tokens"),
    counts_each_event=True,
    reset=ResetRoute("/reset_prefix_cache", "VLLM_SERVER_DEV_MODE=1"),
    hit_counter="vllm:prefix_cache_hits_total",
)
SGLANG = ServerKind(
    "sglang",
    "SGLang",
    _PROMPT_TOKENIZE,
    ("ignore_eos",),
    "--enable-metrics",
    counts_each_event=True,
    reset=ResetRoute("/flush_cache"),
    hit_counter="sglang:cached_tokens_total",
    # `/health` generates a token and takes a second. Releases before `/ready` have the others.
    health_routes=("/ready", "/model_info", "/get_model_info"),
)
LLAMACPP = ServerKind(
    "llamacpp",
    "llama.cpp",
    TokenizeRoute("/tokenize", "content", "tokens", {"add_special": True}),
    ("ignore_eos",),
    "--metrics",
    reset=ResetRoute("/slots/{slot}?action=erase", "--slot-save-path DIR --cache-ram 0"),
    hit_counter="llamacpp:prompt_tokens_cached_total",
)
TRTLLM = ServerKind(
    "trtllm",
    "TensorRT-LLM",
    TokenizeRoute("/_internal/tokenize", "prompt", "count", {}),
    ("ignore_eos", "min_tokens"),
    counts_each_event=True,
)
OLLAMA = ServerKind("ollama", "Ollama", api="ollama-chat", health_routes=("/api/version",))
ANTHROPIC = ServerKind("anthropic", "a server of Anthropic's messages API", api="anthropic")
OPENAI = ServerKind("openai", "an OpenAI-compatible server")

KINDS = {kind.name: kind for kind in (OWN, TGI, VLLM, SGLANG, LLAMACPP, TRTLLM, OLLAMA, ANTHROPIC, OPENAI)}
OWNERS = {"vllm": VLLM, "sglang": SGLANG, "llamacpp": LLAMACPP, "llama.cpp": LLAMACPP, "tensorrt_llm": TRTLLM}


@dataclass(frozen=True, slots=True)
class Detection:
    """The kind of a server, and the reply that shows it."""

    kind: ServerKind
    reason: str


def detect(info: Any, models: Any, version: Any = None) -> Detection:
    """The kind of a server by its replies to `/info`, `/v1/models` and `/api/version`; None for a route that it lacks.

    >>> detect(None, {"data": [{"id": "m", "owned_by": "vllm"}]}).kind.name
    'vllm'
    """
    if has_tgi_keys(info):
        if isinstance(info.get("engine"), Mapping):
            return Detection(OWN, "/info has `engine`")
        return Detection(TGI, "/info has TGI's keys")
    owner = str(first_model(models).get("owned_by") or "")
    if owner in OWNERS:
        return Detection(OWNERS[owner], f"/v1/models is owned by {owner}")
    if first_model(models).get("type") == "model" and "object" not in first_model(models):
        return Detection(ANTHROPIC, "/v1/models has models of `type` model")
    if isinstance(version, Mapping) and isinstance(version.get("version"), str):
        return Detection(OLLAMA, f"/api/version is {version['version']}")
    return Detection(OPENAI, f"/v1/models is owned by {owner or 'no one'}")


def is_messages_error(reply: Any) -> bool:
    """Whether a reply to an empty request of `/v1/messages` is an error of Anthropic's API, other than "not found"."""
    error = reply.get("error") if isinstance(reply, Mapping) and reply.get("type") == "error" else None
    return isinstance(error, Mapping) and error.get("type") not in (None, "not_found_error")


def has_tgi_keys(info: Any) -> bool:
    """Whether a reply to `/info` has the keys of TGI's."""
    return isinstance(info, Mapping) and "model_id" in info and "max_total_tokens" in info


def first_model(models: Any) -> Mapping[str, Any]:
    """The first entry of a reply to `/v1/models`, or to `/api/tags`; empty if there is none."""
    listed = models.get("data", models.get("models")) if isinstance(models, Mapping) else None
    first = listed[0] if isinstance(listed, list) and listed else None
    return first if isinstance(first, Mapping) else {}

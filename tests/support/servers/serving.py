"""The whole router on a `ScriptedShard`: through ASGI without a port, or on a loopback socket."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import httpx

from reference_server.messages import Request
from reference_server.router.app import RouterApp, TransportOptions, create_app
from reference_server.router.batching import Batcher
from reference_server.router.chat.prompts import ChatTemplate
from reference_server.router.chat.tools import ToolOffer
from reference_server.router.connection import ConnectionLimits
from reference_server.router.infer import Infer, Permits
from reference_server.router.scheduling.scheduler import Scheduler
from reference_server.router.scheduling.scheduler_options import SchedulerOptions
from reference_server.router.schemas.openai import ChatMessage
from reference_server.router.schemas.tgi import RequestGrammar
from reference_server.router.served_adapters import AdapterRules, Adapters
from reference_server.router.server import HttpServer, bind
from reference_server.router.server_info import EngineInfo, ServerInfo
from reference_server.router.services import Services
from reference_server.router.telemetry.metrics import Metrics
from reference_server.router.validation.request_rules import GenerationLimits
from reference_server.router.validation.validator import Validator
from tests.support.models.word_tokenizer import WordTokenizer
from tests.support.wire.scripted_shard import Reply, ScriptedShard, say

LIMITS = GenerationLimits(max_input_tokens=1024, max_total_tokens=2048)
TEMPLATE = "{% for message in messages %}{{ '<|' + message.role + '|>' + message.content }}{% endfor %}<|assistant|>"

#: Five tokens, then end-of-sequence.
S = say(" a", " b", " c", " d", " e")


def endless(_: Request) -> Reply:
    """Script L: ` x` for ever."""
    return Reply((" x",) * 5000)


@dataclass
class Served:
    """A running router and its parts."""

    client: httpx.AsyncClient
    shard: ScriptedShard
    services: Services
    scheduler: Scheduler
    loop_task: "asyncio.Task[None]"
    app: RouterApp

    @property
    def requests(self) -> list[Request]:
        """Requests sent to the model server for prefill, in order."""
        return [request for batch, _ in self.shard.called("prefill") for request in batch.requests]  # type: ignore[attr-defined]

    async def generate(self, inputs: Any = "hello", **parameters: Any) -> httpx.Response:
        return await self.client.post("/generate", json={"inputs": inputs, "parameters": parameters})

    async def metric(self, name: str) -> str | None:
        """The value of a series, as `/metrics` spells it."""
        text = (await self.client.get("/metrics")).text
        return next((line.split()[-1] for line in text.splitlines() if line.startswith(f"{name} ")), None)


NO_RULES = AdapterRules("m")


@dataclass(frozen=True)
class Setup:
    """Settings that a test may change."""

    script: Callable[[Request], Reply] = S
    limits: GenerationLimits = LIMITS
    permits: int = 128
    template: str | None = TEMPLATE
    transport: TransportOptions = field(default_factory=TransportOptions)
    shard: ScriptedShard | None = None
    facts: dict[str, Any] = field(default_factory=dict)
    connections: ConnectionLimits | None = None
    compile_grammar: Callable[[RequestGrammar], Awaitable[str]] | None = None
    use_prefix_caching: bool = False
    adapters: tuple[str, ...] = ()
    adapter_rules: AdapterRules = NO_RULES


def renderer(source: str) -> Callable[[Sequence[ChatMessage], ToolOffer | None], Awaitable[str]]:
    """Renders a chat template in this process."""
    template = chat_template(source)

    async def render(messages: Sequence[ChatMessage], offer: ToolOffer | None) -> str:
        return template.render(messages, offer)

    return render


@cache
def chat_template(source: str) -> ChatTemplate:
    """Compiling a template takes as long as the other parts of a router."""
    return ChatTemplate(source, "<s>", "</s>")


@asynccontextmanager
async def services_on(
    shard: ScriptedShard, setup: Setup
) -> AsyncIterator[tuple[Services, Scheduler, "asyncio.Task[None]"]]:
    """The router's services with their batching loop running."""
    limits = setup.limits
    metrics = Metrics(limits.max_input_tokens, limits.max_total_tokens)
    options = SchedulerOptions(
        max_batch_prefill_tokens=max(4096, limits.max_input_tokens),
        max_batch_total_tokens=max(65536, limits.max_total_tokens),
        supports_chunking=True,
        use_prefix_caching=setup.use_prefix_caching,
        adapters=setup.adapters,
    )
    scheduler = Scheduler(options)
    batcher = Batcher(shard, scheduler, observer=metrics)
    with ThreadPoolExecutor(1) as executor:
        validator = Validator(WordTokenizer(), limits, executor, compile_grammar=setup.compile_grammar)
        adapters = Adapters(setup.adapters, setup.adapter_rules, batcher, metrics)
        infer = Infer(batcher, validator, Permits(setup.permits), metrics, adapters=adapters)
        facts = ServerInfo(
            model_id="m",
            limits=limits,
            version="0.0.0",
            max_concurrent_requests=setup.permits,
            engine=EngineInfo(backend="cpu", dtype="float32"),
        )
        render = None if setup.template is None else renderer(setup.template)
        services = Services(infer, metrics, replace(facts, **setup.facts), render)
        task = asyncio.create_task(batcher.run())
        try:
            yield services, scheduler, task
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


@asynccontextmanager
async def serve(setup: Setup = Setup(), **changes: Any) -> AsyncIterator[Served]:  # frozen
    """The router behind an ASGI client, which returns each answer complete."""
    setup = Setup(**changes)
    shard = setup.shard or ScriptedShard(setup.script)
    async with services_on(shard, setup) as (services, scheduler, task):
        app = create_app(services, setup.transport)
        transport = httpx.ASGITransport(app=app, raise_app_exceptions=True)  # type: ignore[arg-type]
        async with httpx.AsyncClient(transport=transport, base_url="http://router") as client:
            yield Served(client, shard, services, scheduler, task, app)


@asynccontextmanager
async def serve_on_socket(setup: Setup = Setup(), **changes: Any) -> AsyncIterator[Served]:  # frozen
    """The router on a loopback port, for tests of the connection."""
    setup = Setup(**changes)
    shard = setup.shard or ScriptedShard(setup.script)
    async with services_on(shard, setup) as (services, scheduler, task):
        app = create_app(services, setup.transport)
        with bind("127.0.0.1", 0) as listener:
            server = HttpServer(app, listener, setup.connections)
            serving = asyncio.create_task(server.run_to_end())
            port = listener.getsockname()[1]
            while not server.started:  # noqa: ASYNC110  # uvicorn offers nothing to wait for
                await asyncio.sleep(0.001)
            async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as client:
                yield Served(client, shard, services, scheduler, task, app)
            server.should_exit = True
            await serving


def events_of(text: str) -> list[Any]:
    """The events of a stream, decoded; `[DONE]` stays a string."""
    frames = [frame for frame in text.split("\n\n") if frame]
    assert all(frame.startswith("data: ") for frame in frames), frames
    payloads = [frame.removeprefix("data: ") for frame in frames]
    return [payload if payload == "[DONE]" else json.loads(payload) for payload in payloads]


def usage_json(prompt_tokens: int, completion_tokens: int) -> dict[str, Any]:
    """`usage` of an answer without cached tokens."""
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": 0},
    }

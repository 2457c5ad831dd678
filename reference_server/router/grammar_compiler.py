"""Compiles grammars of requests for the wire, in worker processes that can be killed, and caches the outcomes.

Concurrent requests with the same grammar share one compilation. A grammar whose worker was killed three times within
ten seconds is refused for a minute without another attempt.
"""

import asyncio
import hashlib
import json
import logging
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping
from typing import Any

from reference_server.errors import GenerationError, RequestError, StartupError, ValidationError
from reference_server.grammars.pool import missing_packages, worker_pool
from reference_server.messages import Grammar, GrammarType
from reference_server.router.schemas.tgi import ANY_JSON_OBJECT, RequestGrammar
from reference_server.tokenizer import SlowTokenizer, Tokenizer
from reference_server.workers import JobLimitError, WorkerPool

logger = logging.getLogger(__name__)

#: Two, so that one slow grammar does not block the others.
NUM_WORKERS = 2

MAX_CACHED = 256
MAX_CACHED_CHARACTERS = 4 << 20
MAX_TEXT_CHARACTERS = 262_144
DEATHS_FORGIVEN = 3
DEATHS_WITHIN_NS = 10 * 10**9
REFUSED_FOR_NS = 60 * 10**9


def make_compiler(is_disabled: bool, tokenizer: Tokenizer, accepts_schemas: bool) -> "GrammarCompiler | None":
    """The router's compiler; None if grammars are disabled, or if a package or a fast tokenizer is missing (logged)."""
    if is_disabled:
        return None
    missing = missing_packages()
    if missing or isinstance(tokenizer, SlowTokenizer):
        reason = f"{', '.join(missing)} of the `grammar` extra" if missing else "a tokenizer.json"
        logger.warning("requests with a grammar are refused: %s is missing", reason)
        return None
    return GrammarCompiler(worker_pool(NUM_WORKERS), accepts_schemas)


class GrammarCompiler:
    """Compiles grammars in `pool`'s workers. accepts_schemas: JSON schemas are sent as such, not as regexes."""

    def __init__(
        self, pool: WorkerPool, accepts_schemas: bool, clock_ns: Callable[[], int] = time.monotonic_ns
    ) -> None:
        self._pool = pool
        self._accepts_schemas = accepts_schemas
        self._clock_ns = clock_ns
        self._cache: OrderedDict[bytes, Grammar | RequestError] = OrderedDict()
        self._cached_characters = 0
        self._running: dict[bytes, asyncio.Task[Grammar]] = {}
        self._deaths: OrderedDict[bytes, deque[int]] = OrderedDict()
        self._starting: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Start the workers in the background; the first grammars wait for them."""
        self._starting = asyncio.create_task(self._start())

    async def close(self) -> None:
        if self._starting is not None:
            self._starting.cancel()
            await asyncio.gather(self._starting, return_exceptions=True)
        await self._pool.close()

    async def compile(self, grammar: RequestGrammar) -> Grammar:
        """The wire form of a grammar. Raises `ValidationError`, `GenerationError` or `OverloadedError`."""
        kind, text = _job_of(grammar)
        if kind != "regex" and not self._accepts_schemas:
            kind += "_regex"
        digest = hashlib.sha256(f"{kind} {text}".encode("utf-8", "surrogatepass")).digest()
        cached = self._cache.get(digest)
        if cached is not None:
            self._cache.move_to_end(digest)
            return _grammar_or_raise(cached)
        if self._is_deadly(digest):
            raise _stopped(kind, "it was stopped three times")
        running = self._running.get(digest)
        if running is None:
            running = self._running[digest] = asyncio.create_task(self._compile(digest, kind, text))
            running.add_done_callback(lambda _: self._running.pop(digest))
        # The task is shared: a request that is cancelled must not cancel it.
        return await asyncio.shield(running)

    async def _start(self) -> None:
        try:
            await self._pool.start()
        except StartupError:
            logger.exception("could not start the grammar workers: grammars are not compiled")

    async def _compile(self, digest: bytes, kind: str, text: str) -> Grammar:
        try:
            answer: Mapping[str, str] = await self._pool.run([kind, text])
        except JobLimitError as error:
            self._deaths.setdefault(digest, deque(maxlen=DEATHS_FORGIVEN)).append(self._clock_ns())
            self._deaths.move_to_end(digest)
            if len(self._deaths) > MAX_CACHED:
                self._deaths.popitem(last=False)
            raise _stopped(kind, f"{error.limit}: {error}") from error
        if "text" in answer:
            compiled = Grammar(answer["text"], GrammarType(answer["type"]))
            self._store(digest, compiled, len(compiled.text))
            return compiled
        refusal = _refusal(answer)
        self._store(digest, refusal, len(refusal.detail))
        raise refusal

    def _store(self, digest: bytes, outcome: Grammar | RequestError, characters: int) -> None:
        self._cache[digest] = outcome
        self._cached_characters += characters
        while len(self._cache) > MAX_CACHED or self._cached_characters > MAX_CACHED_CHARACTERS:
            _, oldest = self._cache.popitem(last=False)
            self._cached_characters -= len(oldest.text if isinstance(oldest, Grammar) else oldest.detail)

    def _is_deadly(self, digest: bytes) -> bool:
        deaths = self._deaths.get(digest)
        return (
            deaths is not None
            and len(deaths) == DEATHS_FORGIVEN
            and deaths[-1] - deaths[0] <= DEATHS_WITHIN_NS
            and self._clock_ns() - deaths[-1] < REFUSED_FOR_NS
        )


def _job_of(grammar: RequestGrammar) -> tuple[str, str]:
    """The worker's job: kind of grammar, and its text."""
    if grammar is ANY_JSON_OBJECT:
        return "object", ""
    value: Any = grammar.value
    if grammar.type == "regex":
        return "regex", value
    if grammar.type == "json_schema":
        value = value["schema"]
    elif not isinstance(value, dict | str):
        raise ValidationError("grammar is not supported")
    text = value if isinstance(value, str) and grammar.type != "json_schema" else json.dumps(value, ensure_ascii=False)
    if len(text) > MAX_TEXT_CHARACTERS:
        raise ValidationError(
            f"cannot compile regex from schema: too complex (more than {MAX_TEXT_CHARACTERS} characters)"
        )
    return "schema", text


def _stopped(kind: str, limit: str) -> ValidationError:
    prefix = "grammar is not valid" if kind == "regex" else "cannot compile regex from schema"
    return ValidationError(f"{prefix}: too complex ({limit})")


def _refusal(answer: Mapping[str, str]) -> RequestError:
    kind = GenerationError if answer["error_type"] == GenerationError.error_type else ValidationError
    return kind(answer["detail"])


def _grammar_or_raise(outcome: Grammar | RequestError) -> Grammar:
    """A cached outcome. An error is raised as a copy, since raising adds a traceback to it."""
    if isinstance(outcome, Grammar):
        return outcome
    raise type(outcome)(outcome.detail)

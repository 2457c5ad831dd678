"""What a request's grammar is as a regex: compiled in killable workers, kept, or refused.

A grammar is compiled once, however many requests bring it at a time. One whose worker was killed three times in ten
seconds is refused for a minute without trying (reliability.md F22).
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
from reference_server.grammars.packages import missing_packages
from reference_server.grammars.pool import worker_pool
from reference_server.router.schemas.tgi import ANY_JSON_OBJECT, GrammarType
from reference_server.tokenizer import SlowTokenizer, Tokenizer
from reference_server.workers import JobLimitError, WorkerPool

logger = logging.getLogger(__name__)

#: One that a grammar holds up to its limit leaves the other.
NUM_WORKERS = 2

MAX_KEPT = 256
MAX_KEPT_CHARACTERS = 4 << 20
MAX_TEXT_CHARACTERS = 262_144
DEATHS_FORGIVEN = 3
DEATHS_WITHIN_NS = 10 * 10**9
REFUSED_FOR_NS = 60 * 10**9


def make_compiler(is_disabled: bool, tokenizer: Tokenizer) -> "GrammarCompiler | None":
    """What compiles a router's grammars; None where they are refused, which is logged unless it was asked for."""
    if is_disabled:
        return None
    missing = missing_packages()
    if missing or isinstance(tokenizer, SlowTokenizer):
        reason = f"{', '.join(missing)} of the `grammar` extra" if missing else "a tokenizer.json"
        logger.warning("requests with a grammar are refused: %s is missing", reason)
        return None
    return GrammarCompiler(worker_pool(NUM_WORKERS))


class GrammarCompiler:
    """Regexes of grammars, by `pool`'s workers."""

    def __init__(self, pool: WorkerPool, clock_ns: Callable[[], int] = time.monotonic_ns) -> None:
        self._pool = pool
        self._clock_ns = clock_ns
        self._kept: OrderedDict[bytes, str | RequestError] = OrderedDict()
        self._kept_characters = 0
        self._running: dict[bytes, asyncio.Task[str]] = {}
        self._deaths: OrderedDict[bytes, deque[int]] = OrderedDict()
        self._starting: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Start the workers beside whatever else starts; the first grammars wait for them."""
        self._starting = asyncio.create_task(self._start())

    async def close(self) -> None:
        if self._starting is not None:
            self._starting.cancel()
            await asyncio.gather(self._starting, return_exceptions=True)
        await self._pool.close()

    async def regex_of(self, grammar: GrammarType) -> str:
        """Raises ValidationError or GenerationError with the answer of rows 22 to 26, and OverloadedError."""
        kind, text = _as_job(grammar)
        digest = hashlib.sha256(f"{kind} {text}".encode("utf-8", "surrogatepass")).digest()
        kept = self._kept.get(digest)
        if kept is not None:
            self._kept.move_to_end(digest)
            return _told(kept)
        if self._is_deadly(digest):
            raise _stopped(kind, "it was stopped three times")
        running = self._running.get(digest)
        if running is None:
            running = self._running[digest] = asyncio.create_task(self._compile(digest, kind, text))
            running.add_done_callback(lambda _: self._running.pop(digest))
        # One of those who wait may leave.
        return await asyncio.shield(running)

    async def _start(self) -> None:
        try:
            await self._pool.start()
        except StartupError:
            logger.exception("the grammar workers do not start; grammars are not compiled")

    async def _compile(self, digest: bytes, kind: str, text: str) -> str:
        try:
            answer: Mapping[str, str] = await self._pool.run([kind, text])
        except JobLimitError as error:
            self._deaths.setdefault(digest, deque(maxlen=DEATHS_FORGIVEN)).append(self._clock_ns())
            self._deaths.move_to_end(digest)
            if len(self._deaths) > MAX_KEPT:
                self._deaths.popitem(last=False)
            raise _stopped(kind, f"{error.limit}: {error}") from error
        if "regex" in answer:
            self._keep(digest, answer["regex"], len(answer["regex"]))
            return answer["regex"]
        refusal = _refusal(answer)
        self._keep(digest, refusal, len(refusal.detail))
        raise refusal

    def _keep(self, digest: bytes, outcome: str | RequestError, characters: int) -> None:
        self._kept[digest] = outcome
        self._kept_characters += characters
        while len(self._kept) > MAX_KEPT or self._kept_characters > MAX_KEPT_CHARACTERS:
            _, oldest = self._kept.popitem(last=False)
            self._kept_characters -= len(oldest) if isinstance(oldest, str) else len(oldest.detail)

    def _is_deadly(self, digest: bytes) -> bool:
        deaths = self._deaths.get(digest)
        return (
            deaths is not None
            and len(deaths) == DEATHS_FORGIVEN
            and deaths[-1] - deaths[0] <= DEATHS_WITHIN_NS
            and self._clock_ns() - deaths[-1] < REFUSED_FOR_NS
        )


def _as_job(grammar: GrammarType) -> tuple[str, str]:
    """What a worker is asked: its kind of grammar, and the text."""
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


def _told(kept: str | RequestError) -> str:
    """What was kept. A refusal is raised as a copy: every request's own traceback hangs on it."""
    if isinstance(kept, str):
        return kept
    raise type(kept)(kept.detail)

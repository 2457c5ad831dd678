"""Runs generations: a permit, validation, the token stream across segments, best-of (scheduling.md section 5)."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Coroutine, Iterator, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy

from reference_server.errors import IncompleteGenerationError, OverloadedError, ValidationError
from reference_server.messages import GeneratedText, Tokens
from reference_server.router.batching import Batcher, Event, Finished, GeneratedToken, PrefillDone, TokenArrived
from reference_server.router.metrics import Metrics
from reference_server.router.request_context import CURRENT
from reference_server.router.segments import Progress
from reference_server.router.validation import Continuation, GenerateCall, Validated, Validator, check_best_of

T = TypeVar("T")


class Permits:
    """How many generations may be in the server at once, and how many of them one client's; nobody waits for one."""

    def __init__(self, limit: int, per_client: int | None = None) -> None:
        self.free = limit
        self.held: Counter[str] = Counter()
        self._per_client = limit if per_client is None else per_client

    @contextmanager
    def take(self, client: str = "") -> Iterator[None]:
        """Hold one. Raises `OverloadedError`."""
        if self.free <= 0 or self.held[client] >= self._per_client:
            raise OverloadedError
        self.free -= 1
        self.held[client] += 1
        try:
            yield
        finally:
            self.free += 1
            self.held[client] -= 1
            if not self.held[client]:
                del self.held[client]


@dataclass(slots=True)
class Answer:
    """A whole generation. Times are of the batcher's clock."""

    input_len: int
    tokens: list[GeneratedToken] = field(default_factory=list)
    top_tokens: list[Sequence[GeneratedToken]] = field(default_factory=list)
    prefill: Tokens | None = None
    end: Finished | None = None

    @property
    def finished(self) -> Finished:
        assert self.end is not None, "an answer is handed out when it is complete"
        return self.end

    @property
    def generated(self) -> GeneratedText:
        return self.finished.generated_text

    @property
    def mean_logprob(self) -> float:
        """What best-of compares, in single precision."""
        total = numpy.float32(0)
        for token in self.tokens:
            total += numpy.float32(token.logprob)
        return float(total / numpy.float32(len(self.tokens)))


class Running:
    """One generation in progress: iterate it for its events. `input_len` is the first segment's."""

    def __init__(self, infer: "Infer", call: GenerateCall, first: Validated) -> None:
        self.input_len = first.request.input_len
        self._infer = infer
        self._call = call
        self._first = first
        self._stream = infer.batcher.submit(first.request)

    def close(self) -> None:
        """Give up what has not ended; its blocks are freed."""
        self._stream.close()

    async def __aiter__(self) -> AsyncIterator[Event]:
        progress = Progress(self._first.request.requested_tokens)
        start: Finished | None = None
        while True:
            end: Finished | None = None
            async for event in self._stream:
                if isinstance(event, Finished):
                    end = event
                    break
                yield event
            if end is None:
                raise IncompleteGenerationError
            start = start or end
            progress = progress.add(end.generated_text)
            if not progress.wants_more or not await self._continue(progress):
                yield _joined(start, end, progress)
                return
            yield TokenArrived(end.token, end.top_tokens)

    async def _continue(self, progress: Progress) -> bool:
        """Queue the next segment; what it may not ask for any more ends the generation as it stands."""
        try:
            following = await self._infer.validate(self._call, Continuation(self._first, progress))
            stream = self._infer.batcher.submit(following.request)
        except ValidationError:
            return False
        self._stream.close()
        self._stream = stream
        return True


class Infer:
    """What the routes call."""

    def __init__(self, batcher: Batcher, validator: Validator, permits: Permits, metrics: Metrics) -> None:
        self.batcher = batcher
        self.validator = validator
        self.permits = permits
        self._metrics = metrics

    @asynccontextmanager
    async def start(self, call: GenerateCall) -> AsyncIterator[Running]:
        """Admit and queue a generation; leaving the block ends it, whatever has become of it.

        Raises `OverloadedError` before anything is looked at, then `ValidationError`.
        """
        with ExitStack() as held:
            try:
                held.enter_context(self.permits.take(CURRENT.get().client))
                running = Running(self, call, await self.validate(call))
            except (OverloadedError, ValidationError) as error:
                self._metrics.request_failure.add(label=error.error_type)
                raise
            held.callback(running.close)
            yield running

    async def validate(self, call: GenerateCall, after: Continuation | None = None) -> Validated:
        """One segment's request, observed."""
        validated = await self.validator.validate(call, after)
        self._metrics.request_input_length.observe(validated.request.input_len)
        self._metrics.request_max_new_tokens.observe(validated.request.stopping.max_new_tokens)
        return validated

    async def generate(self, call: GenerateCall) -> Answer:
        """Run one generation to its end."""
        async with self.start(call) as running:
            answer = Answer(running.input_len)
            async for event in running:
                match event:
                    case PrefillDone():
                        answer.prefill = event.tokens
                    case TokenArrived() | Finished():
                        answer.tokens.append(event.token)
                        if event.top_tokens:
                            answer.top_tokens.append(event.top_tokens)
                if isinstance(event, Finished):
                    answer.end = event
            return answer

    async def generate_best(self, call: GenerateCall) -> tuple[Answer, list[Answer]]:
        """The likeliest of `best_of` generations, and the others in the order they were started."""
        best_of = call.parameters.best_of or 1
        check_best_of(best_of, self.validator.limits)
        answers = await all_or_nothing([self.generate(call) for _ in range(best_of)])
        winner = max(range(len(answers)), key=lambda index: answers[index].mean_logprob)
        return answers.pop(winner), answers


async def all_or_nothing(works: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """Run together; the first failure cancels the others and is raised."""
    if len(works) == 1:
        return [await works[0]]
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(work) for work in works]
    except BaseExceptionGroup as group_error:
        raise group_error.exceptions[0] from None
    return [task.result() for task in tasks]


def _joined(start: Finished, end: Finished, progress: Progress) -> Finished:
    """The last message of a generation: its first segment's times, its last one's token, the text of all."""
    if start is end:
        return end
    assert progress.generated is not None, "a segment has ended"
    return start._replace(token=end.token, top_tokens=end.top_tokens, generated_text=progress.generated)

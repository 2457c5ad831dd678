"""A `Shard` that answers from a script: the router's test double, with the protocol's batching rules and no model.

A function of the request chooses its `Reply`. Everything else behaves as in a model server: receipts,
chunked prefill, stopping order, filtering, errors.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from reference_server.adapter_source import AdapterSource
from reference_server.errors import ShardError
from reference_server.messages import (
    Batch,
    CachedBatch,
    FinishReason,
    GeneratedText,
    Generation,
    ModelInfo,
    Request,
    StepResult,
    Timings,
    Tokens,
    WarmupReply,
    WarmupRequest,
)

EOS_ID = 2
EOS_TEXT = "</s>"
FIRST_TEXT_ID = 10
"""Id of a reply's first text; the following ones count up. Prompt token `i` has id `i + FIRST_TEXT_ID` as well."""

INFO = ModelInfo(
    requires_padding=False,
    dtype="torch.float32",
    device_type="cpu",
    support_chunking=True,
    attention_impl="flashdecoding",
    block_size=16,
)


@dataclass(frozen=True, slots=True)
class Reply:
    """The output of a request: `texts`, one token each, then end-of-sequence; they may contain `EOS_TEXT`.

    A request that may not end yet (`ignore_eos_token`, `min_new_tokens`) repeats the texts. With `fail_after` the step
    that would give token number `fail_after` raises; with `drop_after` the request silently leaves the batch there.
    """

    texts: tuple[str, ...] = ("Hello", " world")
    logprob: float = -0.5
    tokens_per_step: int = 1
    fail_after: int | None = None
    drop_after: int | None = None


def say(*texts: str) -> Callable[[Request], Reply]:
    """A script in which every request gives the same reply."""
    return lambda _: Reply(texts)


def count_words(text: str) -> int:
    return max(1, len(text.split()))


@dataclass(slots=True)
class _Sequence:
    request: Request
    reply: Reply
    prompt_len: int
    cache_len: int
    next_chunk: int
    texts: list[str] = field(default_factory=list)
    stopped: bool = False

    @property
    def remaining(self) -> int:
        return max(0, self.prompt_len - self.cache_len)


class ScriptedShard:
    """`calls` lists the calls, as (method name, arguments).

    `failures` maps a method name to an exception that its next call raises, once. `gate`, when given, is awaited with
    the method's name before each call works, so that a test can hold a step. `count_tokens` counts prompt tokens where
    the request brings no slots to tell them from. `reads` is the number of calls of `load_adapter` that find its files
    still being read. As one `rank` of several it answers for its own requests only.
    """

    def __init__(
        self,
        script: Callable[[Request], Reply] | None = None,
        *,
        info: ModelInfo = INFO,
        max_supported_total_tokens: int | None = 4096,
        max_total_tokens: int = 2048,
        max_prefill_tokens: int = 1 << 20,
        count_tokens: Callable[[str], int] = count_words,
        gate: Callable[[str], Awaitable[None]] | None = None,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        self.script = script or say("Hello", " world")
        self.calls: list[tuple[str, tuple[object, ...]]] = []
        self.failures: dict[str, BaseException] = {}
        self.gate = gate
        self.reads = 0
        self._info = info
        self._supported = max_supported_total_tokens
        self._max_total = max_total_tokens
        self._max_prefill_tokens = max_prefill_tokens
        self._count_tokens = count_tokens
        self._rank = rank
        self._world_size = world_size
        self._batches: dict[int, list[_Sequence]] = {}

    @property
    def cached_ids(self) -> dict[int, list[int]]:
        """Request ids held, by batch id."""
        return {batch: [sequence.request.id for sequence in held] for batch, held in self._batches.items()}

    def called(self, method: str) -> list[tuple[object, ...]]:
        """The arguments of each call of one method."""
        return [args for name, args in self.calls if name == method]

    async def info(self) -> ModelInfo:
        await self._enter("info")
        return self._info

    async def health(self) -> None:
        await self._enter("health")

    async def warmup(self, request: WarmupRequest) -> WarmupReply:
        await self._enter("warmup", request)
        self._max_prefill_tokens = request.max_prefill_tokens
        total = request.max_total_tokens or min(self._max_total, self._supported or self._max_total)
        return WarmupReply(
            max_supported_total_tokens=self._supported,
            max_input_tokens=request.max_input_tokens or total - 1,
            max_total_tokens=total,
            weight_bytes=1000,
            backends={"prefill": "scripted", "decode": "scripted"},
        )

    async def prefill(self, batch: Batch, cached: CachedBatch | None = None) -> StepResult:
        await self._enter("prefill", batch, cached)
        sequences = [self._admit(request) for request in batch.requests]
        if cached is None or not self._info.support_chunking:
            return self._step(batch.id, sequences)
        return self._step(cached.id, self._pop(cached.id) + sequences, concat_ns=1)

    async def decode(self, batches: Sequence[CachedBatch]) -> StepResult:
        await self._enter("decode", tuple(batches))
        if not batches:
            raise ShardError("Must provide at least one batch")
        merged = [sequence for batch in batches for sequence in self._pop(batch.id)]
        return self._step(batches[0].id, merged, concat_ns=1 if len(batches) > 1 else None)

    async def filter_batch(self, batch_id: int, request_ids: Sequence[int]) -> CachedBatch:
        await self._enter("filter_batch", batch_id, tuple(request_ids))
        held = {sequence.request.id: sequence for sequence in self._pop(batch_id)}
        if not request_ids:
            raise ShardError("Batch must have at least one request")
        self._batches[batch_id] = [held[request_id] for request_id in request_ids]
        return self._receipt(batch_id)

    async def clear_cache(self, batch_id: int | None = None) -> None:
        await self._enter("clear_cache", batch_id)
        if batch_id is None:
            self._batches.clear()
        else:
            self._batches.pop(batch_id, None)

    async def load_adapter(self, source: AdapterSource) -> int | None:
        await self._enter("load_adapter", source)
        if self.reads:
            self.reads -= 1
            return None
        return 1000

    async def unload_adapter(self, adapter_id: str) -> None:
        await self._enter("unload_adapter", adapter_id)

    async def _enter(self, method: str, *args: object) -> None:
        self.calls.append((method, args))
        await (asyncio.sleep(0) if self.gate is None else self.gate(method))
        failure = self.failures.pop(method, None)
        if failure is not None:
            raise failure

    def _admit(self, request: Request) -> _Sequence:
        if request.num_slots:
            prompt_len = request.num_slots - request.stopping.max_new_tokens - self._info.speculate + 1
        else:
            prompt_len = min(request.truncate, self._count_tokens(request.text))
        assert request.cache_len < prompt_len, "the last prompt token is always computed"
        chunk = request.chunk_len or prompt_len - request.cache_len
        return _Sequence(request, self.script(request), prompt_len, request.cache_len, chunk)

    def _pop(self, batch_id: int) -> list[_Sequence]:
        if batch_id not in self._batches:
            raise ShardError(f"Batch ID {batch_id} not found in cache.")
        return self._batches.pop(batch_id)

    def _step(self, batch_id: int, sequences: list[_Sequence], concat_ns: int | None = None) -> StepResult:
        prefilling = any(sequence.remaining for sequence in sequences)
        made = [_advance(sequence) for sequence in sequences]
        generations = [one for one in made if one is not None and one.request_id % self._world_size == self._rank]
        sequences = [sequence for sequence in sequences if not _is_dropped(sequence)]
        if prefilling:
            self._plan_chunks(sequences)
        timings = Timings(forward_ns=1000, decode_ns=100, total_ns=2000, concat_ns=concat_ns)
        if all(sequence.stopped for sequence in sequences):
            return StepResult(tuple(generations), None, timings)
        self._batches[batch_id] = sequences
        return StepResult(tuple(generations), self._receipt(batch_id), timings)

    def _plan_chunks(self, sequences: list[_Sequence]) -> None:
        block_size = self._info.block_size
        budget = -(-self._max_prefill_tokens // block_size) * block_size - (len(sequences) - 1)
        for sequence in reversed(sequences):
            sequence.next_chunk = 1
            if sequence.remaining:
                sequence.next_chunk = max(1, min(sequence.remaining, budget))
                budget -= sequence.next_chunk

    def _receipt(self, batch_id: int) -> CachedBatch:
        held = self._batches[batch_id]
        return CachedBatch(
            id=batch_id,
            request_ids=tuple(sequence.request.id for sequence in held),
            max_tokens=sum(self._reserved(sequence) for sequence in held),
            current_tokens=sum(sequence.next_chunk if sequence.remaining else 1 for sequence in held),
        )

    def _reserved(self, sequence: _Sequence) -> int:
        if sequence.request.blocks:
            return len(sequence.request.blocks) * self._info.block_size
        return sequence.prompt_len + sequence.request.stopping.max_new_tokens


def _advance(sequence: _Sequence) -> Generation | None:
    """One step of one sequence; None while its prompt is unfinished or when it has left."""
    assert not sequence.stopped, f"request {sequence.request.id} has stopped and was not filtered"
    first = not sequence.texts
    if sequence.remaining:
        sequence.cache_len += sequence.next_chunk
        if sequence.remaining:
            return None
    if sequence.reply.fail_after == len(sequence.texts):
        raise ShardError(f"request {sequence.request.id} was scripted to fail")
    if _is_dropped(sequence):
        return None
    new_texts: list[str] = []
    reason = None
    while reason is None and len(new_texts) < sequence.reply.tokens_per_step:
        new_texts.append(_next_text(sequence))
        sequence.texts.append(new_texts[-1])
        reason = _finish_reason(sequence)
    sequence.stopped = reason is not None
    tokens = _tokens(sequence, new_texts)
    return Generation(
        request_id=sequence.request.id,
        tokens=tokens,
        prefill_tokens=_prompt_tokens(sequence) if first and sequence.request.prefill_logprobs else None,
        generated_text=None if reason is None else _generated_text(sequence, reason),
        top_tokens=_top_tokens(tokens, sequence.request.top_n_tokens),
    )


def _is_dropped(sequence: _Sequence) -> bool:
    return sequence.reply.drop_after == len(sequence.texts) and not sequence.remaining


def _next_text(sequence: _Sequence) -> str:
    index, texts, stopping = len(sequence.texts), sequence.reply.texts, sequence.request.stopping
    may_end = index >= stopping.min_new_tokens
    text = texts[index] if index < len(texts) else EOS_TEXT
    if text != EOS_TEXT or (may_end and not stopping.ignore_eos_token):
        return text
    spoken = [text for text in texts if text != EOS_TEXT] or ["."]
    return spoken[index % len(spoken)]


def _finish_reason(sequence: _Sequence) -> FinishReason | None:
    """Length is tested before end-of-sequence, and that before the stop strings."""
    stopping = sequence.request.stopping
    if len(sequence.texts) >= stopping.max_new_tokens:
        return FinishReason.LENGTH
    if sequence.texts[-1] == EOS_TEXT:
        return FinishReason.EOS_TOKEN
    text = _spoken(sequence)
    if len(sequence.texts) >= stopping.min_new_tokens and any(text.endswith(stop) for stop in stopping.stop_sequences):
        return FinishReason.STOP_SEQUENCE
    return None


def _spoken(sequence: _Sequence) -> str:
    return "".join(text for text in sequence.texts if text != EOS_TEXT)


def _tokens(sequence: _Sequence, texts: list[str]) -> Tokens:
    start = len(sequence.texts) - len(texts) + FIRST_TEXT_ID
    return Tokens(
        ids=tuple(EOS_ID if text == EOS_TEXT else start + i for i, text in enumerate(texts)),
        logprobs=(sequence.reply.logprob,) * len(texts),
        texts=tuple(texts),
        is_special=tuple(text == EOS_TEXT for text in texts),
    )


def _prompt_tokens(sequence: _Sequence) -> Tokens:
    known = max(1, sequence.request.cache_len)
    return Tokens(
        ids=tuple(range(FIRST_TEXT_ID, FIRST_TEXT_ID + sequence.prompt_len)),
        logprobs=(float("nan"),) * known + (-1.0,) * (sequence.prompt_len - known),
        texts=tuple(f"p{i}" for i in range(sequence.prompt_len)),
    )


def _generated_text(sequence: _Sequence, reason: FinishReason) -> GeneratedText:
    parameters = sequence.request.parameters
    return GeneratedText(
        text=_spoken(sequence),
        generated_tokens=len(sequence.texts),
        finish_reason=reason,
        seed=parameters.seed if parameters.samples else None,
    )


def _top_tokens(tokens: Tokens, count: int) -> tuple[Tokens, ...]:
    """For each token its `count` likeliest: itself, then made-up neighbours."""
    if count == 0:
        return ()
    return tuple(
        Tokens(
            ids=(token, *(token + 1000 * rank for rank in range(1, count))),
            logprobs=(logprob, *(logprob - rank for rank in range(1, count))),
            texts=(text, *(f"{text}{rank}" for rank in range(1, count))),
            is_special=(special, *(False for _ in range(1, count))),
        )
        for token, logprob, text, special in zip(
            tokens.ids, tokens.logprobs, tokens.texts, tokens.is_special, strict=True
        )
    )

"""Validates a request and counts its tokens: `GenerateCall` -> `ValidGenerateRequest`."""

import asyncio
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import Executor
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import TypeVar

from reference_server.errors import OverloadedError, RequestError, ValidationError
from reference_server.images.prompt import PromptPart, chunks_of
from reference_server.images.reader import ImageReader
from reference_server.messages import ChooserParameters, Grammar, GrammarType, Request, StoppingParameters
from reference_server.router.scheduling.request import ValidGenerateRequest
from reference_server.router.scheduling.segments import (
    SegmentProgress,
    continued_seed,
    requested_tokens,
    segment_tokens,
)
from reference_server.router.schemas.tgi import GenerateParameters, RequestGrammar
from reference_server.router.telemetry.request_context import NO_CONTEXT, RequestContext
from reference_server.router.validation.request_rules import (
    IMAGE_MODELS,
    GenerationLimits,
    check_parameters,
    refuse_images,
    value_or,
)
from reference_server.router.validation.token_listing import render_tokens
from reference_server.router.validation.truncation import text_of_last
from reference_server.tokenizer import Tokenizer

T = TypeVar("T")

#: Concurrent jobs of the tokenize routes, and the characters of their texts: an answer has up to 50 bytes for each.
MAX_TOKENIZE_JOBS = 64
MAX_TOKENIZE_CHARACTERS = 4_000_000


@dataclass(frozen=True, slots=True)
class GenerateCall:
    """One generation as a route requests it: the native parameters, and what only the OpenAI routes can set."""

    prompt: str
    parameters: GenerateParameters = field(default_factory=GenerateParameters)
    add_special_tokens: bool = True
    presence_penalty: float = 0.0
    context: RequestContext = NO_CONTEXT


@dataclass(frozen=True, slots=True)
class Continuation:
    """A generation whose last segment used up its tokens: its first segment's request, and its output so far."""

    first: ValidGenerateRequest
    progress: SegmentProgress

    @property
    def text(self) -> str:
        """The generated text to append to the prompt."""
        return self.progress.whole_text

    def seed(self, num_truncated: int) -> int:
        return continued_seed(self.first.wire.parameters.seed, num_truncated - self.first.num_truncated)


class Validator:
    """Checks requests against `limits` and counts their tokens in `executor`'s threads.

    compile_grammar: returns a grammar's wire form; None if grammars are refused. images: of a model that takes images.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        limits: GenerationLimits,
        executor: Executor,
        draw_seed: Callable[[], int] = lambda: secrets.randbits(64),
        model_type: str | None = None,
        compile_grammar: Callable[[RequestGrammar], Awaitable[Grammar]] | None = None,
        images: ImageReader | None = None,
    ) -> None:
        self.limits = limits
        self._tokenizer = tokenizer
        self._executor = executor
        self._draw_seed = draw_seed
        self._refuses_images = model_type in IMAGE_MODELS and images is None
        self._images = images
        self._compile_grammar = compile_grammar
        self._tokenizing: dict[object, int] = {}  # characters of each job of the tokenize routes

    async def validate(self, call: GenerateCall, after: Continuation | None = None) -> ValidGenerateRequest:
        """The request of a call's first segment, or with `after` of its next one. Raises `ValidationError`."""
        parameters = call.parameters
        check_parameters(parameters, self.limits, call.presence_penalty)
        prompt = call.prompt + after.text if after else call.prompt
        if not prompt:
            raise ValidationError("`inputs` cannot be empty")
        self._check_truncate(parameters.truncate)
        if self._refuses_images:
            refuse_images(call.prompt)
        parts: tuple[PromptPart, ...] = ()
        add_special_tokens = call.add_special_tokens
        if self._images is not None:
            # An image's address in generated text is not fetched.
            parts = (*after.first.parts, after.text) if after else await self._images.read(call.prompt)
            prompt = self._images.text(parts)
            add_special_tokens &= not self._images.has_special_tokens(parts)
        if parameters.truncate is None:
            self._check_bytes(prompt)
        ids = await self.encode(prompt, add_special_tokens)
        num_truncated = max(0, len(ids) - parameters.truncate) if parameters.truncate is not None else 0
        if self._images is not None:
            self._images.check(parts, ids, num_truncated)
        has_images = any(not isinstance(part, str) for part in parts)
        if num_truncated and not has_images:
            prompt = await self._kept(call, prompt, ids, len(ids) - num_truncated, len(after.text) if after else 0)
        ids = ids[num_truncated:]
        self._check_ids(ids)
        max_new_tokens, min_new_tokens = parameters.max_new_tokens, parameters.min_new_tokens or 0
        if after:
            max_new_tokens = after.progress.remaining(max_new_tokens)
            min_new_tokens = after.progress.min_new_tokens(min_new_tokens)
        requested = requested_tokens(max_new_tokens, self.limits.max_total_tokens, len(ids))
        segment = segment_tokens(requested) if self.limits.may_continue else requested
        self._check_lengths(len(ids), segment)
        grammar = None if parameters.grammar is None else await self._compiled(parameters.grammar)
        wire = Request(
            id=0,
            chunks=chunks_of(parts) if has_images else (prompt,),
            truncate=parameters.truncate if parameters.truncate is not None else self.limits.max_input_tokens,
            parameters=self._chooser(call, after, num_truncated, grammar),
            stopping=StoppingParameters(
                max_new_tokens=segment,
                stop_sequences=tuple(parameters.stop),
                ignore_eos_token=parameters.ignore_eos_token,
                min_new_tokens=min(min_new_tokens, segment),
            ),
            prefill_logprobs=parameters.decoder_input_details and after is None,
            top_n_tokens=parameters.top_n_tokens or 0,
            adapter_id=parameters.adapter_id,
            add_special_tokens=add_special_tokens,
        )
        valid = ValidGenerateRequest(wire, tuple(ids), requested, num_truncated, parts)
        if self._images is None or not has_images:
            return valid
        return replace(valid, prefix_ids=self._images.prefix_ids(parts, ids), uncut_spans=self._images.spans(ids))

    async def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        """Token ids of `text`. Raises `ValidationError` where the tokenizer fails."""
        return await self._in_thread(lambda: self._tokenizer.encode(text, add_special_tokens))

    @asynccontextmanager
    async def tokenized(self, text: str, add_special_tokens: bool) -> AsyncIterator[bytes]:
        """The tokens of `text` as the tokenize routes return them; the block delivers them.

        These calls hold no permit, so their number and the size of their texts are bounded until the end of the block.
        Raises `OverloadedError`.
        """
        if len(self._tokenizing) >= MAX_TOKENIZE_JOBS or (self._tokenizing and self._is_tokenizing_much(text)):
            raise OverloadedError
        job = object()
        self._tokenizing[job] = len(text)
        try:
            yield await self._in_thread(
                lambda: render_tokens(text, self._tokenizer.encode_with_offsets(text, add_special_tokens))
            )
        finally:
            del self._tokenizing[job]

    def _is_tokenizing_much(self, text: str) -> bool:
        return sum(self._tokenizing.values()) + len(text) > MAX_TOKENIZE_CHARACTERS

    async def _kept(self, call: GenerateCall, prompt: str, ids: list[int], count: int, least: int) -> str:
        """The end of the prompt with its last `count` tokens and `least` characters."""
        return await self._in_thread(
            lambda: text_of_last(
                self._tokenizer, prompt, ids, count, add_special_tokens=call.add_special_tokens, least=least
            )
        )

    async def _in_thread(self, work: Callable[[], T]) -> T:
        """`work()` in a validation thread."""
        return await asyncio.get_running_loop().run_in_executor(self._executor, lambda: _guarded(work))

    def _check_truncate(self, truncate: int | None) -> None:
        limit = self.limits.max_input_tokens
        if truncate is not None and not 0 < truncate <= limit:
            raise ValidationError(f"`truncate` must be strictly positive and less than {limit}. Given: {truncate}")

    def _check_bytes(self, prompt: str) -> None:
        """Refuse a prompt that cannot fit, however it is tokenized, before it is tokenized."""
        longest = self._tokenizer.longest_token
        if longest is None:
            return
        least = len(prompt.encode()) // longest
        if least > self.limits.max_input_tokens:
            limit = self.limits.max_input_tokens
            raise ValidationError(f"`inputs` must have less than {limit} tokens. Given: at least {least}")

    def _check_ids(self, ids: list[int]) -> None:
        limit = self.limits.vocab_size
        if limit is not None and ids and (largest := max(ids)) >= limit:
            raise ValidationError(
                f"`inputs` has the token id {largest}, but the model's vocabulary has {limit} ids: "
                "the tokenizer is larger than the model"
            )

    def _check_lengths(self, input_len: int, segment: int) -> None:
        limits = self.limits
        if input_len + segment > limits.max_total_tokens:
            raise ValidationError(
                f"`inputs` tokens + `max_new_tokens` must be <= {limits.max_total_tokens}. "
                f"Given: {input_len} `inputs` tokens and {segment} `max_new_tokens`"
            )
        if input_len > limits.max_input_tokens:
            raise ValidationError(f"`inputs` must have less than {limits.max_input_tokens} tokens. Given: {input_len}")

    async def _compiled(self, grammar: RequestGrammar) -> Grammar:
        if self._compile_grammar is None:
            raise ValidationError("grammar is not supported")
        return await self._compile_grammar(grammar)

    def _chooser(
        self, call: GenerateCall, after: Continuation | None, num_truncated: int, grammar: Grammar | None
    ) -> ChooserParameters:
        parameters = call.parameters
        seed = parameters.seed
        if after:
            seed = after.seed(num_truncated)
        elif seed is None:
            seed = self._draw_seed()
        return ChooserParameters(
            temperature=value_or(parameters.temperature, 1.0),
            top_k=value_or(parameters.top_k, 0),
            top_p=value_or(parameters.top_p, 1.0),
            typical_p=value_or(parameters.typical_p, 1.0),
            do_sample=parameters.do_sample,
            seed=seed,
            repetition_penalty=value_or(parameters.repetition_penalty, 1.0),
            frequency_penalty=value_or(parameters.frequency_penalty, 0.0),
            presence_penalty=call.presence_penalty,
            watermark=parameters.watermark,
            grammar=grammar.text if grammar else "",
            grammar_type=grammar.type if grammar else GrammarType.NONE,
            grammar_prefix_chars=len(after.text) if after and grammar else 0,
        )


def _guarded(work: Callable[[], T]) -> T:
    try:
        return work()
    except (RequestError, KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # the native tokenizer's panics derive from BaseException
        raise ValidationError(f"tokenizer error {error}") from error

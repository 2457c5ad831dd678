"""What a client asked for -> `ValidGenerateRequest`, or the first rule of http-api.md section 3.2 that it breaks."""

import asyncio
import secrets
from collections.abc import Awaitable, Callable
from concurrent.futures import Executor
from dataclasses import dataclass, field
from typing import Any, TypeVar

from reference_server.errors import OverloadedError, RequestError, ValidationError
from reference_server.messages import ChooserParameters, StoppingParameters
from reference_server.messages import GrammarType as WireGrammarType
from reference_server.router.images import IMAGE_MODELS, refuse_images
from reference_server.router.offsets import simple_tokens
from reference_server.router.request import ValidGenerateRequest
from reference_server.router.schemas.tgi import GenerateParameters, GrammarType
from reference_server.router.segments import Progress, continued_seed, requested_tokens, segment_tokens
from reference_server.tokenizer import Tokenizer

T = TypeVar("T")

MAX_STOP_CHARACTERS = 1024
MAX_ADAPTER_ID_CHARACTERS = 256
#: Of the tokenize routes, at one time.
MAX_TOKENIZE_JOBS = 64


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """How much one request may ask for.

    may_continue: a long generation may go on as a longer prompt. An encoder's prompt may not be added to.
    """

    max_input_tokens: int
    max_total_tokens: int
    max_best_of: int = 2
    max_stop_sequences: int = 4
    max_top_n_tokens: int = 5
    may_continue: bool = True


@dataclass(frozen=True, slots=True)
class GenerateCall:
    """One generation as a route asks for it: the native parameters and what only the OpenAI routes can say."""

    prompt: str
    parameters: GenerateParameters = field(default_factory=GenerateParameters)
    add_special_tokens: bool = True
    presence_penalty: float = 0.0
    is_stream: bool = False


@dataclass(frozen=True, slots=True)
class Validated:
    """A request to schedule, with the number of prompt tokens that `truncate` removed from it."""

    request: ValidGenerateRequest
    cut: int


@dataclass(frozen=True, slots=True)
class Continuation:
    """Where a generation stands when a segment has used up its tokens: how it began and what it brought."""

    first: Validated
    progress: Progress

    @property
    def text(self) -> str:
        """What is behind the prompt by now."""
        return self.progress.whole_text

    def seed(self, cut: int) -> int:
        return continued_seed(self.first.request.parameters.seed, cut - self.first.cut)


class Validator:
    """Checks requests against `limits` and counts their tokens in `executor`'s threads.

    compile_grammar: a grammar's regex; None where grammars are refused.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        limits: RequestLimits,
        executor: Executor,
        draw_seed: Callable[[], int] = lambda: secrets.randbits(64),
        model_type: str | None = None,
        compile_grammar: Callable[[GrammarType], Awaitable[str]] | None = None,
    ) -> None:
        self.limits = limits
        self._tokenizer = tokenizer
        self._executor = executor
        self._draw_seed = draw_seed
        self._sees_images = model_type in IMAGE_MODELS
        self._compile_grammar = compile_grammar
        self._num_tokenizing = 0

    async def validate(self, call: GenerateCall, after: Continuation | None = None) -> Validated:
        """Rows 5 to 26. With `after`, the next segment of a generation that has begun."""
        asked = call.parameters
        check_parameters(asked, self.limits, call.presence_penalty)
        prompt = call.prompt + after.text if after else call.prompt
        if not prompt:
            raise ValidationError("`inputs` cannot be empty")
        self._check_truncate(asked.truncate)
        if self._sees_images:
            refuse_images(prompt)
        ids = await self.encode(prompt, call.add_special_tokens)
        cut = max(0, len(ids) - asked.truncate) if asked.truncate is not None else 0
        ids = ids[cut:]
        max_new_tokens = after.progress.remaining(asked.max_new_tokens) if after else asked.max_new_tokens
        min_new_tokens = asked.min_new_tokens or 0
        if after:
            min_new_tokens = after.progress.min_new_tokens(min_new_tokens)
        requested = requested_tokens(max_new_tokens, self.limits.max_total_tokens, len(ids))
        segment = segment_tokens(requested) if self.limits.may_continue else requested
        self._check_lengths(len(ids), segment)
        grammar = "" if asked.grammar is None else await self._grammar_regex(asked.grammar)
        request = ValidGenerateRequest(
            chunks=(prompt,),
            input_ids=tuple(ids),
            truncate=asked.truncate if asked.truncate is not None else self.limits.max_input_tokens,
            parameters=self._chooser(call, after, cut, grammar),
            stopping=StoppingParameters(
                max_new_tokens=segment,
                stop_sequences=tuple(asked.stop),
                ignore_eos_token=asked.ignore_eos_token,
                min_new_tokens=min(min_new_tokens, segment),
            ),
            requested_tokens=requested,
            prefill_logprobs=asked.decoder_input_details and after is None,
            top_n_tokens=asked.top_n_tokens or 0,
            add_special_tokens=call.add_special_tokens,
            adapter_id=asked.adapter_id,
        )
        return Validated(request, cut)

    async def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        """Token ids of `text`; a tokenizer that fails is the request's error."""
        return await self._in_thread(lambda: self._tokenizer.encode(text, add_special_tokens))

    async def tokenize(self, text: str, add_special_tokens: bool) -> list[dict[str, Any]]:
        """The tokens of `text` as clients see them.

        No permit bounds how many ask for this, so `MAX_TOKENIZE_JOBS` does. Raises `OverloadedError`.
        """
        if self._num_tokenizing >= MAX_TOKENIZE_JOBS:
            raise OverloadedError
        self._num_tokenizing += 1
        try:
            return await self._in_thread(
                lambda: simple_tokens(text, self._tokenizer.encode_with_offsets(text, add_special_tokens))
            )
        finally:
            self._num_tokenizing -= 1

    async def _in_thread(self, work: Callable[[], T]) -> T:
        """`work()` in a validation thread."""
        return await asyncio.get_running_loop().run_in_executor(self._executor, lambda: _guarded(work))

    def _check_truncate(self, truncate: int | None) -> None:
        limit = self.limits.max_input_tokens
        if truncate is not None and not 0 < truncate <= limit:
            raise ValidationError(f"`truncate` must be strictly positive and less than {limit}. Given: {truncate}")

    def _check_lengths(self, input_len: int, segment: int) -> None:
        limits = self.limits
        if input_len + segment > limits.max_total_tokens:
            raise ValidationError(
                f"`inputs` tokens + `max_new_tokens` must be <= {limits.max_total_tokens}. "
                f"Given: {input_len} `inputs` tokens and {segment} `max_new_tokens`"
            )
        if input_len > limits.max_input_tokens:
            raise ValidationError(f"`inputs` must have less than {limits.max_input_tokens} tokens. Given: {input_len}")

    def _first_seed(self, asked: int | None) -> int:
        return self._draw_seed() if asked is None else asked

    async def _grammar_regex(self, grammar: GrammarType) -> str:
        if self._compile_grammar is None:
            raise ValidationError("grammar is not supported")
        return await self._compile_grammar(grammar)

    def _chooser(self, call: GenerateCall, after: Continuation | None, cut: int, grammar: str) -> ChooserParameters:
        asked = call.parameters
        return ChooserParameters(
            temperature=_or(asked.temperature, 1.0),
            top_k=_or(asked.top_k, 0),
            top_p=_or(asked.top_p, 1.0),
            typical_p=_or(asked.typical_p, 1.0),
            do_sample=asked.do_sample,
            seed=after.seed(cut) if after else self._first_seed(asked.seed),
            repetition_penalty=_or(asked.repetition_penalty, 1.0),
            frequency_penalty=_or(asked.frequency_penalty, 0.0),
            presence_penalty=call.presence_penalty,
            watermark=asked.watermark,
            grammar=grammar,
            grammar_type=WireGrammarType.REGEX if asked.grammar else WireGrammarType.NONE,
            grammar_prefix_chars=len(after.text) if after and asked.grammar else 0,
        )


def check_best_of(best_of: int, limits: RequestLimits) -> None:
    """Rows 1 and 2: single answers only, before any permit."""
    if best_of > 1 and limits.max_best_of == 1:
        raise ValidationError("`best_of` != 1 is not allowed for this endpoint")
    if best_of > limits.max_best_of:
        raise ValidationError(f"`best_of` must be > 0 and <= {limits.max_best_of}. Given: {best_of}")


def check_stream(asked: GenerateParameters) -> None:
    """Rows 3 and 4: streams only, before any permit."""
    if asked.best_of is not None and asked.best_of != 1:
        raise ValidationError("`best_of` != 1 is not supported when streaming tokens")
    if asked.decoder_input_details:
        raise ValidationError("`decoder_input_details` == true is not supported when streaming tokens")


def check_parameters(asked: GenerateParameters, limits: RequestLimits, presence_penalty: float = 0.0) -> None:
    """Rows 5 to 15: what can be judged without the prompt."""
    for is_broken, message in _rules(asked, limits, presence_penalty):
        if is_broken:
            raise ValidationError(message)


def _rules(asked: GenerateParameters, limits: RequestLimits, presence_penalty: float) -> list[tuple[bool, str]]:
    """(broken?, message) in the order in which the first broken one is reported."""
    best_of = asked.best_of or 1
    max_new, min_new, top_n = asked.max_new_tokens, asked.min_new_tokens, asked.top_n_tokens
    samples = asked.do_sample or any(
        value is not None for value in (asked.temperature, asked.top_k, asked.top_p, asked.typical_p)
    )
    return [
        (best_of > 1 and not samples, "you must use sampling when `best_of` is > 1"),
        (_or(asked.temperature, 1.0) <= 0.0, "`temperature` must be strictly positive"),
        (_or(asked.repetition_penalty, 1.0) <= 0.0, "`repetition_penalty` must be strictly positive"),
        (not -2.0 <= _or(asked.frequency_penalty, 0.0) <= 2.0, "`frequency_penalty` must be >= -2.0 and <= 2.0"),
        (not -2.0 <= presence_penalty <= 2.0, "`presence_penalty` must be >= -2.0 and <= 2.0"),
        (not 0.0 < _or(asked.top_p, 0.5) < 1.0, "`top_p` must be > 0.0 and < 1.0"),
        (not 0.0 < _or(asked.typical_p, 0.5) < 1.0, "`typical_p` must be > 0.0 and < 1.0"),
        (_or(asked.top_k, 1) <= 0, "`top_k` must be strictly positive"),
        (max_new == 0, "`max_new_tokens` must be strictly positive"),
        (
            max_new is not None and min_new is not None and min_new > max_new,
            f"`min_new_tokens` must be <= `max_new_tokens`. Given: {min_new} and {max_new}",
        ),
        (
            len(asked.stop) > limits.max_stop_sequences,
            f"`stop` supports up to {limits.max_stop_sequences} stop sequences. Given: {len(asked.stop)}",
        ),
        (
            any(len(stop) > MAX_STOP_CHARACTERS for stop in asked.stop),
            f"`stop` sequences must have at most {MAX_STOP_CHARACTERS} characters",
        ),
        (asked.seed is not None and best_of > 1, "`seed` must not be set when `best_of` > 1"),
        (
            top_n is not None and top_n > limits.max_top_n_tokens,
            f"`top_n_tokens` must be >= 0 and <= {limits.max_top_n_tokens}. Given: {top_n}",
        ),
        (
            len(asked.adapter_id or "") > MAX_ADAPTER_ID_CHARACTERS,
            f"`adapter_id` must have at most {MAX_ADAPTER_ID_CHARACTERS} characters",
        ),
    ]


def _guarded(work: Callable[[], T]) -> T:
    try:
        return work()
    except (RequestError, KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # the native tokenizer's panics derive from BaseException
        raise ValidationError(f"tokenizer error {error}") from error


def _or(value: T | None, default: T) -> T:
    return default if value is None else value

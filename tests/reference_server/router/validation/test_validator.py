import asyncio
import threading
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest

from reference_server.errors import OverloadedError, ValidationError
from reference_server.images.prompt import digest_of
from reference_server.images.reader import ImageReader
from reference_server.messages import FinishReason, GeneratedText, Image
from reference_server.router.scheduling.request import ValidGenerateRequest
from reference_server.router.scheduling.segments import SEED_STRIDE, SegmentProgress
from reference_server.router.schemas.tgi import GenerateParameters
from reference_server.router.validation.request_rules import GenerationLimits
from reference_server.router.validation.validator import Continuation, GenerateCall, Validator
from tests.support.models.word_tokenizer import WordTokenizer

LIMITS = GenerationLimits(max_input_tokens=1024, max_total_tokens=2048)


def call(prompt: str = "hello", **parameters: Any) -> GenerateCall:
    return GenerateCall(prompt, GenerateParameters(**parameters))


async def validate(
    generate_call: GenerateCall,
    after: Continuation | None = None,
    limits: GenerationLimits = LIMITS,
    tokenizer: Any = None,
) -> ValidGenerateRequest:
    with ThreadPoolExecutor(1) as executor:
        validator = Validator(tokenizer or WordTokenizer(), limits, executor, draw_seed=lambda: 99)
        return await validator.validate(generate_call, after)


def continued(first: ValidGenerateRequest, text: str, produced: int) -> Continuation:
    generated = GeneratedText(text, produced, FinishReason.LENGTH, seed=first.wire.parameters.seed)
    return Continuation(first, SegmentProgress(first.requested_tokens).add(generated))


async def test_everything_has_a_value():
    request = await validate(call())

    chooser = request.wire.parameters
    assert (chooser.temperature, chooser.top_k, chooser.top_p, chooser.typical_p) == (1.0, 0, 1.0, 1.0)
    assert (chooser.repetition_penalty, chooser.frequency_penalty, chooser.seed) == (1.0, 0.0, 99)
    assert request.wire.chunks == ("hello",)
    assert (request.wire.truncate, request.input_len) == (1024, 2)


async def test_unlimited_generations_request_all_remaining_tokens():
    request = await validate(call())

    assert (request.requested_tokens, request.wire.stopping.max_new_tokens) == (2046, 1024)


async def test_encoder_decoder_generations_are_not_continued():
    limits = GenerationLimits(max_input_tokens=1024, max_total_tokens=2048, may_continue=False)

    request = await validate(call(max_new_tokens=1500), limits=limits)

    assert (request.requested_tokens, request.wire.stopping.max_new_tokens) == (1500, 1500)


async def test_truncate_keeps_the_last_tokens_and_loses_the_first_special_one():
    validated = await validate(call("one two three", truncate=2))
    whole = (await validate(call("one two three"))).input_ids

    assert validated.input_ids == whole[-2:]
    assert validated.num_truncated == 2


async def test_every_validation_worker_counts_tokens_of_its_own_request():
    """Two workers, two requests: each encoding ends only once the other has begun."""
    both = threading.Barrier(2, timeout=30)
    threads: list[str] = []

    class Meeting(WordTokenizer):
        def encode(self, text: str, add_special_tokens: bool) -> list[int]:
            both.wait()
            threads.append(threading.current_thread().name)
            return super().encode(text, add_special_tokens)

    with ThreadPoolExecutor(2, thread_name_prefix="worker") as executor:
        validator = Validator(Meeting(), LIMITS, executor)
        validated = await asyncio.gather(validator.validate(call("one two")), validator.validate(call("three")))

    assert [each.input_len for each in validated] == [3, 2]
    assert sorted(threads) == ["worker_0", "worker_1"]


async def test_a_tokenizer_that_panics_fails_the_request_alone():
    class Panicking(WordTokenizer):
        def encode(self, text: str, add_special_tokens: bool) -> list[int]:
            raise BaseException("the native code gave up")

    with pytest.raises(ValidationError, match="tokenizer error the native code gave up"):
        await validate(call(), tokenizer=Panicking())


async def test_a_continuation_requests_the_remaining_tokens_with_the_same_seed():
    first = await validate(call(max_new_tokens=1500, min_new_tokens=1200))
    second = await validate(
        call(max_new_tokens=1500, min_new_tokens=1200),
        continued(first, " x" * 900, 1024),
        GenerationLimits(max_input_tokens=2000, max_total_tokens=4096),
    )

    assert (first.wire.stopping.max_new_tokens, first.wire.stopping.min_new_tokens) == (1024, 1024)
    assert (second.requested_tokens, second.wire.stopping.max_new_tokens) == (476, 476)
    assert second.wire.stopping.min_new_tokens == 176
    assert second.wire.chunks == ("hello" + " x" * 900,)
    assert second.wire.parameters.seed == first.wire.parameters.seed


async def test_tokens_newly_cut_move_the_seed():
    generate_call = call("a b c d", truncate=4, max_new_tokens=1500, seed=5)
    first = await validate(generate_call)
    second = await validate(generate_call, continued(first, " e f g", 3))

    assert (first.num_truncated, second.num_truncated) == (1, 4)
    assert second.wire.parameters.seed == (5 + 3 * SEED_STRIDE) % 2**64


async def test_a_best_of_generation_may_be_continued():
    generate_call = call(best_of=2, do_sample=True, max_new_tokens=1500)
    first = await validate(generate_call)

    assert (await validate(generate_call, continued(first, " x", 1024))).requested_tokens == 476


async def test_rules_are_checked_in_order():
    wrong = call("", temperature=0.0, top_p=1.0, max_new_tokens=0)

    with pytest.raises(ValidationError, match="`temperature` must be strictly positive"):
        await validate(wrong)


async def test_equal_to_the_limit_is_accepted():
    limits = GenerationLimits(max_input_tokens=2, max_total_tokens=4)

    assert (await validate(call(max_new_tokens=2), limits=limits)).input_len == 2
    with pytest.raises(ValidationError, match=r"must be <= 4\. Given: 2 `inputs` tokens and 3"):
        await validate(call(max_new_tokens=3), limits=limits)
    with pytest.raises(ValidationError, match=r"`inputs` must have less than 2 tokens\. Given: 3"):
        await validate(call("a b", max_new_tokens=1), limits=limits)


async def test_a_prompt_without_room_reports_zero_new_tokens():
    limits = GenerationLimits(max_input_tokens=2, max_total_tokens=3)

    with pytest.raises(ValidationError, match=r"Given: 5 `inputs` tokens and 0 `max_new_tokens`"):
        await validate(call("a b c d"), limits=limits)


async def test_prompt_logprobs_are_requested_once():
    generate_call = call(decoder_input_details=True, max_new_tokens=1500)
    first = await validate(generate_call)
    second = await validate(generate_call, continued(first, " x", 1024))

    assert (first.wire.prefill_logprobs, second.wire.prefill_logprobs) == (True, False)


async def test_hardening_R4_a_token_id_past_the_vocabulary_is_refused_with_the_limit():
    limits = replace(LIMITS, vocab_size=1002)
    accepted = await validate(call("one two"), limits=limits)

    assert accepted.input_ids == (1, 1000, 1001)
    with pytest.raises(
        ValidationError, match="`inputs` has the token id 1002, but the model's vocabulary has 1002 ids"
    ):
        await validate(call("one two three"), limits=limits)


class Unused(WordTokenizer):
    """Its tokens have at most four bytes."""

    longest_token = 4

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        raise AssertionError("tokenized")


async def test_hardening_R6_a_prompt_that_cannot_fit_is_not_tokenized():
    with pytest.raises(ValidationError, match=r"tokens\. Given: at least 1025"):
        await validate(call("é" * 2050), tokenizer=Unused())
    with pytest.raises(ValidationError, match="tokenized"):
        await validate(call("é" * 2049), tokenizer=Unused())


async def test_hardening_R6_a_prompt_that_is_truncated_may_have_any_length():
    with pytest.raises(ValidationError, match="tokenized"):
        await validate(call("é" * 2050, truncate=5), tokenizer=Unused())


async def test_hardening_R6_the_answer_of_tokenize_is_rendered_in_a_thread():
    threads = set()

    class Seen(list[Any]):
        def __getitem__(self, key: Any) -> Any:
            threads.add(threading.current_thread().name)
            return super().__getitem__(key)

    class Recording(WordTokenizer):
        def encode_with_offsets(self, text: str, add_special_tokens: bool) -> list[tuple[int, int, int]]:
            return Seen(super().encode_with_offsets(text, add_special_tokens))

    with ThreadPoolExecutor(1, thread_name_prefix="validation") as executor:
        async with Validator(Recording(), LIMITS, executor).tokenized("hé yo", False) as body:
            rendered = body

    assert threads == {"validation_0"}
    assert rendered == (
        '[{"id":1000,"text":"hé","start":0,"stop":3},{"id":1001,"text":"yo","start":4,"stop":6}]'.encode()
    )


async def test_hardening_R11_tokenize_answers_that_are_not_delivered_are_bounded():
    with ThreadPoolExecutor(1) as executor:
        validator = Validator(WordTokenizer(), LIMITS, executor)
        async with validator.tokenized("a" * 3_900_000, False):
            async with validator.tokenized("a" * 100_000, False):
                pass
            with pytest.raises(OverloadedError):
                async with validator.tokenized("a" * 100_001, False):
                    pass
        async with validator.tokenized("a" * 5_000_000, False) as body:
            alone = len(body)

    assert alone > 5_000_000


class OneTokenImages(ImageReader):
    """Every image is 20 x 10 pixels, and its placeholder has four image tokens; nothing is decoded."""

    def __init__(self, tokenizer: WordTokenizer) -> None:
        (token_id,) = tokenizer.encode("<image>", add_special_tokens=False)
        super().__init__(FourTokens(), token_id, NoWorkers(), None)  # type: ignore[arg-type]


class FourTokens:
    token = "<image>"

    def text(self, height: int, width: int) -> str:
        assert (height, width) == (10, 20)
        return " <image> <image> <image> <image> "

    def join(self, parts: Iterable[str]) -> str:
        return "".join(parts)


class NoWorkers:
    def __init__(self) -> None:
        self.jobs: list[str] = []

    async def run(self, job: str) -> tuple[int, int]:
        self.jobs.append(job)
        return 10, 20


PICTURE, ENCODED = Image(b"\0\1\2", "image/png"), "![](data:image/png;base64,AAEC)"


async def validate_images(generate_call: GenerateCall, after: Continuation | None = None) -> ValidGenerateRequest:
    tokenizer = WordTokenizer()
    with ThreadPoolExecutor(1) as executor:
        validator = Validator(
            tokenizer, LIMITS, executor, draw_seed=lambda: 99, model_type="llava_next", images=OneTokenImages(tokenizer)
        )
        return await validator.validate(generate_call, after)


async def test_an_image_counts_as_its_tokens_and_is_sent_as_a_chunk() -> None:
    request = await validate_images(call(f"see {ENCODED} now", max_new_tokens=3))

    assert request.wire.chunks == ("see ", PICTURE, " now")
    # The special token, `see`, four of the image, `now`.
    assert request.input_len == 7
    digest = -1 - digest_of(PICTURE)
    assert request.prefix_ids == (*request.input_ids[:2], *[digest] * 4, request.input_ids[6])


async def test_the_tokens_of_images_count_towards_the_limits() -> None:
    with pytest.raises(ValidationError, match=r"must be <= 2048. Given: 2056 `inputs` tokens"):
        await validate_images(call(f"{ENCODED * 16}{' w' * 1991}", max_new_tokens=1))


async def test_a_continued_generation_keeps_its_images_and_reads_none_from_generated_text() -> None:
    generate_call = call(f"see {ENCODED}", max_new_tokens=1500)
    first = await validate_images(generate_call)

    request = await validate_images(generate_call, continued(first, " ![](http://host/a.png)", 1024))

    assert request.wire.chunks == ("see ", PICTURE, " ![](http://host/a.png)")


async def test_a_truncated_prompt_keeps_its_images_whole() -> None:
    generate_call = call(f"one two {ENCODED}", truncate=5, max_new_tokens=3)

    request = await validate_images(generate_call)

    assert (request.input_len, request.num_truncated, request.wire.truncate) == (5, 2, 5)
    assert request.wire.chunks == ("one two ", PICTURE)
    with pytest.raises(ValidationError, match="`truncate` cuts an image"):
        await validate_images(call(f"one two {ENCODED}", truncate=3, max_new_tokens=3))


async def test_text_for_a_model_with_images_is_sent_as_it_is() -> None:
    request = await validate_images(call("only text"))

    assert (request.wire.chunks, request.prefix_ids) == (("only text",), None)

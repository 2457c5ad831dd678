"""The text of a truncated prompt: the shard tokenizes it again, so it is short."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from reference_server.errors import ValidationError
from reference_server.presets.catalog import find
from reference_server.router.schemas.tgi import GenerateParameters
from reference_server.router.validation.request_rules import GenerationLimits
from reference_server.router.validation.truncation import SHORT_CHARACTERS, text_of_last
from reference_server.router.validation.validator import GenerateCall, Validator
from reference_server.tokenizer import Tokenizer, load_tokenizer
from tests.support.models.word_tokenizer import WordTokenizer

LIMITS = GenerationLimits(max_input_tokens=1024, max_total_tokens=2048)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    preset = find("preset:tiny-llama")
    assert preset is not None
    return load_tokenizer(preset.tokenizer_directory, 2048)


@pytest.mark.parametrize("add_special_tokens", [True, False])
@pytest.mark.parametrize(
    "text",
    [
        "word " * 10_000,
        "a" * 50_000,
        " " * 50_000,
        "e" + "\u0301" * 20_000,
        "\U0001f468\u200d" * 10_000,
        "ab\n\tc  " * 7_500,
        "模型" * 10_000,
    ],
    ids=["words", "letter", "spaces", "combining", "emoji", "mixed", "chinese"],
)
async def test_hardening_R6_the_shard_gets_only_the_text_of_the_kept_tokens(
    tokenizer: Tokenizer, text: str, add_special_tokens: bool
):
    with ThreadPoolExecutor(1) as executor:
        call = GenerateCall(text, GenerateParameters(truncate=10), add_special_tokens)
        request = await Validator(tokenizer, LIMITS, executor).validate(call)

    assert list(request.input_ids) == tokenizer.encode(text, add_special_tokens)[-10:]
    assert tokenizer.encode(request.wire.text, add_special_tokens)[-10:] == list(request.input_ids)
    assert len(request.wire.text) < 4_000


def test_a_short_prompt_is_sent_whole(tokenizer: Tokenizer):
    text = "word " * (SHORT_CHARACTERS // 5)

    assert text_of_last(tokenizer, text, tokenizer.encode(text, True), 10, add_special_tokens=True) == text


def test_the_text_that_a_grammar_has_matched_is_kept(tokenizer: Tokenizer):
    text = "word " * 10_000

    kept = text_of_last(tokenizer, text, tokenizer.encode(text, True), 10, add_special_tokens=True, least=30_000)

    assert kept == text[-30_000:]


def test_hardening_R6_a_prompt_whose_end_has_other_tokens_is_refused():
    class ByPosition(WordTokenizer):
        def encode(self, text: str, add_special_tokens: bool) -> list[int]:
            return [len(text) + place for place in range(len(text.split()))]

    ids = list(range(100_000))
    with pytest.raises(ValidationError, match=r"no short end of it has the same last 10 tokens \(`truncate`\)"):
        text_of_last(ByPosition(), "word " * 40_000, ids, 10, add_special_tokens=True)

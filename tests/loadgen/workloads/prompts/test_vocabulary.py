import random
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loadgen.workloads.prompts.vocabulary import CalibrationError, calibrate, calibrate_sparingly


def words(text: str) -> int:
    """One special token, then a token per word."""
    return 1 + len(text.split())


def characters(text: str) -> int:
    return len(text)


def pieces(text: str) -> int:
    """Words of up to three letters are whole, longer ones are cut; `the` swallows the word that follows it."""
    text = re.sub(r" the (?=\S)", " the_", text)
    return 2 + sum(1 if "_" in word else -(-len(word) // 3) for word in re.findall(r"\S+", text))


COUNTERS = [words, characters, pieces]


@pytest.mark.parametrize("count", COUNTERS)
def test_texts_have_exactly_the_tokens_asked_for(count):
    vocabulary = calibrate(count)

    for tokens in (vocabulary.shortest, vocabulary.shortest + 1, 17, 128, 1_000):
        assert count(vocabulary.write(tokens, f"key-{tokens}")) == tokens


@given(tokens=st.integers(5, 400), key=st.text(max_size=8))
@settings(max_examples=40)
def test_equal_keys_give_equal_texts_and_different_keys_different_ones(tokens, key):
    vocabulary = calibrate(words)

    text = vocabulary.write(tokens, key)

    assert text == vocabulary.write(tokens, key)
    assert text != vocabulary.write(tokens, key + "!")


def test_a_shorter_continuation_is_a_prefix_of_a_longer_one():
    vocabulary = calibrate(words)

    short, long = (vocabulary.continue_text(tokens, random.Random("block")) for tokens in (100, 512))

    assert long.startswith(short)


def test_words_that_merge_are_left_out():
    vocabulary = calibrate(pieces)

    texts = {word.text for word in vocabulary.words}

    assert " the" not in texts
    assert {" of", " and", " to"} <= texts


def test_a_tokenizer_that_counts_nothing_is_refused():
    with pytest.raises(CalibrationError):
        calibrate(lambda text: 1)


@pytest.mark.parametrize("special", [0, 1, 7])
def test_pages_2_a_tokenizer_that_splits_words_is_counted_with_few_requests(special):
    """A token per byte, as with models of bytes; the special tokens may be those of a chat template."""
    counted = []

    def count(text):
        counted.append(text)
        return special + len(text.encode())

    vocabulary = calibrate_sparingly(count)

    assert len(counted) <= 20
    for tokens in (64, 200, 1_000):
        texts = {vocabulary.write(tokens, f"key {number}") for number in range(20)}
        assert {special + len(text) for text in texts} == {tokens}
        assert len(texts) == 20


def test_words_that_do_not_keep_their_counts_are_refused_with_few_requests():
    with pytest.raises(CalibrationError, match="next to each other"):
        calibrate_sparingly(lambda text: len(text) + len(text) ** 2 // 50)


def test_a_tokenizer_of_whole_words_keeps_its_words_of_one_token():
    assert {word.tokens for word in calibrate_sparingly(words).words} == {1}

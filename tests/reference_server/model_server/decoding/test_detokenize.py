import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers

from reference_server.model_server.decoding.detokenize import IncrementalDetokenizer, final_text
from reference_server.presets.catalog import find
from reference_server.tokenizer import FastTokenizer, load_tokenizer

BYTEWISE = load_tokenizer(find("preset:tiny-llama").tokenizer_directory, vocab_size=2100)


class Plain:
    """The same tokenizer without the fast path."""

    is_bytewise = False

    def __init__(self, tokenizer):
        self.decode = tokenizer.decode
        self.text_of = tokenizer.text_of


def sentencepiece():
    """A SentencePiece-like tokenizer with byte fallback, decoded as Llama 2's is."""
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += ["▁", "▁My", "▁Name", "▁is", "▁Te", "ven", ",", "▁Olivier", "▁and", "s", "."]
    tokenizer = tokenizers.Tokenizer(
        models.Unigram([(piece, -1.0 if index > 256 else -9.0) for index, piece in enumerate(pieces)], 0, True)
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return FastTokenizer(tokenizer, {})


def stream(tokenizer, prompt_ids, ids):
    detokenizer = IncrementalDetokenizer(tokenizer, prompt_ids)
    return [detokenizer.append(id_) for id_ in ids]


def reference_stream(tokenizer, prompt_ids, ids):
    """The definition of section 6.2, word for word."""
    all_ids = list(prompt_ids)
    prefix, read = max(len(all_ids) - 5, 0), len(all_ids)
    pieces = []
    for id_ in ids:
        all_ids.append(id_)
        old, new = tokenizer.decode(all_ids[prefix:read]), tokenizer.decode(all_ids[prefix:])
        if len(new) > len(old) and not new.endswith("\ufffd"):
            pieces.append(new[len(old) :])
            prefix, read = read, len(all_ids)
        else:
            pieces.append("")
    return pieces


def test_model_server_M9_multi_byte_characters_are_streamed_whole():
    text = "我很感谢你的热情"

    pieces = stream(BYTEWISE, BYTEWISE.encode("Say:", True), BYTEWISE.encode(text, False))

    assert "".join(pieces) == text
    assert not any("\ufffd" in piece for piece in pieces)
    assert len(pieces) > len(text)


@pytest.mark.parametrize("prompt", ["", "My Name is Teven and Olivier."])
def test_model_server_M10_sentencepiece_keeps_single_spaces(prompt):
    tokenizer = sentencepiece()
    text = "My Name is Teven, and Olivier is."
    ids = tokenizer.encode(text, False)

    pieces = stream(tokenizer, tokenizer.encode(prompt, False), ids)

    assert "".join(pieces) == (f" {text}" if prompt else text)
    assert len([piece for piece in pieces if piece]) == len(ids)


def test_model_server_M10_byte_fallback_characters_are_streamed_whole():
    tokenizer = sentencepiece()
    ids = tokenizer.encode("My 热 Name", False)

    assert "".join(stream(tokenizer, [], ids)) == "My 热 Name"


@pytest.mark.parametrize("prompt_len", [0, 1, 2, 4, 5, 6])
def test_model_server_M33_prompts_shorter_than_the_context_stream_correctly(prompt_len):
    prompt = BYTEWISE.encode("one two three four five six seven", False)[:prompt_len]
    ids = BYTEWISE.encode(" then the rest", False)

    assert "".join(stream(BYTEWISE, prompt, ids)) == " then the rest"


def test_special_tokens_are_part_of_the_stream():
    assert stream(BYTEWISE, [1], BYTEWISE.encode("Hi</s>", False))[-1] == "</s>"


ids_lists = st.lists(st.integers(0, 2099) | st.integers(8, 263), max_size=24)


@settings(max_examples=120)
@given(prompt=ids_lists, ids=ids_lists)
def test_pieces_are_those_of_the_definition_with_and_without_the_fast_path(prompt, ids):
    expected = reference_stream(BYTEWISE, prompt, ids)

    assert stream(BYTEWISE, prompt, ids) == expected
    assert stream(Plain(BYTEWISE), prompt, ids) == expected


@settings(max_examples=60)
@given(prompt=ids_lists, ids=st.lists(st.integers(8, 2047), max_size=24))
def test_pieces_join_to_the_final_text_up_to_an_unfinished_character(prompt, ids):
    prompt = [*prompt, *BYTEWISE.encode(".", False)]
    text = final_text(BYTEWISE, prompt + ids, len(prompt))

    assert text.startswith("".join(stream(BYTEWISE, prompt, ids)))


def test_final_text_skips_special_tokens():
    prompt = BYTEWISE.encode("Hello", True)

    assert final_text(BYTEWISE, prompt + BYTEWISE.encode(" there</s>", False), len(prompt)) == " there"


def test_final_text_has_the_leading_space_that_its_context_gives():
    tokenizer = sentencepiece()
    ids = tokenizer.encode("My Name is Teven", False)

    assert final_text(tokenizer, ids, 2) == " is Teven"


def test_output_that_ends_inside_a_character_is_not_lost():
    prompt = BYTEWISE.encode("Say:", True)
    unfinished = BYTEWISE.encode(" yes 我", False)[:-1]

    text = final_text(BYTEWISE, prompt + unfinished, len(prompt))

    assert text.startswith(" yes ")
    assert text.endswith("\ufffd")

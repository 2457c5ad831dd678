"""Tokens as bytes: joined, they are the text that the tokenizer decodes to."""

import pytest
import tokenizers
from tokenizers import decoders, models

from reference_server.presets.catalog import PRESETS
from reference_server.token_bytes import token_bytes
from reference_server.tokenizer import FastTokenizer, load_tokenizer

TEXTS = ["plain words", '{"größe": ["日本", "😀"]}', "tab\tand\nnewline \x00\x7f", "  spaces  "]


@pytest.mark.parametrize("text", TEXTS)
def test_the_shipped_tokenizer_is_spelled_as_it_decodes(text: str):
    tokenizer = load_tokenizer(PRESETS[0].tokenizer_directory, vocab_size=3000)
    assert isinstance(tokenizer, FastTokenizer)
    spelled = tokenizer.token_bytes()
    assert spelled is not None

    ids = tokenizer.encode(text, add_special_tokens=False)

    assert len(spelled) == 3000
    assert b"".join(spelled[id_] for id_ in ids).decode() == tokenizer.decode(ids) == text


def test_sentencepiece_spells_spaces_and_bytes():
    words = ["<unk>", "▁a", "<0xC3>", "<0xA9>", "é▁b", "<0x>"]
    tokenizer = tokenizers.Tokenizer(models.BPE({word: id_ for id_, word in enumerate(words)}, []))
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])

    spelled = token_bytes(tokenizer, 7)

    assert spelled == [b"<unk>", b" a", b"\xc3", b"\xa9", "é b".encode(), b"<0x>", b""]
    assert tokenizer.decode([1, 2, 3, 4]) == " aéé b"


def test_added_tokens_stand_as_they_are():
    tokenizer = tokenizers.Tokenizer(models.BPE({"a": 0}, []))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens(["Ġé▁"])

    assert token_bytes(tokenizer, 2) == [b"a", "Ġé▁".encode()]


def test_other_ways_of_joining_are_distinguished():
    tokenizer = tokenizers.Tokenizer(models.WordPiece({"a": 0, "##b": 1}, unk_token="a"))
    assert token_bytes(tokenizer, 2) is None

    tokenizer.decoder = decoders.WordPiece()
    assert token_bytes(tokenizer, 2) is None

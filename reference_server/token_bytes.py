"""The bytes of each token of a vocabulary: a character may be split over several tokens."""

import json
import re
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

import tokenizers

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def token_bytes(tokenizer: tokenizers.Tokenizer, size: int) -> list[bytes] | None:
    """The bytes of each id below `size`; empty for ids without a token. None for an unknown decoder.

    Known are GPT-2's, a character for each byte, and SentencePiece's, `▁` for a space and `<0x..>` for a byte.
    """
    decoder = _state(tokenizer.decoder)
    kinds = set(_kinds(decoder)) if decoder is not None else set[str]()
    if "ByteLevel" in kinds:
        spell = _spell_bytes
    elif kinds & {"ByteFallback", "Metaspace"}:
        spell = _spell_pieces
    else:
        return None
    added = {id_: token.content for id_, token in tokenizer.get_added_tokens_decoder().items()}
    found = [b""] * size
    for token, id_ in tokenizer.get_vocab(with_added_tokens=True).items():
        # Added tokens are literal text.
        found[id_] = added[id_].encode() if id_ in added else spell(token)
    return found


def longest_token(tokenizer: tokenizers.Tokenizer) -> int | None:
    """Bytes of text that one token stands for, at most. None if there is no known limit.

    There is one for byte-level and byte-fallback BPE whose other parts drop no text.
    """
    model = tokenizer.model
    decoder = _state(tokenizer.decoder)
    is_complete = "ByteLevel" in set(_kinds(decoder)) if decoder else False
    if not isinstance(model, tokenizers.models.BPE) or not (is_complete or model.byte_fallback):
        return None
    if not all(_keeps_text(_state(part)) for part in (tokenizer.normalizer, tokenizer.pre_tokenizer)):
        return None
    if any(token.lstrip or token.rstrip for token in tokenizer.get_added_tokens_decoder().values()):
        return None
    # One character of a token is one byte of text (byte-level), or at least as many bytes as in the text.
    return max((len(token.encode()) for token in tokenizer.get_vocab(with_added_tokens=True)), default=None)


def _keeps_text(part: Mapping[str, Any] | None) -> bool:
    """Whether a normalizer or pre-tokenizer never shortens a text."""
    match part:
        case None | {"type": "Prepend" | "ByteLevel" | "Metaspace" | "Digits"}:
            return True
        case {"type": "Replace", "pattern": {"String": " "}, "content": str(content)}:
            return bool(content)
        case {"type": "Split", "behavior": behavior}:
            return bool(behavior != "Removed")
        case {"type": "Sequence", "normalizers": parts} | {"type": "Sequence", "pretokenizers": parts}:
            return all(map(_keeps_text, parts))
    return False


def _state(part: Any) -> Mapping[str, Any] | None:
    return None if part is None else json.loads(part.__getstate__())


def _kinds(decoder: Mapping[str, Any]) -> Iterator[str]:
    yield decoder["type"]
    for inner in decoder.get("decoders", ()):
        yield from _kinds(inner)


def _spell_bytes(token: str) -> bytes:
    table = _byte_of_character()
    if all(character in table for character in token):
        return bytes(table[character] for character in token)
    return token.encode()


def _spell_pieces(token: str) -> bytes:
    byte = _BYTE.fullmatch(token)
    return bytes([int(byte[1], 16)]) if byte else token.replace("▁", " ").encode()


@cache
def _byte_of_character() -> Mapping[str, int]:
    """GPT-2's alphabet: printable bytes map to themselves, the others to U+0100 and up."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + rank): byte for rank, byte in enumerate(others)}

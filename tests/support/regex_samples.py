"""Random strings of a regex, drawn with the automaton that constrains decoding, over single bytes."""

import random
from collections.abc import Iterator
from functools import cache

import llguidance

END = 256


class ByteVocabulary:
    """One token per byte, and one that ends."""

    eos_token_id = END
    bos_token_id = None
    special_token_ids = (END,)
    tokens = (*(bytes([value]) for value in range(256)), b"<end>")

    def __call__(self, text: bytes | str) -> list[int]:
        return list(text if isinstance(text, bytes) else text.encode())


@cache
def byte_tokenizer() -> llguidance.LLTokenizer:
    return llguidance.LLTokenizer(llguidance.TokenizerWrapper(ByteVocabulary()))


def matcher(regex: str) -> llguidance.LLMatcher:
    made = llguidance.LLMatcher(byte_tokenizer(), llguidance.LLMatcher.grammar_from_regex(regex), log_level=0)
    assert not made.is_error(), made.get_error()
    return made


def sample(regex: str, seed: int, count: int, max_bytes: int = 300) -> Iterator[str]:
    """Up to `count` matches; what has not ended by `max_bytes` is left out."""
    first, rng = matcher(regex), random.Random(seed)
    for _ in range(count):
        walk, text = first.deep_copy(), bytearray()
        while len(text) < max_bytes:
            mask = walk.compute_bitmask()
            allowed = [token for token in range(257) if mask[token // 8] >> token % 8 & 1]
            # Endings are likely, or few strings would ever be whole.
            token = END if END in allowed and (len(allowed) == 1 or rng.random() < 0.3) else rng.choice(allowed)
            if token == END:
                yield text.decode()
                break
            walk.consume_token(token)
            text.append(token)


def accepts(regex: str, text: str) -> bool:
    """Whether the automaton takes the whole of `text`."""
    walk = matcher(regex)
    data = list(text.encode())
    return walk.try_consume_tokens(data) == len(data) and walk.is_accepting()

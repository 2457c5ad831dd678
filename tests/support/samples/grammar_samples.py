"""Random strings of a grammar, drawn with the automaton that constrains decoding, over single bytes."""

import json
import random
import sys
from collections.abc import Iterator
from functools import cache
from typing import Any

import llguidance

from reference_server.grammars.schema import read_schema, schema_grammar
from reference_server.messages import Grammar, GrammarType, Request

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


def matcher(grammar: Grammar | str) -> llguidance.LLMatcher:
    """Of a grammar as the wire carries it, or of a regex."""
    if isinstance(grammar, str):
        grammar = Grammar(grammar)
    if grammar.type is GrammarType.JSON:
        source = schema_grammar(read_schema(grammar.text))
    else:
        source = llguidance.LLMatcher.grammar_from_regex(grammar.text)
    made = llguidance.LLMatcher(byte_tokenizer(), source, log_level=0)
    assert not made.is_error(), made.get_error()
    return made


def grammar_of(request: Request) -> Grammar:
    return Grammar(request.parameters.grammar, request.parameters.grammar_type)


def sample(grammar: Grammar | str, seed: int, count: int, max_bytes: int = 300) -> Iterator[str]:
    """Up to `count` matches; texts that do not end within `max_bytes` are left out."""
    first, rng = matcher(grammar), random.Random(seed)
    for _ in range(count):
        walk, text = first.deep_copy(), bytearray()
        while len(text) < max_bytes:
            mask = walk.compute_bitmask()
            allowed = [token for token in range(257) if mask[token // 8] >> token % 8 & 1]
            # Ends are likely; otherwise few strings would be complete.
            token = END if END in allowed and (len(allowed) == 1 or rng.random() < 0.3) else rng.choice(allowed)
            if token == END:
                yield text.decode()
                break
            walk.consume_token(token)
            text.append(token)


def accepts(grammar: Grammar | str, text: str) -> bool:
    """Whether the automaton takes the whole of `text`."""
    walk = matcher(grammar)
    data = list(text.encode())
    return walk.try_consume_tokens(data) == len(data) and walk.is_accepting()


def finite_json(text: str) -> Any:
    """Parsed, with the largest float for a number beyond it: a validator takes no infinity."""
    return json.loads(text, parse_float=lambda number: max(-sys.float_info.max, min(sys.float_info.max, float(number))))

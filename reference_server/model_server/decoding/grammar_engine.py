"""llguidance over one model's tokens: compiles a grammar to an automaton.

llguidance walks a regex or a JSON schema over the bytes of the tokens and builds states when they are met, so that
nothing waits for a compilation and the cost of a step is limited (grammars/limits.py). docs/grammars.md compares
libraries.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from reference_server.errors import ValidationError
from reference_server.grammars.pool import missing_packages
from reference_server.messages import Grammar, GrammarType
from reference_server.tokenizer import FastTokenizer, Tokenizer

if TYPE_CHECKING:
    import llguidance

#: A longer step has built states; only then is the process's memory read.
_BUILDING_NS = 1_000_000
_PAGE_BYTES = 4096


class GrammarError(Exception):
    """A grammar cannot be enforced; the text gives the reason."""


class GrammarEngine:
    """llguidance with this model's tokens. Raises GrammarError if the model cannot have grammars."""

    def __init__(self, tokenizer: Tokenizer, eos_ids: list[int]) -> None:
        missing = missing_packages()
        if missing:
            raise GrammarError(f"{', '.join(missing)} of the `grammar` extra is missing")
        if not isinstance(tokenizer, FastTokenizer):
            raise GrammarError("the model has no tokenizer.json")
        if not eos_ids:
            raise GrammarError("the model has no end-of-sequence token")
        import llguidance

        token_bytes = tokenizer.token_bytes()
        if token_bytes is None:
            raise GrammarError("its tokenizer joins tokens neither as bytes nor as SentencePiece does")
        self._vocabulary = _Vocabulary(tokenizer, token_bytes, eos_ids)
        self.tokens = llguidance.LLTokenizer(llguidance.TokenizerWrapper(self._vocabulary), eos_token=eos_ids)

    def compile(self, grammar: Grammar) -> "llguidance.LLMatcher":
        import llguidance

        from reference_server.grammars.limits import check_size, parser_detail, parser_limits
        from reference_server.grammars.schema import read_schema, schema_grammar

        try:
            # Another router may not have checked it.
            if grammar.type is GrammarType.JSON:
                source = schema_grammar(read_schema(grammar.text))
            else:
                check_size(grammar.text)
                source = llguidance.LLMatcher.grammar_from_regex(grammar.text)
        except ValidationError as error:
            raise GrammarError(error.detail) from error
        matcher = llguidance.LLMatcher(self.tokens, source, log_level=0, limits=parser_limits())
        if matcher.is_error():
            raise GrammarError(parser_detail(matcher.get_error()))
        return matcher

    def ids_of(self, text: str) -> list[int]:
        found: list[int] = self.tokens.greedy_tokenize(text)
        if not self._vocabulary.spells(found, text.encode()):
            # The vocabulary lacks some of the text's bytes as tokens.
            found = self._vocabulary(text.encode())
            if not self._vocabulary.spells(found, text.encode()):
                raise GrammarError("no tokens spell the output so far")
        return found


class _Vocabulary:
    """The vocabulary as llguidance reads it, and the tokenization of text that a grammar forces."""

    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer, tokens: list[bytes], eos_ids: list[int]) -> None:
        self._tokenizer = tokenizer
        self.tokens = tokens
        self.eos_token_id = eos_ids[0]
        self.special_token_ids = sorted(tokenizer.special_ids.union(eos_ids))
        special = set(self.special_token_ids)
        self._ids = {token: id_ for id_, token in enumerate(tokens) if token and id_ not in special}
        self._longest = max(map(len, self._ids), default=0)

    def __call__(self, text: bytes) -> list[int]:
        """The tokenizer's ids if they spell exactly this text; otherwise the longest tokens that do."""
        ids = self._tokenizer.encode(text.decode(errors="replace"), add_special_tokens=False)
        return ids if self.spells(ids, text) else self._longest_tokens(text)

    def spells(self, ids: Sequence[int], text: bytes) -> bool:
        return b"".join(self.tokens[id_] for id_ in ids) == text

    def _longest_tokens(self, text: bytes) -> list[int]:
        ids: list[int] = []
        while text:
            size = next((size for size in range(self._longest, 0, -1) if text[:size] in self._ids), 0)
            if not size:
                break
            ids.append(self._ids[text[:size]])
            text = text[size:]
        return ids


class Automaton:
    """A grammar's automaton, built as far as it was walked; `num_bytes`: the memory that this has added."""

    def __init__(self, engine: GrammarEngine, grammar: Grammar, resident_bytes: Callable[[], int]) -> None:
        self._resident_bytes = resident_bytes
        self.num_bytes = 0
        before = resident_bytes()
        self.start = engine.compile(grammar)
        self.num_bytes += max(0, resident_bytes() - before)

    def fill(self, matcher: "llguidance.LLMatcher", row: NDArray[np.int32], clock_ns: Callable[[], int]) -> int:
        """Write the tokens that may come next, a bit each; returns the ns that this took.

        row: [ceil(vocab_size / 32)], the tokenizer's vocabulary.
        """
        before, started = self._resident_bytes(), clock_ns()
        matcher.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)
        spent_ns = clock_ns() - started
        if spent_ns > _BUILDING_NS:
            self.num_bytes += max(0, self._resident_bytes() - before)
        return spent_ns


def read_resident_bytes() -> int:
    """Memory of this process. Reading /proc takes 3 us; getrusage reports the peak only."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * _PAGE_BYTES

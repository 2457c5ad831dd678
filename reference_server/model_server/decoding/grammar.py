"""Grammars in a batch: the tokens that may come next in each row that has a grammar.

llguidance walks a regex or a JSON schema over the bytes of the tokens and builds states when they are met, so that
nothing waits for a compilation and the cost of a step is limited (grammars/limits.py). docs/grammars.md compares
libraries.
"""

import copy
import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from reference_server.errors import ValidationError
from reference_server.grammars.pool import MAX_STEP_NS, missing_packages
from reference_server.messages import Grammar, GrammarType
from reference_server.tokenizer import FastTokenizer, Tokenizer

if TYPE_CHECKING:
    import llguidance

logger = logging.getLogger(__name__)

MAX_CACHED = 32
MAX_CACHED_BYTES = 256 << 20
#: A longer step has built states; only then is the process's memory read.
_BUILDING_NS = 1_000_000
_PAGE_BYTES = 4096
_TOKENS_PER_CHECK = 64


class GrammarError(Exception):
    """A grammar cannot be enforced; the text gives the reason."""


class Grammars:
    """Automata over one model's tokens. The last ones are cached, and shared by their sequences."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        eos_ids: Collection[int],
        resident_bytes: Callable[[], int] | None = None,
        clock_ns: Callable[[], int] = time.thread_time_ns,
    ) -> None:
        self.vocab_size = tokenizer.vocab_size
        self._tokenizer = tokenizer
        self.eos_ids = sorted(id_ for id_ in eos_ids if 0 <= id_ < tokenizer.vocab_size)
        self.clock_ns = clock_ns
        self._resident_bytes = resident_bytes or read_resident_bytes
        self._too_slow: OrderedDict[Grammar, None] = OrderedDict()
        self._engine: _Engine | None = None
        self._cached: OrderedDict[Grammar, Automaton] = OrderedDict()

    @property
    def cached(self) -> list[Grammar]:
        """The least recently used first."""
        return list(self._cached)

    def state(self, grammar: Grammar, prefix: str = "") -> "GrammarState":
        """The state of a new sequence, or of one that continues after the output `prefix`.

        Never raises: a grammar that cannot be enforced fails its own row.
        """
        return GrammarState(self, grammar, prefix)

    def prepare(self) -> None:
        """Index the vocabulary now, if grammars can be served, so that the first request does not wait for it."""
        try:
            self._loaded_engine()
        except GrammarError as error:
            logger.info("requests with a grammar are refused: %s", error)

    def automaton(self, grammar: Grammar) -> "Automaton":
        """Raises GrammarError for a grammar that does not compile, or that was too slow before."""
        if grammar in self._too_slow:
            raise GrammarError("it has taken too long before")
        cached = self._cached.get(grammar)
        if cached is None:
            self._loaded_engine()
            started = self.clock_ns()
            cached = self.fresh_automaton(grammar)
            if self.clock_ns() - started > MAX_STEP_NS:
                self.refuse(grammar)
                raise GrammarError("its automaton takes too long to start")
            self._cached[grammar] = cached
        self._cached.move_to_end(grammar)
        while len(self._cached) > MAX_CACHED or (len(self._cached) > 1 and self._cached_bytes() > MAX_CACHED_BYTES):
            self._cached.popitem(last=False)
        return cached

    def fresh_automaton(self, grammar: Grammar) -> "Automaton":
        return Automaton(self._loaded_engine(), grammar, self._resident_bytes)

    def ids_of(self, text: str) -> list[int]:
        """Tokens that spell `text`, byte for byte. Raises GrammarError if there are none."""
        return self._loaded_engine().ids_of(text) if text else []

    def drop(self, grammar: Grammar, automaton: "Automaton") -> None:
        """Remove an automaton that has reached its limits from the cache."""
        if self._cached.get(grammar) is automaton:
            del self._cached[grammar]

    def refuse(self, grammar: Grammar) -> None:
        """Refuse a grammar whose steps take too long, while it is among the last ones refused."""
        self._cached.pop(grammar, None)
        self._too_slow[grammar] = None
        if len(self._too_slow) > MAX_CACHED:
            self._too_slow.popitem(last=False)

    def _cached_bytes(self) -> int:
        return sum(automaton.num_bytes for automaton in self._cached.values())

    def _loaded_engine(self) -> "_Engine":
        if self._engine is None:
            self._engine = _Engine(self._tokenizer, self.eos_ids)
        return self._engine


class _Engine:
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

    def __init__(self, engine: _Engine, grammar: Grammar, resident_bytes: Callable[[], int]) -> None:
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


class GrammarState:
    """One sequence's state in its grammar. It never raises: after a failure no token is allowed."""

    def __init__(self, grammars: Grammars, grammar: Grammar, prefix: str = "") -> None:
        self.num_words = -(-grammars.vocab_size // 32)
        self._grammars = grammars
        self._grammar = grammar
        self._accepted: list[int] = []
        self._has_own_automaton = False
        self._automaton: Automaton | None = None
        try:
            self._accepted = grammars.ids_of(prefix)
            self._automaton = grammars.automaton(grammar)
        except GrammarError as error:
            logger.warning("a grammar cannot be enforced: %s", error)
            return
        self._matcher = self._automaton.start.deep_copy()
        if not self._walk(self._accepted):
            self._restart()

    def is_end(self, token_id: int) -> bool:
        """Whether the token ends the output: it has no text in a grammar, even if the tokenizer counts it as text."""
        return token_id in self._grammars.eos_ids

    @property
    def must_end(self) -> bool:
        """Whether only an end-of-sequence token may come next."""
        return self._automaton is not None and self._matcher.is_stopped() and not self._matcher.is_error()

    def fill(self, row: NDArray[np.int32]) -> None:
        """Write the tokens that may come next, a bit each; none after a failure."""
        if self._automaton is not None:
            spent_ns = self._automaton.fill(self._matcher, row, self._grammars.clock_ns)
            if self._matcher.is_error():
                self._restart()
                if self._automaton is not None:
                    spent_ns += self._automaton.fill(self._matcher, row, self._grammars.clock_ns)
            if spent_ns > MAX_STEP_NS:
                self._fail_slow(spent_ns)
        if self._automaton is None or self._matcher.is_error():
            row[:] = 0

    def accept(self, token_id: int) -> None:
        """Advance by the token that was chosen."""
        self._accepted.append(token_id)
        if self._automaton is None or self._matcher.is_stopped():
            return
        if not self._walk([token_id]):
            self._restart()

    def count_allowed(self, draft: Sequence[int]) -> int:
        """Tokens of `draft` that may come next one after the other, without the end of the output."""
        if self._automaton is None or self._matcher.is_stopped():
            return 0
        end = next((place for place, id_ in enumerate(draft) if self.is_end(id_)), len(draft))
        return self._matcher.validate_tokens(list(draft[:end]))

    def after(self, draft: Sequence[int]) -> "GrammarState":
        """A state of its own, advanced by tokens that `count_allowed` has counted."""
        state = copy.copy(self)
        state._accepted = [*self._accepted, *draft]
        if self._automaton is not None:
            state._matcher = self._matcher.deep_copy()
            state._matcher.consume_tokens(list(draft))
        return state

    def _walk(self, ids: Sequence[int]) -> bool:
        """Advance by `ids`, checking the time every few tokens, since the batch waits. False if one is not allowed."""
        started = self._grammars.clock_ns()
        for first in range(0, len(ids), _TOKENS_PER_CHECK):
            if not self._matcher.consume_tokens(list(ids[first : first + _TOKENS_PER_CHECK])):
                return False
            spent_ns = self._grammars.clock_ns() - started
            if spent_ns > MAX_STEP_NS:
                self._fail_slow(spent_ns)
                break
        return True

    def _restart(self) -> None:
        """Continue with an automaton of its own, once: other sequences may have used up the shared one's limits."""
        assert self._automaton is not None
        reason = self._matcher.get_error().partition("\n")[0]
        self._grammars.drop(self._grammar, self._automaton)
        was_shared, self._has_own_automaton = not self._has_own_automaton, True
        self._automaton = self._grammars.fresh_automaton(self._grammar) if was_shared else None
        if self._automaton is not None:
            self._matcher = self._automaton.start.deep_copy()
            if self._walk(self._accepted):
                return
        logger.warning("a grammar's state has failed: %s", reason)
        self._automaton = None

    def _fail_slow(self, spent_ns: int) -> None:
        """End this row and refuse the grammar from now on, so that it does not delay the batch again."""
        logger.warning(
            "a request ends: a step of its grammar took %d ms, of %d ms",
            spent_ns // 1_000_000,
            MAX_STEP_NS // 1_000_000,
        )
        self._grammars.refuse(self._grammar)
        self._automaton = None


class GrammarRows:
    """The rows of a batch that have a grammar.

    states: by row. vocab_size: of the model's logits; the tokenizer's may be larger.
    """

    def __init__(
        self, states: Mapping[int, GrammarState], num_rows: int, vocab_size: int, device: torch.device
    ) -> None:
        self._states = states
        self._in_every_row = len(states) == num_rows
        self._vocab_size = vocab_size
        self._device = device

    @classmethod
    def of(cls, states: Sequence[GrammarState | None], vocab_size: int, device: torch.device) -> "GrammarRows | None":
        """None if no row has a grammar."""
        found = {row: state for row, state in enumerate(states) if state is not None}
        return cls(found, len(states), vocab_size, device) if found else None

    def allowed(self) -> NDArray[np.int32]:
        """A bit for each token that may come next: [rows with a grammar, words of 32]."""
        words = np.zeros((len(self._states), max(state.num_words for state in self._states.values())), dtype=np.int32)
        for row, state in zip(words, self._states.values(), strict=True):
            state.fill(row)
        return words

    def ending(self) -> set[int]:
        """Rows in which only an end-of-sequence token may come next."""
        return {row for row, state in self._states.items() if state.must_end}

    def apply_(self, scores: Tensor, allowed: NDArray[np.int32]) -> None:
        """Set the scores of tokens that are not allowed to -inf. scores: [rows, vocab_size]."""
        forbidden = ~_bits(allowed, self._vocab_size, self._device)
        if self._in_every_row:
            scores.masked_fill_(forbidden, -torch.inf)
            return
        for row, each in zip(self._states, forbidden, strict=True):
            scores[row].masked_fill_(each, -torch.inf)


def _bits(words: NDArray[np.int32], count: int, device: torch.device) -> Tensor:
    """[rows, count] bool of [rows, words]."""
    if device.type == "cpu":
        bits = np.unpackbits(words.view(np.uint8), axis=1, count=count, bitorder="little")
        return torch.from_numpy(bits.view(np.bool_))
    # Copying the packed words moves a thirty-second of the bytes.
    packed = torch.from_numpy(words).to(device, non_blocking=True)
    shifts = torch.arange(32, dtype=torch.int32, device=device)
    return ((packed[:, :, None] >> shifts) & 1).bool().flatten(1)[:, :count]


def read_resident_bytes() -> int:
    """Memory of this process. Reading /proc takes 3 us; getrusage reports the peak only."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * _PAGE_BYTES

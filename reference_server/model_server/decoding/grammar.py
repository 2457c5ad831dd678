"""Grammars in a batch: which tokens may come next in each row that has one, from its regex.

llguidance walks the regex's automaton over the bytes of the tokens and builds its states as they are met, so that
nothing waits for a compilation and a step's cost is bounded (grammars/regex_limits.py). docs/grammars.md says why it.
"""

import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from reference_server.errors import ValidationError
from reference_server.grammars.packages import missing_packages
from reference_server.grammars.pool import MAX_STEP_NS
from reference_server.tokenizer import FastTokenizer, Tokenizer

logger = logging.getLogger(__name__)

MAX_KEPT = 32
MAX_KEPT_BYTES = 256 << 20
#: A step that takes longer has built states, and so memory is asked for.
_BUILDING_NS = 1_000_000
_PAGE_BYTES = 4096
_WALKED_AT_ONCE = 64


class GrammarError(Exception):
    """A grammar cannot be enforced; the text says why."""


class Grammars:
    """The automata over one model's tokens. Those of the last regexes are kept, and shared by their sequences."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        eos_ids: Collection[int],
        resident_bytes: Callable[[], int] | None = None,
        clock_ns: Callable[[], int] = time.thread_time_ns,
    ) -> None:
        self.vocab_size = tokenizer.vocab_size
        self._tokenizer = tokenizer
        self._eos_ids = sorted(id_ for id_ in eos_ids if 0 <= id_ < tokenizer.vocab_size)
        self.clock_ns = clock_ns
        self._resident_bytes = resident_bytes or _resident_bytes
        self._slow: OrderedDict[str, None] = OrderedDict()
        self._engine: _Engine | None = None
        self._kept: OrderedDict[str, Automaton] = OrderedDict()

    def state(self, regex: str, passed: str = "") -> "GrammarState":
        """The start of a sequence, or where it stands behind the text `passed`.

        Never raises: what cannot be enforced fails its own row.
        """
        return GrammarState(self, regex, passed)

    def failed_state(self) -> "GrammarState":
        """Of a grammar that never became a regex."""
        return GrammarState(self, None)

    def prepare(self) -> None:
        """Lay out the tokens now, if grammars can be served at all: the first request should not wait for it."""
        try:
            self._loaded_engine()
        except GrammarError as error:
            logger.info("requests with a grammar are refused: %s", error)

    def automaton(self, regex: str) -> "Automaton":
        """Raises GrammarError for a regex that is none, or that has held up a batch before."""
        if regex in self._slow:
            raise GrammarError("it has taken too long before")
        kept = self._kept.get(regex)
        if kept is None:
            self._loaded_engine()
            started = self.clock_ns()
            kept = self.fresh_automaton(regex)
            if self.clock_ns() - started > MAX_STEP_NS:
                self.give_up(regex)
                raise GrammarError("its automaton takes too long to start")
            self._kept[regex] = kept
        self._kept.move_to_end(regex)
        while len(self._kept) > MAX_KEPT or (len(self._kept) > 1 and self._kept_bytes() > MAX_KEPT_BYTES):
            self._kept.popitem(last=False)
        return kept

    def fresh_automaton(self, regex: str) -> "Automaton":
        return Automaton(self._loaded_engine(), regex, self._resident_bytes)

    def ids_of(self, text: str) -> list[int]:
        """Tokens that are `text`, byte for byte. Raises GrammarError where none are."""
        return self._loaded_engine().ids_of(text) if text else []

    def forget(self, regex: str, automaton: "Automaton") -> None:
        """Keep an automaton no longer that has reached its limits."""
        if self._kept.get(regex) is automaton:
            del self._kept[regex]

    def give_up(self, regex: str) -> None:
        """Refuse a regex whose steps take too long, for as long as it is remembered."""
        self._kept.pop(regex, None)
        self._slow[regex] = None
        if len(self._slow) > MAX_KEPT:
            self._slow.popitem(last=False)

    def _kept_bytes(self) -> int:
        return sum(automaton.num_bytes for automaton in self._kept.values())

    def _loaded_engine(self) -> "_Engine":
        if self._engine is None:
            self._engine = _Engine(self._tokenizer, self._eos_ids)
        return self._engine


class _Engine:
    """llguidance with this model's tokens. Raises GrammarError where that cannot be."""

    def __init__(self, tokenizer: Tokenizer, eos_ids: list[int]) -> None:
        missing = missing_packages()
        if missing:
            raise GrammarError(f"{', '.join(missing)} of the `grammar` extra is missing")
        if not isinstance(tokenizer, FastTokenizer):
            raise GrammarError("the model has no tokenizer.json")
        if not eos_ids:
            raise GrammarError("the model has no end-of-sequence token")
        import llguidance

        from reference_server.grammars.regex_limits import check_size, parser_detail, parser_limits

        spelled = tokenizer.token_bytes()
        if spelled is None:
            raise GrammarError("its tokenizer joins tokens neither as bytes nor as SentencePiece does")
        self._vocabulary = _Vocabulary(tokenizer, spelled, eos_ids)
        self.tokens = llguidance.LLTokenizer(llguidance.TokenizerWrapper(self._vocabulary), eos_token=eos_ids)
        self._matcher = llguidance.LLMatcher
        self._limits = parser_limits()
        self._check_size = check_size
        self._detail = parser_detail

    def compile(self, regex: str) -> "llguidance.LLMatcher":  # type: ignore[name-defined] # noqa: F821
        try:
            # A peer's router may not have looked.
            self._check_size(regex)
        except ValidationError as error:
            raise GrammarError(error.detail) from error
        matcher = self._matcher(self.tokens, self._matcher.grammar_from_regex(regex), log_level=0, limits=self._limits)
        if matcher.is_error():
            raise GrammarError(self._detail(matcher.get_error()))
        return matcher

    def ids_of(self, text: str) -> list[int]:
        found: list[int] = self.tokens.greedy_tokenize(text)
        if not self._vocabulary.spells(found, text.encode()):
            # A word without all its letters among the tokens.
            found = self._vocabulary(text.encode())
            if not self._vocabulary.spells(found, text.encode()):
                raise GrammarError("no tokens are the text that it has let through")
        return found


class _Vocabulary:
    """Tokens as llguidance asks for them, and the tokenizing of text that a grammar forces."""

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
        """The tokenizer's own ids where they are this text and nothing else; the longest tokens where they are not."""
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
    """A regex's automaton as far as it is built; `num_bytes` is what building it has added to the process."""

    def __init__(self, engine: _Engine, regex: str, resident_bytes: Callable[[], int]) -> None:
        self._resident_bytes = resident_bytes
        self.num_bytes = 0
        before = resident_bytes()
        self.start = engine.compile(regex)
        self.num_bytes += max(0, resident_bytes() - before)

    def fill(self, matcher: "llguidance.LLMatcher", row: NDArray[np.int32], clock_ns: Callable[[], int]) -> int:  # type: ignore[name-defined] # noqa: F821
        """The tokens that may come next, a bit each, and how long that took.

        row: [ceil(vocab_size / 32)], the tokenizer's vocabulary.
        """
        before, started = self._resident_bytes(), clock_ns()
        matcher.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)
        spent_ns = clock_ns() - started
        if spent_ns > _BUILDING_NS:
            self.num_bytes += max(0, self._resident_bytes() - before)
        return spent_ns


class GrammarState:
    """Where one sequence stands in its grammar. It never raises: a state that has failed allows nothing any more."""

    def __init__(self, grammars: Grammars, regex: str | None, passed: str = "") -> None:
        self.num_words = -(-grammars.vocab_size // 32)
        self._grammars = grammars
        self._regex = regex or ""
        self._accepted: list[int] = []
        self._is_alone = False
        self._automaton: Automaton | None = None
        if regex is None:
            return
        try:
            self._accepted = grammars.ids_of(passed)
            self._automaton = grammars.automaton(regex)
        except GrammarError as error:
            logger.warning("a grammar cannot be enforced: %s", error)
            return
        self._matcher = self._automaton.start.deep_copy()
        if not self._walk(self._accepted):
            self._start_again()

    @property
    def must_end(self) -> bool:
        """Whether only an end-of-sequence token may come next."""
        return self._automaton is not None and self._matcher.is_stopped() and not self._matcher.is_error()

    def fill(self, row: NDArray[np.int32]) -> None:
        """The tokens that may come next, a bit each; none once the state has failed."""
        if self._automaton is not None:
            spent_ns = self._automaton.fill(self._matcher, row, self._grammars.clock_ns)
            if self._matcher.is_error():
                self._start_again()
                if self._automaton is not None:
                    spent_ns += self._automaton.fill(self._matcher, row, self._grammars.clock_ns)
            if spent_ns > MAX_STEP_NS:
                self._give_up(spent_ns)
        if self._automaton is None or self._matcher.is_error():
            row[:] = 0

    def accept(self, token_id: int) -> None:
        """`token_id` has been chosen."""
        self._accepted.append(token_id)
        if self._automaton is None or self._matcher.is_stopped():
            return
        if not self._walk([token_id]):
            self._start_again()

    def _walk(self, ids: Sequence[int]) -> bool:
        """Take `ids`, a few at a time: the others in the batch wait for it. False if they cannot be taken."""
        started = self._grammars.clock_ns()
        for first in range(0, len(ids), _WALKED_AT_ONCE):
            if not self._matcher.consume_tokens(ids[first : first + _WALKED_AT_ONCE]):
                return False
            spent_ns = self._grammars.clock_ns() - started
            if spent_ns > MAX_STEP_NS:
                self._give_up(spent_ns)
                break
        return True

    def _start_again(self) -> None:
        """Go on with an automaton of its own, once: others may have used up the limits of the one that they shared."""
        assert self._automaton is not None
        reason = self._matcher.get_error().partition("\n")[0]
        self._grammars.forget(self._regex, self._automaton)
        was_shared, self._is_alone = not self._is_alone, True
        self._automaton = self._grammars.fresh_automaton(self._regex) if was_shared else None
        if self._automaton is not None:
            self._matcher = self._automaton.start.deep_copy()
            if self._walk(self._accepted):
                return
        logger.warning("a grammar's state has failed: %s", reason)
        self._automaton = None

    def _give_up(self, spent_ns: int) -> None:
        """End this row, and refuse the regex from now on: the next step would hold up the batch again."""
        logger.warning("a grammar is given up: one step of its automaton took %d ms", spent_ns // 1_000_000)
        self._grammars.give_up(self._regex)
        self._automaton = None


class GrammarRows:
    """The rows of a batch that have a grammar.

    states: row -> where it stands. vocab_size: of the model's logits, which the tokenizer may exceed.
    """

    def __init__(
        self, states: Mapping[int, GrammarState], num_rows: int, vocab_size: int, device: torch.device
    ) -> None:
        self._states = states
        self._is_everywhere = len(states) == num_rows
        self._vocab_size = vocab_size
        self._device = device

    @classmethod
    def of(cls, states: Sequence[GrammarState | None], vocab_size: int, device: torch.device) -> "GrammarRows | None":
        """None where no row has one."""
        found = {row: state for row, state in enumerate(states) if state is not None}
        return cls(found, len(states), vocab_size, device) if found else None

    def allowed(self) -> NDArray[np.int32]:
        """A bit for each token that may come next: [rows with a grammar, words of 32]."""
        words = np.zeros((len(self._states), max(state.num_words for state in self._states.values())), dtype=np.int32)
        for row, state in zip(words, self._states.values(), strict=True):
            state.fill(row)
        return words

    def ending(self) -> set[int]:
        """The rows in which nothing but an end may come."""
        return {row for row, state in self._states.items() if state.must_end}

    def apply_(self, scores: Tensor, allowed: NDArray[np.int32]) -> None:
        """scores: [rows, vocab_size]; what is not allowed goes to -inf."""
        forbidden = ~_bits(allowed, self._vocab_size, self._device)
        if self._is_everywhere:
            scores.masked_fill_(forbidden, -torch.inf)
            return
        for row, each in zip(self._states, forbidden, strict=True):
            scores[row].masked_fill_(each, -torch.inf)


def _bits(words: NDArray[np.int32], count: int, device: torch.device) -> Tensor:
    """[rows, count] bool of [rows, words]."""
    if device.type == "cpu":
        bits = np.unpackbits(words.view(np.uint8), axis=1, count=count, bitorder="little")
        return torch.from_numpy(bits.view(np.bool_))
    # The packed words are a thirty-second of what would be copied.
    packed = torch.from_numpy(words).to(device, non_blocking=True)
    shifts = torch.arange(32, dtype=torch.int32, device=device)
    return ((packed[:, :, None] >> shifts) & 1).bool().flatten(1)[:, :count]


def _resident_bytes() -> int:
    """Of this process. /proc is read in 3 us; getrusage knows the peak only."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * _PAGE_BYTES

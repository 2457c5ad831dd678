"""The grammars of one model, cached, and the state of a sequence in its grammar: the tokens that may come next."""

import copy
import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence

import numpy as np
from numpy.typing import NDArray

from reference_server.grammars.pool import MAX_STEP_NS
from reference_server.messages import Grammar
from reference_server.model_server.decoding.grammar_engine import (
    Automaton,
    GrammarEngine,
    GrammarError,
    read_resident_bytes,
)
from reference_server.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

MAX_CACHED = 32
MAX_CACHED_BYTES = 256 << 20
_TOKENS_PER_CHECK = 64


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
        self._engine: GrammarEngine | None = None
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

    def _loaded_engine(self) -> "GrammarEngine":
        if self._engine is None:
            self._engine = GrammarEngine(self._tokenizer, self.eos_ids)
        return self._engine


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

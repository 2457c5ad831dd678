"""Measures the time of decode steps in the warm-up, with and without drafts, for the choice of draft lengths."""

import logging
import math
import random
import time
from collections.abc import Iterator
from collections.abc import Sequence as SequenceOf
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np

from reference_server.messages import ChooserParameters, Request, StoppingParameters
from reference_server.model_server.batch import SequenceBatch
from reference_server.model_server.decoding.detokenize import IncrementalDetokenizer
from reference_server.model_server.decoding.stopping import StoppingCriteria
from reference_server.model_server.distributed import RankGroup
from reference_server.model_server.drafting import MOST_VERIFIED_ROWS, Drafter
from reference_server.model_server.memory.kv_cache import blocks_for
from reference_server.model_server.sequence import Sequence
from reference_server.model_server.speculation.proposed_draft import NO_PROPOSAL, ProposedDraft
from reference_server.model_server.speculation.step_cost import StepCost, by_rows
from reference_server.model_server.stepper import RunAhead, Stepper
from reference_server.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

SIZES = (1, 2, 4, 8, 16, 32, 64, MOST_VERIFIED_ROWS)
BUDGET_S = 3.0
"""Time after which larger sizes are extrapolated instead of measured."""
REPEATS = 5
"""Steps of each kind; the fastest counts, because other work on the machine only adds time."""
FEW_KEYS, MANY_KEYS = 16, 256
ROWS, DRAFT = 4, 4
LOOKED_AT = (1, 8)
"""Numbers of sequences for which looks are measured."""
CALL_NS = 100e3
"""Time of a served step that the warm-up cannot measure: the reply, the router and the next call. It is added to the
time of every step. The part of this time that grows with each served token is not included: it is the same with and
without drafts, and a refused row does not have it."""
NEVER_PAYS = StepCost(tuple(1e9 * rows for rows in range(1, 1 + MOST_VERIFIED_ROWS)))
"""Each row costs as much as a step, so that no draft saves time."""
SAMPLED = ChooserParameters(temperature=0.7, top_k=50, top_p=0.95, seed=1)
MORE_PASSES, SHORT_NS = 4, 2e6
"""Number of further passes over the steps that take less than `SHORT_NS`: other work on the machine disturbs a pass,
but rarely all passes."""


class StepKind(NamedTuple):
    """A step to measure."""

    num_rows: int
    num_keys: int = FEW_KEYS
    num_drafted: int = 0
    parameters: ChooserParameters = ChooserParameters()


class LookSteps(NamedTuple):
    """The fastest times in ns of a step, of a look, and of a look with the step after it."""

    step_ns: float
    look_ns: float
    both_ns: float


class DraftCost:
    """Runs steps of its own sequences with `stepper`, in blocks that no request uses yet.

    longest: largest number of tokens of a request.
    """

    def __init__(
        self, stepper: Stepper, tokenizer: Tokenizer, group: RankGroup, num_blocks: int, block_size: int, longest: int
    ) -> None:
        self._stepper = stepper
        self._tokenizer = tokenizer
        self._group = group
        self._num_blocks = num_blocks
        self._block_size = block_size
        self._longest = longest

    def measure(self) -> StepCost:
        """Measure the cost. The result is the same on every rank."""
        drafter = self._stepper.drafter
        assert drafter is not None, "the cost of drafts without drafts"
        # Otherwise the device computes the next step during this time.
        is_served_between = self._stepper.run_ahead is not RunAhead.BEFORE_READ
        many_keys = min(MANY_KEYS, self._longest - REPEATS - 2)
        others = (
            StepKind(ROWS, many_keys),
            StepKind(ROWS, parameters=SAMPLED),
            StepKind(1, num_drafted=DRAFT),
            StepKind(ROWS, num_drafted=DRAFT),
        )
        with self._alone():
            by_size = self._by_size()
            kinds = [*map(StepKind, by_size), *others]
            times = [*by_size.values(), *map(self._time_ns, others)]
            looks = [self._look_times(drafter, size) for size in LOOKED_AT]
            for _ in range(MORE_PASSES):
                times = [
                    min(ns, self._time_ns(kind)) if ns < SHORT_NS else ns for kind, ns in zip(kinds, times, strict=True)
                ]
                looks = [
                    LookSteps(*map(min, found, self._look_times(drafter, size)))
                    for size, found in zip(LOOKED_AT, looks, strict=True)
                ]
        rows_ns = by_rows(dict(zip(by_size, times, strict=False)), MOST_VERIFIED_ROWS)
        proposal_ns = by_rows(
            {size: self._look_ns(found) for size, found in zip(LOOKED_AT, looks, strict=True)}, MOST_VERIFIED_ROWS
        )
        many, sampled, alone, together = times[len(by_size) :]
        few = rows_ns[ROWS - 1]
        key_ns = (many - few) / (ROWS * max(1, many_keys - FEW_KEYS))
        sampled_ns = (sampled - few) / ROWS
        alone -= rows_ns[DRAFT]
        together -= rows_ns[ROWS * (1 + DRAFT) - 1]
        row_ns = max(0.0, (together - alone) / (DRAFT * (ROWS - 1)))
        if is_served_between:
            rows_ns = tuple(ns + CALL_NS for ns in rows_ns)
        cost = StepCost(
            *(rows_ns, max(0.0, key_ns), max(0.0, alone - DRAFT * row_ns), row_ns),
            sampled_row_ns=max(0.0, sampled_ns),
            proposal_ns=proposal_ns,
        )
        logger.info(
            "a decode step takes %.2f ms with 1 row, %.2f with 8, %.2f with 32; drafts cost %.0f us, and %.0f a token; "
            "finding them takes %.0f us for 1 request, %.0f for 8",
            *(cost.plain_ns(size) / 1e6 for size in (1, 8, 32)),
            *(cost.drafts_ns / 1e3, cost.draft_row_ns / 1e3),
            *(cost.proposing_ns(size) / 1e3 for size in (1, 8)),
        )
        return cost

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """No run-ahead, and the drafts of this measurement only."""
        stepper = self._stepper
        kept = stepper.run_ahead, stepper.drafter
        stepper.run_ahead = RunAhead.OFF
        try:
            yield
        finally:
            stepper.run_ahead, stepper.drafter = kept

    def _by_size(self) -> dict[int, float]:
        started = time.perf_counter()
        measured: dict[int, float] = {}
        for size in SIZES:
            measured[size] = self._time_ns(StepKind(size))
            if not self._group.minimum(int(time.perf_counter() - started < BUDGET_S)):
                break
        return measured

    def _look_ns(self, found: "LookSteps") -> float:
        return float(self._group.minimum(int(max(found.look_ns, found.both_ns - found.step_ns))))

    def _look_times(self, drafter: Drafter, size: int) -> "LookSteps":
        """Measure steps with and without a look for drafts of this many sequences before them.

        Steps and looks share the caches of the processor. Heads that are read before every step are four times as fast
        as heads that are read rarely, and the step after them reads its own weights from memory.
        """
        # Steps without drafts produce the hidden states that draft heads read.
        self._stepper.drafter = Drafter(Nothing(), drafter.speculate)
        looking = Drafter(drafter.source, drafter.speculate)
        rows = tuple(self._sequence(row, FEW_KEYS, ChooserParameters()) for row in range(size))
        batch = SequenceBatch(0, rows, self._block_size)
        fastest = LookSteps(math.inf, math.inf, math.inf)
        for _ in range(1 + REPEATS):
            started = time.perf_counter_ns()
            batch = self._stepped(batch)
            looked = time.perf_counter_ns()
            with self._stepper.no_gradients():
                looking.look(rows, range(size), NEVER_PAYS)
            stepped = time.perf_counter_ns()
            batch = self._stepped(batch)
            # The first steps and the first look build data that the others reuse; they are the slowest.
            spent = looked - started, stepped - looked, time.perf_counter_ns() - looked
            fastest = LookSteps(*map(min, fastest, spent))
        return fastest

    def _stepped(self, batch: SequenceBatch) -> SequenceBatch:
        return self._stepper.step(batch).batch or batch

    def _time_ns(self, kind: StepKind) -> float:
        """The fastest of a few steps."""
        self._stepper.drafter = Drafter(Repetition(), kind.num_drafted) if kind.num_drafted else None
        rows = tuple(self._sequence(row, kind.num_keys, kind.parameters) for row in range(kind.num_rows))
        batch = SequenceBatch(0, rows, self._block_size)
        fastest = 0
        for repeat in range(1 + REPEATS):
            started = time.perf_counter_ns()
            output = self._stepper.step(batch)
            spent = time.perf_counter_ns() - started
            # The first step builds data that the others reuse.
            fastest = spent if repeat < 2 else min(fastest, spent)
            if output.batch is None:
                break
            batch = output.batch
        return float(self._group.minimum(fastest))

    def _sequence(self, row: int, num_keys: int, parameters: ChooserParameters) -> Sequence:
        stopping = StoppingParameters(self._longest)
        needed = blocks_for(num_keys + (1 + REPEATS) * (1 + DRAFT), self._block_size)
        first = row * needed
        return Sequence(
            request=Request(row, (), num_keys, parameters, stopping),
            # Few different ids, so that n-gram lookup finds matches and searches for longer ones.
            ids=random.Random(row).choices(range(1, 9), k=num_keys + 1),
            prompt_len=1,
            cache_len=num_keys,
            input_len=1,
            # Block 0 is reserved; a small cache is used several times over.
            blocks=1 + (first + np.arange(needed, dtype=np.int64)) % (self._num_blocks - 1),
            stopping=StoppingCriteria(stopping, frozenset()),
            detokenizer=IncrementalDetokenizer(self._tokenizer, [1]),
        )


class Nothing:
    """No drafts."""

    priors = (0.5,)

    def propose(self, sequences: SequenceOf[Sequence], _counts: SequenceOf[int], /) -> list[ProposedDraft]:
        return [NO_PROPOSAL] * len(sequences)


class Repetition:
    """Drafts of the first id, which the model rarely chooses."""

    priors = (0.5,)

    def propose(self, _sequences: SequenceOf[Sequence], counts: SequenceOf[int], /) -> list[ProposedDraft]:
        return [ProposedDraft([0] * count, [0] * count) for count in counts]

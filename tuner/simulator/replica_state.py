"""The state of a simulated server: its requests, the rows of its batches, the running stride, and totals."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from reference_server.router.scheduling.calls import Decode, Prefill
from reference_server.router.scheduling.queue import Entry
from reference_server.router.scheduling.step_work import StepWork
from tuner.simulator.drafting import DraftingRow
from tuner.simulator.step_law import steps_until, stride_ns
from tuner.simulator.step_ranges import RangeUse


@dataclass(slots=True, eq=False)
class Flight:
    """One request from its arrival to its end.

    ids: token ids of the prompt if prompts share prefixes, else None. declared_tokens: requested maximum.
    output_tokens: number of generated tokens. Times are ns of virtual time, -1 if unset. token_ns: arrival of every
    token, if gaps are recorded.
    """

    id: int
    input_tokens: int
    output_tokens: int
    declared_tokens: int
    ids: tuple[int, ...] | None = None
    intended_ns: int = 0
    sent_ns: int = 0
    started_ns: int = -1
    first_ns: int = -1
    end_ns: int = -1
    status: str = ""
    cached_tokens: int = 0
    generated: int = 0
    user: int = -1
    token_ns: list[int] = field(default_factory=list)
    adapter: str | None = None


@dataclass(slots=True, eq=False)
class ShardRow:
    """A sequence in the shard. `context`: tokens with K/V. `left`: tokens still to generate.

    ends_at: the decode step of its last token, if no draft is accepted until then. accepted: decode steps since
    `times_from` with accepted drafts, and how many tokens.
    """

    flight: Flight
    entry: Entry
    slots: int
    remaining_prefill: int
    next_chunk: int
    context: int
    left: int
    times_from: int = 0
    ends_at: int = 0
    has_ended: bool = False
    drafting: DraftingRow | None = None
    accepted: list[tuple[int, int]] = field(default_factory=list)


@dataclass(slots=True)
class Counts:
    """Totals of a replica: steps, events, tokens, and busy time.

    drafted, accepted: tokens of drafts. ranges: step time outside the measured sizes of steps.
    """

    prefills: int = 0
    decodes: int = 0
    events: int = 0
    prefill_ns: int = 0
    decode_ns: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    row_steps: int = 0
    kv_peak: int = 0
    drafted: int = 0
    accepted: int = 0
    ranges: RangeUse = field(default_factory=RangeUse)


@dataclass(slots=True)
class Stride:
    """The running step, or several decode steps as one. Each step takes `gain_ns` longer than the one before.

    drafts: the rows whose drafts the step verifies, with their lengths. ended_ns: additional time of the first step,
    because requests ended with the step before it.
    """

    call: Prefill | Decode
    work: StepWork
    started_ns: int
    first_ns: float
    gain_ns: float = 0.0
    steps: int = 1
    waiting: int = 0
    cause: str = ""
    drafts: list[tuple[ShardRow, int]] = field(default_factory=list)
    ended_ns: float = 0.0

    def end_ns_of(self, steps: int) -> int:
        """The end of the first `steps` steps."""
        return self.started_ns + round(self.ended_ns + stride_ns(self.first_ns, self.gain_ns, steps))

    def steps_until(self, due_ns: int) -> int:
        """Smallest number of its steps that end at or after a time."""
        passed_ns = max(0, due_ns - self.started_ns - round(self.ended_ns))
        return steps_until(self.first_ns, self.gain_ns, passed_ns, self.steps)


def prompt_work(rows: Iterable[ShardRow]) -> tuple[int, int, int, int]:
    """Prompts, tokens, squares and cached tokens of the chunks of rows, in the order of `StepWork`."""
    prompts = tokens = squares = cached = 0
    for row in rows:
        if row.remaining_prefill:
            after = row.context + row.next_chunk
            prompts += 1
            tokens += row.next_chunk
            squares += after * after - row.context * row.context
            cached += row.context
    return prompts, tokens, squares, cached

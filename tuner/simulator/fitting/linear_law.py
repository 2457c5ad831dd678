"""The step law of a measured server: the time of a step, linear in its work.

prefill  c0 + c1·prompts + c2·tokens + c3·squares + c4·cached
decode   d0 + d1·rows + d2·padded rows in a graph + d3 without a graph + d4·kv (+ d5 + d6·drafted, with drafts)
adapters a0·LoRA adapters + a1·tokens that use one, in a step of any kind
ended    e0·requests that ended with the step before, in a step of any kind

A step with both phases has the sum of both laws without d0. d4 also counts the keys of a drafted token, as many as its
row has. Coefficients are not negative. The fit minimizes the relative error of the wall time, which is the time between
the answers to two consecutive steps.
"""

from dataclasses import dataclass

from reference_server.router.scheduling.step_work import StepWork
from tuner.simulator.step_ranges import StepRanges

PREFILL = ("prefill", "prompts", "tokens", "squares", "cached")
DECODE = ("decode", "rows", "padded_rows", "no_graph", "kv")
DRAFTS = ("drafts", "drafted")
ADAPTERS = ("adapters", "adapted")
ENDED = ("ended",)
COLUMNS = PREFILL + DECODE + DRAFTS + ADAPTERS + ENDED
ENDED_PLACE = COLUMNS.index("ended")


@dataclass(frozen=True, slots=True)
class LinearLaw:
    """A `StepLaw`. `coefficients`: ns in the order of `COLUMNS`; those after `kv` may be left out.

    graph_sizes: captured batch sizes, ascending. ranges: the measured sizes of steps; None if they are unknown.
    """

    coefficients: tuple[float, ...]
    graph_sizes: tuple[int, ...] = ()
    ranges: StepRanges | None = None

    @property
    def kv_ns(self) -> float:
        return self.coefficients[9]

    @property
    def draft_ns(self) -> tuple[float, float]:
        """Time of drafts in a step, and of each of their tokens without its keys."""
        drafts_ns, drafted_ns = (*self.coefficients[10:], 0.0, 0.0)[:2]
        return drafts_ns, drafted_ns

    @property
    def has_adapters(self) -> bool:
        """Whether the time of adapters is known."""
        return any(self.coefficients[12:14])

    def adapters_ns(self, adapters: int, tokens: int) -> float:
        """Time that adapters add to a step with `tokens` tokens that use one."""
        each_ns, token_ns = (*self.coefficients[12:14], 0.0, 0.0)[:2]
        return each_ns * adapters + token_ns * tokens

    def step_ns(self, work: StepWork) -> float:
        prompts, tokens, squares, cached, rows, kv, ended = work
        c = self.coefficients
        time_ns = 0.0
        if prompts:
            time_ns = c[0] + c[1] * prompts + c[2] * tokens + c[3] * squares + c[4] * cached
        elif rows:
            time_ns = c[5]
        if rows:
            padded = next((size for size in self.graph_sizes if size >= rows), 0)
            time_ns += c[6] * rows + (c[7] * padded if padded else c[8]) + c[9] * kv
        if ended and len(c) > ENDED_PLACE:
            time_ns += c[ENDED_PLACE] * ended
        return time_ns

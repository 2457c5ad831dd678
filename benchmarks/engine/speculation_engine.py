"""One engine whose drafts are switched between measurements, so that all of them use the same weights and memory."""

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from benchmarks.engine.speculation_texts import NEW_TOKENS, PROMPT_TOKENS, prompts
from reference_server.messages import Batch, Request, StepResult, StoppingParameters, WarmupRequest
from reference_server.model_server.calls.local_shard import LocalShard
from reference_server.model_server.draft_heads.source import HeadsSource
from reference_server.model_server.drafting import Drafter
from reference_server.model_server.options import EngineOptions
from reference_server.presets.catalog import PREFIX

TRAINED = ("preset:tiny-llama", "preset:tiny-llama-medusa")
MOST_PLACES = 8


@dataclass(frozen=True)
class Arm:
    """A way to decode: the most tokens of a draft, and whether drafts are adapted.

    number: of two arms without drafts, whose ratio shows the resolution of the benchmark.
    """

    speculate: int = 0
    is_adaptive: bool = True
    number: int = 1

    @property
    def name(self) -> str:
        if not self.speculate:
            return "no drafts" if self.number == 1 else "no drafts again"
        return f"N={self.speculate} {'adaptive' if self.is_adaptive else 'fixed'}"


PLAIN = Arm()
AGAIN = Arm(number=2)


@dataclass
class MeasuredDrafts:
    """One arm on one text at one batch size. source: of the drafts. new_tokens: of each request.

    requests: all that were generated. differing: those whose ids are not the ids of plain decoding.
    """

    model: str
    text: str
    concurrency: int
    arm: str
    source: str = "n-grams"
    new_tokens: int = NEW_TOKENS
    tokens_per_s: list[float] = field(default_factory=list)
    tokens_per_cpu_s: list[float] = field(default_factory=list)
    requests: int = 0
    differing: int = 0
    steps: int = 0
    tokens: int = 0
    proposed: list[int] = field(default_factory=lambda: [0] * MOST_PLACES)
    accepted: list[int] = field(default_factory=lambda: [0] * MOST_PLACES)

    def add(self, result: StepResult) -> None:
        self.steps += len(result.generations)
        self.tokens += sum(len(generation.tokens) for generation in result.generations)
        for place, (proposed, accepted) in enumerate(zip(result.drafts.proposed, result.drafts.accepted, strict=True)):
            self.proposed[place] += proposed
            self.accepted[place] += accepted


class SwitchedEngine:
    """An engine after its warm-up, which has measured the price of drafts once for all arms."""

    def __init__(self, shard: LocalShard) -> None:
        self._shard = shard
        drafter = shard.engine.stepper.drafter
        assert drafter is not None, "an engine without drafts"
        self._source, self._cost, self._clock = drafter.source, drafter.cost, drafter.clock

    @classmethod
    async def load(cls, model: str, speculate: int) -> "SwitchedEngine":
        """speculate: the most tokens of a draft of any arm."""
        shard = LocalShard.load(
            EngineOptions(
                model,
                load_format="dummy" if model.startswith(PREFIX) and model not in TRAINED else "auto",
                cpu_memory_gib=1.0,
                compute_threads=1,
                speculate=speculate,
            )
        )
        request = replace(next(prompts("free", 1, seed=0)), truncate=1024)
        await shard.warmup(WarmupRequest(Batch(0, (request,)), 2048, max_total_tokens=1024))
        return cls(shard)

    @property
    def source(self) -> str:
        """Of the drafts. A server with draft heads has no n-grams."""
        return "heads alone" if isinstance(self._source, HeadsSource) else "n-grams"

    def drafter(self, arm: Arm) -> Drafter | None:
        """A new one. None decodes as a server without drafts: no looks, no histories, no kept hidden states."""
        if not arm.speculate:
            return None
        made = Drafter(self._source, arm.speculate, self._shard.engine.model.longest_prefix, self._clock)
        if arm.is_adaptive:
            made.cost = self._cost
        return made

    async def with_prompts(self, requests: Iterable[Request]) -> list[Request]:
        """Compute all prompts once, and give each request its blocks. Each run then computes the last block only.

        The prefill is not measured, and takes longer than the decode steps of a large model.
        """
        engine = self._shard.engine
        size, tokenizer = engine.info.block_size, engine.intake.tokenizer
        made = []
        for row, request in enumerate(requests):
            num_slots = PROMPT_TOKENS + request.stopping.max_new_tokens + MOST_PLACES
            needed = -(-num_slots // size)
            blocks = tuple(range(1 + row * needed, 1 + (1 + row) * needed))
            made.append(replace(request, blocks=blocks, num_slots=needed * size))
        engine.stepper.drafter = None
        first = [replace(request, stopping=StoppingParameters(1)) for request in made]
        result = await self._shard.prefill(Batch(1, tuple(first)))
        assert result.batch is None, "a request of one token goes on"
        lengths = [min(request.truncate, len(tokenizer.encode(request.text, True))) for request in made]
        return [
            replace(request, cache_len=(length - 1) // size * size)
            for request, length in zip(made, lengths, strict=True)
        ]

    async def run(
        self, drafter: Drafter | None, requests: Sequence[Request], measured: MeasuredDrafts | None
    ) -> dict[int, list[int]]:
        """Generate all requests as one batch, measured until the first one ends; returns each one's ids."""
        shard = self._shard
        # The last batch has ended, so no step is in progress.
        shard.engine.stepper.drafter = drafter
        ids: dict[int, list[int]] = {request.id: [] for request in requests}
        result = await shard.prefill(Batch(1, tuple(requests)))
        started, cpu_started = time.perf_counter(), time.process_time()
        num_first = sum(len(generation.tokens) for generation in result.generations)
        is_full = True
        while True:
            for generation in result.generations:
                ids[generation.request_id].extend(generation.tokens.ids)
            if is_full and any(generation.generated_text is not None for generation in result.generations):
                is_full = False
                if measured is not None:
                    tokens = sum(map(len, ids.values())) - num_first
                    measured.tokens_per_s.append(tokens / (time.perf_counter() - started))
                    measured.tokens_per_cpu_s.append(tokens / (time.process_time() - cpu_started))
            if result.batch is None:
                return ids
            result = await shard.decode([result.batch])
            if is_full and measured is not None:
                measured.add(result)

    def close(self) -> None:
        self._shard.close()

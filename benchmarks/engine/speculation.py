"""Compare decoding with and without drafts, for several draft lengths, texts and batch sizes.

    python -m benchmarks.engine.speculation [--models preset:tiny-llama ...] [--speculate 0 2 4 8] [--fixed 4]
                                            [--concurrency 1 8 32] [--minutes 3 3 6] [--interval 0.015] [--json FILE]

All engines are in this process, with one compute thread, and only one works at a time. A round measures every engine on
one text at one batch size; each round starts with another engine, and the first one does not count. After ten rounds of
each text and batch size, the next round is for the one with the widest interval, until all intervals are narrow or the
time is over.
One measurement: C prompts of 64 tokens are prefilled together, then decoded, end-of-sequence ignored, until the first
of them has 96 new tokens; tokens/s of these decodes, so that all C requests run all the time. Tokens per second of
processor time of this process are measured too: other programs on the machine change them less. Every engine must
return the same ids as the engine without drafts. A speculator is compared with its base model without heads, and N is
at most the number of heads.

    copy   a passage, and the start of the same passage again; greedy
    code   calls and records of one form; greedy
    free   other text, sampled at temperature 1

`adaptive` is the default of `--speculate N`; `fixed` drafts N tokens whenever a draft is found. The table has the
medians of the ratios to N = 0 in the same round with their 95 % intervals (order statistics), by time and by processor
time, the share of drafted tokens that was accepted, and tokens for each sequence and step.
"""

import argparse
import asyncio
import itertools
import json
import math
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from benchmarks.engine.in_process import machine
from reference_server.messages import (
    Batch,
    ChooserParameters,
    Request,
    StepResult,
    StoppingParameters,
    WarmupRequest,
)
from reference_server.model_server.calls.local_shard import LocalShard
from reference_server.model_server.draft_heads.heads import num_drafted
from reference_server.model_server.models import loader
from reference_server.model_server.options import EngineOptions
from reference_server.presets.catalog import CALIBRATION_TEXT, PREFIX

TRAINED = ("preset:tiny-llama", "preset:tiny-llama-medusa")
PROMPT_TOKENS = 64
NEW_TOKENS = 96
FEWEST_ROUNDS = 10
"""Least number of rounds of each text and batch size."""
GREEDY = ChooserParameters()
CODE = """
def area(shape):
    if shape.kind == "{0}":
        return shape.width * shape.height
records = [
    {{"name": "{0}", "width": 10, "height": 20}},
    {{"name": "{0}", "width": 11, "height": 21}},
    {{"name": "{0}", "width": 12, "height": 22}},
"""


@dataclass(frozen=True)
class Contender:
    """An engine: the tokens of its drafts, and whether it adapts them."""

    speculate: int
    is_adaptive: bool = True

    @property
    def name(self) -> str:
        if not self.speculate:
            return "no drafts"
        return f"N={self.speculate} {'adaptive' if self.is_adaptive else 'fixed'}"


@dataclass
class MeasuredDrafts:
    """One engine on one text at one batch size. places: of a draft's tokens, from the first on."""

    model: str
    text: str
    concurrency: int
    contender: str
    tokens_per_s: list[float] = field(default_factory=list)
    tokens_per_cpu_s: list[float] = field(default_factory=list)
    steps: int = 0
    tokens: int = 0
    proposed: list[int] = field(default_factory=lambda: [0] * 8)
    accepted: list[int] = field(default_factory=lambda: [0] * 8)

    def add(self, result: StepResult) -> None:
        self.steps += len(result.generations)
        self.tokens += sum(len(generation.tokens) for generation in result.generations)
        for place, (proposed, accepted) in enumerate(zip(result.drafts.proposed, result.drafts.accepted, strict=True)):
            self.proposed[place] += proposed
            self.accepted[place] += accepted


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--models", nargs="+", default=["preset:tiny-llama", "preset:tiny-llama-medusa", "preset:llama-125m"]
    )
    parser.add_argument("--speculate", nargs="+", type=int, default=[0, 2, 4, 8])
    parser.add_argument("--fixed", nargs="*", type=int, default=[4])
    parser.add_argument("--texts", nargs="+", choices=["copy", "code", "free"], default=["copy", "code", "free"])
    parser.add_argument("--concurrency", nargs="+", type=int, default=[1, 8, 32])
    parser.add_argument("--minutes", nargs="+", type=float, default=[3.0, 3.0, 6.0], help="of each model")
    parser.add_argument(
        "--interval", type=float, default=0.015, help="half the width of a narrow interval of a ratio in processor time"
    )
    parser.add_argument("--json", type=Path, help="also write the measurements here")
    args = parser.parse_args()
    if len(args.minutes) not in (1, len(args.models)):
        parser.error("give --minutes once, or for each of --models")
    measured: list[MeasuredDrafts] = []
    for model, minutes in zip(args.models, itertools.cycle(args.minutes), strict=False):
        contenders = contenders_of(model, args.speculate, args.fixed)
        measured += asyncio.run(compare(model, contenders, args.texts, args.concurrency, minutes, args.interval))
        print(table([each for each in measured if each.model == model]), flush=True)
    if args.json:
        rows = [asdict(each) for each in measured]
        args.json.write_text(json.dumps({"machine": machine(), "measured": rows}, indent=1))


def contenders_of(model: str, speculate: Sequence[int], fixed: Sequence[int]) -> list[Contender]:
    """The engines of a model; first the one without drafts."""
    directory = loader.locate(EngineOptions(model)).speculator
    most = num_drafted(directory, None) or max(*speculate, *fixed)
    adaptive = [Contender(count) for count in speculate if 0 < count <= most]
    return [Contender(0), *adaptive, *(Contender(count, False) for count in fixed if count <= most)]


async def compare(
    model: str,
    contenders: Sequence[Contender],
    texts: Sequence[str],
    concurrency: Sequence[int],
    minutes: float,
    narrow: float,
) -> list[MeasuredDrafts]:
    """At least one round of each text and batch size after the first."""
    shards = [await loaded(model, contender) for contender in contenders]
    cells = {
        (text, rows): [MeasuredDrafts(model, text, rows, contender.name) for contender in contenders]
        for text, rows in itertools.product(texts, concurrency)
    }
    started = time.monotonic()
    rounds = dict.fromkeys(cells, 0)
    while (cell := next_cell(cells, rounds, narrow)) is not None:
        if rounds[cell] > 1 and time.monotonic() > started + 60 * minutes:
            break
        (text, rows), found, round_ = cell, cells[cell], rounds[cell]
        requests = list(prompts(text, rows, seed=round_))
        order = [(round_ + place) % len(shards) for place in range(len(shards))]
        ids = {place: await run(shards[place], requests, found[place], round_ > 0) for place in order}
        assert all(ids[place] == ids[0] for place in order), f"drafts have changed an output: {text}, {rows}"
        rounds[cell] += 1
    print(f"{model}: {sum(rounds.values())} rounds in {time.monotonic() - started:.0f} s", file=sys.stderr)
    for shard in shards:
        shard.close()
    return [each for found in cells.values() for each in found]


def next_cell(
    cells: Mapping[tuple[str, int], Sequence[MeasuredDrafts]], rounds: Mapping[tuple[str, int], int], narrow: float
) -> tuple[str, int] | None:
    """The text and batch size to measure next: with the fewest rounds, then the widest interval; None if all are
    narrow."""
    fewest = min(cells, key=lambda cell: rounds[cell])
    if rounds[fewest] <= FEWEST_ROUNDS:
        return fewest
    widths = {cell: max(half_width(each, found[0]) for each in found[1:]) for cell, found in cells.items()}
    widest = max(cells, key=lambda cell: widths[cell])
    return widest if widths[widest] > narrow else None


def half_width(measured: MeasuredDrafts, plain: MeasuredDrafts) -> float:
    """Of the interval of the ratio in processor time."""
    low, high = interval(ratios(measured.tokens_per_cpu_s, plain.tokens_per_cpu_s))
    return (high - low) / 2


async def loaded(model: str, contender: Contender) -> LocalShard:
    """An engine; that of a speculator without drafts has no heads and keeps no hidden states."""
    shard = LocalShard.load(
        EngineOptions(
            model,
            load_format="dummy" if model.startswith(PREFIX) and model not in TRAINED else "auto",
            cpu_memory_gib=1.0,
            compute_threads=1,
            speculate=contender.speculate,
            speculate_adaptive=contender.is_adaptive,
        )
    )
    request = replace(next(prompts("free", 1, seed=0)), truncate=1024)
    await shard.warmup(WarmupRequest(Batch(0, (request,)), 2048, max_total_tokens=1024))
    return shard


def prompts(text: str, count: int, seed: int) -> Iterator[Request]:
    """Requests of one kind of text, different for every seed."""
    passages = CALIBRATION_TEXT.read_text().split("\n\n")
    stopping = StoppingParameters(NEW_TOKENS, ignore_eos_token=True)
    for number in range(count):
        passage = passages[(seed * 37 + number * 5) % len(passages)]
        words = passage.split()
        parameters = GREEDY
        match text:
            case "copy":
                prompt = " ".join([*words[:40], "\n", *words[:8]])
            case "code":
                prompt = CODE.format(words[seed % len(words)])
            case _:
                prompt = " ".join(words[:60])
                parameters = ChooserParameters(do_sample=True, seed=1000 * seed + number)
        yield Request(number, (prompt,), PROMPT_TOKENS, parameters, stopping)


async def run(
    shard: LocalShard, requests: Sequence[Request], measured: MeasuredDrafts, counts: bool
) -> dict[int, list[int]]:
    """Generate all requests as one batch; returns each one's ids."""
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
            if counts:
                tokens = sum(map(len, ids.values())) - num_first
                measured.tokens_per_s.append(tokens / (time.perf_counter() - started))
                measured.tokens_per_cpu_s.append(tokens / (time.process_time() - cpu_started))
        if result.batch is None:
            return ids
        result = await shard.decode([result.batch])
        if is_full and counts:
            measured.add(result)


def table(measured: Sequence[MeasuredDrafts]) -> str:
    lines = [f"\n{measured[0].model}; {machine()}; medians and 95 % intervals"]
    plain = {(each.text, each.concurrency): each for each in measured if each.contender == "no drafts"}
    for each in measured:
        base = plain.get((each.text, each.concurrency), each)
        by_time = ratio(each.tokens_per_s, base.tokens_per_s)
        by_cpu = ratio(each.tokens_per_cpu_s, base.tokens_per_cpu_s)
        proposed, accepted = sum(each.proposed), sum(each.accepted)
        share = f"{accepted / proposed:4.0%} of {proposed} accepted" if proposed else "no drafts verified"
        lines.append(
            f"  {each.text:<5} C={each.concurrency:<3} {each.contender:<13}"
            f"{statistics.median(each.tokens_per_s):>9.1f} tok/s"
            f"  x {by_time}, cpu x {by_cpu}"
            f"  {each.tokens / max(1, each.steps):.2f} a step, {share}, {len(each.tokens_per_s)} rounds"
        )
    return "\n".join(lines)


def ratio(own: Sequence[float], others: Sequence[float]) -> str:
    found = ratios(own, others)
    low, high = interval(found)
    return f"{statistics.median(found):.3f} ({low:.3f} - {high:.3f})"


def ratios(own: Sequence[float], others: Sequence[float]) -> list[float]:
    return [mine / other for mine, other in zip(own, others, strict=True)]


def interval(values: Sequence[float]) -> tuple[float, float]:
    """The 95 % interval of the median, by order statistics (Conover, Practical Nonparametric Statistics, 3.2).

    >>> interval(range(1, 101))
    (41, 60)
    """
    ordered = sorted(values)
    below = max(0, math.floor(len(ordered) / 2 - 0.98 * math.sqrt(len(ordered))))
    return ordered[below], ordered[-1 - below]


if __name__ == "__main__":
    main()

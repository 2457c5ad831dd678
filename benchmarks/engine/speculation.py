"""Compare decoding with and without drafts, for several draft lengths, texts and batch sizes.

    python -m benchmarks.engine.speculation [--models preset:tiny-llama ...] [--speculate 4] [--fixed 4]
                                            [--concurrency 1 8 32] [--new-tokens 96] [--minutes 4.5] [--interval 0.01]
                                            [--json FILE]

One engine of each model decodes with and without drafts in turn: two engines with equal settings differ by up to
10 %, because their weights and caches are at other addresses. `no drafts` is plain decoding, and `no drafts again` is
the same once more: its ratio is the resolution of this benchmark. All arms have the same prompts and one compute
thread, and return the same ids but for rounding. A round measures every arm on one text at one batch size; each round
starts with another arm, and the first one does not count. After ten rounds of each text and batch size, every other
round is for the one with the fewest rounds and the others for the one with the widest interval, until all intervals
are narrow, the time is over, or the process is interrupted or terminated: it then ends after the round and writes its
results so far.
One measurement: C prompts of at most 64 tokens, whose K/V were computed before the round, are decoded together,
end-of-sequence ignored, until the first of them has its new tokens; tokens/s of these decodes, so that all C requests
run all the time. Tokens per second of processor time of this process are measured too: other programs on the machine
change them less. A speculator drafts with its heads alone, any other model with n-grams: there are no arms with both,
as the server has none. N is at most the number of heads. Drafts learn from the requests of the same text and batch
size only.

    copy   a passage, and the start of the same passage again; greedy
    code   calls and records of one form; greedy
    free   other text, sampled at temperature 1

`adaptive` is the default of `--speculate N`; `fixed` drafts N tokens whenever a draft is found. The table has the
medians of the ratios to `no drafts` in the same round with their 95 % intervals (order statistics), by time and by
processor time, the share of drafted tokens that was accepted, and tokens for each sequence and step.

FILE keeps what earlier runs on a like machine measured for other models, texts and batch sizes.
"""

import argparse
import asyncio
import itertools
import json
import math
import signal
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from threading import Event

from benchmarks.engine.in_process import machine
from benchmarks.engine.speculation_engine import AGAIN, MOST_PLACES, PLAIN, Arm, MeasuredDrafts, SwitchedEngine
from benchmarks.engine.speculation_texts import NEW_TOKENS, TEXTS, prompts
from reference_server.model_server.draft_heads.heads import num_drafted
from reference_server.model_server.models import loader
from reference_server.model_server.options import EngineOptions

FEWEST_ROUNDS = 10
"""Least number of rounds of each text and batch size."""
MOST_DIFFERING = 0.05
"""Largest share of requests with drafts whose ids may differ from those of plain decoding. Where products are not the
same bits for every number of rows (float32), one sampled token in some thousands differs by rounding, and with it the
rest of its request: 1 request of 48 was measured."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", default=["preset:tiny-llama", "preset:tiny-llama-medusa"])
    parser.add_argument(
        "--speculate", nargs="*", type=int, choices=range(1, 1 + MOST_PLACES), default=[4], help="N of adaptive drafts"
    )
    parser.add_argument(
        "--fixed", nargs="*", type=int, choices=range(1, 1 + MOST_PLACES), default=[4], help="N of fixed drafts"
    )
    parser.add_argument("--texts", nargs="+", choices=TEXTS, default=TEXTS)
    parser.add_argument("--concurrency", nargs="+", type=int, default=[1, 8, 32])
    parser.add_argument("--new-tokens", type=int, default=NEW_TOKENS, help="of each request; fewer for a slow model")
    parser.add_argument("--minutes", nargs="+", type=float, default=[4.5], help="of each model")
    parser.add_argument(
        "--interval", type=float, default=0.01, help="half the width of a narrow interval of a ratio in processor time"
    )
    parser.add_argument("--json", type=Path, help="also write the measurements here")
    args = parser.parse_args()
    if len(args.minutes) not in (1, len(args.models)):
        parser.error("give --minutes once, or for each of --models")
    if args.json and (other := other_machine(args.json)):
        parser.error(f"{args.json} is of another machine ({other}; this one: {machine()}): give a new file")
    if not args.speculate and not args.fixed:
        parser.error("--speculate and --fixed are both empty: give an N for one of them")
    interrupted = Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: interrupted.set())
    measured: list[MeasuredDrafts] = []
    for model, minutes in zip(args.models, itertools.cycle(args.minutes), strict=False):
        arms = arms_of(model, args.speculate, args.fixed)
        plan = Plan(args.texts, args.concurrency, minutes, args.interval, args.new_tokens, interrupted)
        found = asyncio.run(compare(model, arms, plan))
        measured += found
        if found:
            print(table(found), flush=True)
        if args.json and measured:
            write(args.json, measured)
        if (share := differing_share(found)) > MOST_DIFFERING:
            sys.exit(
                f"{model}: {share:.0%} of the requests with drafts have other ids than without: more than rounding"
            )
        if interrupted.is_set():
            sys.exit(130)


def other_machine(file: Path) -> str | None:
    """The machine of a file of results, if it is not this one."""
    stored = json.loads(file.read_text())["machine"] if file.is_file() else machine()
    return None if stored == machine() else stored


def write(file: Path, measured: Sequence[MeasuredDrafts]) -> None:
    """Replace the cells of `measured` in a file of results, which may be new."""
    cells = {(each.model, each.text, each.concurrency) for each in measured}
    stored = json.loads(file.read_text())["measured"] if file.is_file() else []
    rows = [each for each in stored if (each["model"], each["text"], each["concurrency"]) not in cells]
    rows += [asdict(each) for each in measured]
    file.write_text(json.dumps({"machine": machine(), "measured": rows}, indent=1) + "\n")


def arms_of(model: str, speculate: Sequence[int], fixed: Sequence[int]) -> list[Arm]:
    """The arms of a model; first the two without drafts."""
    most = num_drafted(loader.locate(EngineOptions(model)).speculator, None) or max(*speculate, *fixed, 0)
    adaptive = [Arm(count) for count in speculate if count <= most]
    return [PLAIN, AGAIN, *adaptive, *(Arm(count, is_adaptive=False) for count in fixed if count <= most)]


@dataclass(frozen=True)
class Plan:
    """The texts and batch sizes of a model, and when it ends. narrow: half the width of a narrow interval."""

    texts: Sequence[str]
    concurrency: Sequence[int]
    minutes: float
    narrow: float
    new_tokens: int = NEW_TOKENS
    interrupted: Event = field(default_factory=Event)


async def compare(model: str, arms: Sequence[Arm], plan: Plan) -> list[MeasuredDrafts]:
    """At least one round of each text and batch size after the first; fewer if the process is interrupted.

    Texts and batch sizes without a round are left out.
    """
    started = time.monotonic()
    engine = await SwitchedEngine.load(model, max(arm.speculate for arm in arms))
    cells = {
        (text, rows): [MeasuredDrafts(model, text, rows, arm.name, engine.source, plan.new_tokens) for arm in arms]
        for text, rows in itertools.product(plan.texts, plan.concurrency)
    }
    drafters = {cell: [engine.drafter(arm) for arm in arms] for cell in cells}
    rounds = dict.fromkeys(cells, 0)
    while not plan.interrupted.is_set() and (cell := next_cell(cells, rounds, plan.narrow)) is not None:
        round_ = rounds[cell]
        if round_ > 1 and time.monotonic() > started + 60 * plan.minutes:
            break
        requests = await engine.with_prompts(prompts(*cell, seed=round_, new_tokens=plan.new_tokens))
        ids = {}
        for place in ((round_ + number) % len(arms) for number in range(len(arms))):
            measured = cells[cell][place] if round_ else None
            ids[place] = await engine.run(drafters[cell][place], requests, measured)
        for place, own in ids.items():
            cells[cell][place].requests += len(own)
            cells[cell][place].differing += sum(own[id_] != plain for id_, plain in ids[0].items())
        rounds[cell] += 1
    print(f"{model}: {sum(rounds.values())} rounds in {time.monotonic() - started:.0f} s", file=sys.stderr)
    engine.close()
    return [each for cell, found in cells.items() if rounds[cell] > 1 for each in found]


def next_cell(
    cells: Mapping[tuple[str, int], Sequence[MeasuredDrafts]], rounds: Mapping[tuple[str, int], int], narrow: float
) -> tuple[str, int] | None:
    """The text and batch size to measure next: with the fewest rounds and with the widest interval in turn; None if all
    are narrow."""
    fewest = min(cells, key=lambda cell: rounds[cell])
    if rounds[fewest] <= FEWEST_ROUNDS:
        return fewest
    widths = {cell: max(half_width(each, found[0]) for each in found[1:]) for cell, found in cells.items()}
    widest = max(cells, key=lambda cell: widths[cell])
    if widths[widest] <= narrow:
        return None
    return fewest if sum(rounds.values()) % 2 else widest


def half_width(measured: MeasuredDrafts, plain: MeasuredDrafts) -> float:
    """Of the interval of the ratio in processor time."""
    low, high = interval(ratios(measured.tokens_per_cpu_s, plain.tokens_per_cpu_s))
    return (high - low) / 2


def differing_share(measured: Sequence[MeasuredDrafts]) -> float:
    """Of the requests of all arms but plain decoding, those with other ids."""
    others = [each for each in measured if each.arm != PLAIN.name]
    return sum(each.differing for each in others) / max(1, sum(each.requests for each in others))


def table(measured: Sequence[MeasuredDrafts]) -> str:
    lines = [f"\n{measured[0].model} (drafts from {measured[0].source}); {machine()}; medians and 95 % intervals"]
    plain = {(each.text, each.concurrency): each for each in measured if each.arm == PLAIN.name}
    for each in measured:
        base = plain[each.text, each.concurrency]
        by_time = ratio(each.tokens_per_s, base.tokens_per_s)
        by_cpu = ratio(each.tokens_per_cpu_s, base.tokens_per_cpu_s)
        proposed, accepted = sum(each.proposed), sum(each.accepted)
        share = f"{accepted / proposed:4.0%} of {proposed} accepted" if proposed else "no drafts verified"
        lines.append(
            f"  {each.text:<5} C={each.concurrency:<3} {each.arm:<15}"
            f"{statistics.median(each.tokens_per_s):>9.1f} tok/s"
            f"  x {by_time}, cpu x {by_cpu}"
            f"  {each.tokens / max(1, each.steps):.2f} a step, {share}, {len(each.tokens_per_s)} rounds"
            f"{f', {each.differing} of {each.requests} requests differ' if each.differing else ''}"
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

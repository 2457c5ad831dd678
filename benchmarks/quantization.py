"""What each quantization method costs and gives on this device.

    python -m benchmarks.quantization [--quick] [--model-id preset:llama-125m] [--methods none gptq ...] [--json FILE]

One row a method: tokens/s of one sequence and of eight, time to the first token of a prompt of 128, memory of the
weights, and how far the model's predictions on a fixed text move: perplexity, and the mean KL divergence per token
from the plain weights' in the same compute type. Every method is measured in turns with the plain model, in as many as
`--rounds` says and its time allows; speeds are medians, and `x plain` is the median over the turns of their ratio. A
method runs in a process of its own: one that fails, or takes longer than its limit, leaves a row that says why, and the
others are measured all the same. Checkpoints of the prepared methods are made here by rounding to the nearest, so that
their rows show speed and memory, not how well a tool quantizes. `--quick` takes a minute or two on a small model.
"""

import argparse
import contextlib
import json
import multiprocessing
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from benchmarks.quantized_model import Plan, Served, Speed
from reference_server.messages import WarmupReply
from reference_server.model_server.quantization.schemes import SCHEMES

METHODS = ("none", *(scheme.name for scheme in SCHEMES))
PROCESSES = multiprocessing.get_context("spawn")


@dataclass(frozen=True, slots=True)
class Row:
    """One method. `times_plain_*`: tokens/s against the plain model's. turns: how many the speeds are medians of."""

    method: str
    kernels: str
    turns: int
    tokens_per_s_1: float
    tokens_per_s_8: float
    times_plain_1: float
    times_plain_8: float
    ttft_ms: float
    weight_mb: float
    perplexity: float
    kl_per_token: float


@dataclass(frozen=True, slots=True)
class NotMeasured:
    """A method that has no row, and why."""

    method: str
    reason: str


class MethodFailed(Exception):
    """A method that this device does not serve, or that was too slow; the text says which."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model-id", help="preset:llama-125m, or with --quick preset:tiny-llama")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=METHODS)
    parser.add_argument("--rounds", type=int, help="5, or with --quick 2; one more warms up and does not count")
    parser.add_argument("--cpu-memory-gib", type=float, default=1.0, help="of each model, its K/V cache included")
    parser.add_argument("--limit-s", type=float, default=55, help="most seconds for one method")
    parser.add_argument("--quick", action="store_true", help="a small model, a short text, few rounds")
    parser.add_argument("--json", type=Path, help="also write the rows here, after each method")
    args = parser.parse_args()
    model_id = args.model_id or ("preset:tiny-llama" if args.quick else "preset:llama-125m")
    rounds = args.rounds or (2 if args.quick else 5)
    new_tokens, text_tokens = (16, 256) if args.quick else (32, 512)
    with tempfile.TemporaryDirectory() as folder:
        plan = Plan(model_id, rounds, new_tokens, text_tokens, args.cpu_memory_gib, args.limit_s, Path(folder))
        rows = []
        try:
            for row in measure(plan, args.methods):
                rows.append(row)
                print(row.reason if isinstance(row, NotMeasured) else "measured", file=sys.stderr, flush=True)
                if args.json:
                    args.json.write_text(
                        json.dumps({"model": model_id, "rows": [asdict(each) for each in rows]}, indent=1)
                    )
        except MethodFailed as error:
            sys.exit(f"without the plain model there is nothing to compare with: {error}")
    print(f"{model_id}, one compute thread, torch {torch.__version__}\n")
    print(table(rows))


def measure(plan: Plan, methods: Sequence[str]) -> Iterator[Row | NotMeasured]:
    """Yields the row of each method as soon as it is known; without the plain model there is none to compare with."""
    plain = Candidate("none", plan)
    try:
        plain.allow(10 * plan.limit_s)
        plain.ask("speed")
        predictions = plain.ask("predictions")
        for number, method in enumerate(methods, 1):
            print(f"[{number}/{len(methods)}] {method}: ", end="", file=sys.stderr, flush=True)
            try:
                yield against(plain, method, plan, predictions)
            except MethodFailed as error:
                yield NotMeasured(method, str(error))
    finally:
        plain.close()


def against(plain: "Candidate", method: str, plan: Plan, predictions: tuple[float, float]) -> Row:
    """One method in turns with the plain model."""
    # It is waited for within the other's time; its own is there for a process that hangs.
    plain.allow(10 * plan.limit_s)
    other = plain if method == "none" else Candidate(method, plan)
    try:
        perplexity, divergence = predictions if other is plain else other.ask("predictions")
        other.ask("speed")
        turns = take_turns(plain, other, plan.rounds, plan.limit_s if other is plain else other.left_s)
        own = [turn[1] for turn in turns]
        facts = other.facts
        return Row(
            method,
            facts.backends["kernels"],
            len(turns),
            statistics.median(speed.tokens_per_s_1 for speed in own),
            statistics.median(speed.tokens_per_s_8 for speed in own),
            statistics.median(speed.tokens_per_s_1 / base.tokens_per_s_1 for base, speed in turns),
            statistics.median(speed.tokens_per_s_8 / base.tokens_per_s_8 for base, speed in turns),
            statistics.median(speed.ttft_ms for speed in own),
            facts.weight_bytes / 1e6,
            perplexity,
            divergence,
        )
    finally:
        if other is not plain:
            other.close()


def take_turns(plain: "Candidate", other: "Candidate", most: int, within_s: float) -> list[tuple[Speed, Speed]]:
    """The plain model and the other one, `most` times, or fewer where the time would not do for one more."""
    turns: list[tuple[Speed, Speed]] = []
    start = time.monotonic()
    while len(turns) < most:
        base: Speed = plain.ask("speed")
        turns.append((base, base if other is plain else other.ask("speed")))
        if (time.monotonic() - start) * (len(turns) + 1.5) / len(turns) > within_s:
            break
    return turns


class Candidate:
    """One method's model in a process of its own, which answers one question at a time within `limit_s` in all."""

    def __init__(self, method: str, plan: Plan) -> None:
        self._pipe, theirs = PROCESSES.Pipe()
        self._process = PROCESSES.Process(target=_answer, args=(theirs, method, plan), daemon=True)
        self._process.start()
        theirs.close()
        self._method = method
        self.allow(plan.limit_s)
        self.facts: WarmupReply = self._receive()

    def allow(self, limit_s: float) -> None:
        """Begin its time anew."""
        self._limit_s, self._deadline = limit_s, time.monotonic() + limit_s

    @property
    def left_s(self) -> float:
        """Seconds that it may still take."""
        return max(0.0, self._deadline - time.monotonic())

    def ask(self, question: str) -> Any:
        """Raises MethodFailed where there is no answer."""
        if self._pipe.closed:
            raise MethodFailed(f"{self._method}: its process was ended before")
        # A process that has died is told of when its answer is read.
        with contextlib.suppress(OSError):
            self._pipe.send(question)
        return self._receive()

    def _receive(self) -> Any:
        failure, answer = self._next()
        if failure is not None:
            # An answer that comes too late would be taken for the next question's.
            self.close()
            raise MethodFailed(f"{self._method}: {failure}")
        return answer

    def _next(self) -> tuple[str | None, Any]:
        if not self._pipe.poll(self.left_s):
            return f"stopped at its limit of {self._limit_s:g} s", None
        try:
            return self._pipe.recv()
        except EOFError:
            self._process.join()
            return f"its process ended with status {self._process.exitcode}", None

    def close(self) -> None:
        """End the process, whatever it is doing."""
        self._process.kill()
        self._process.join()
        self._pipe.close()


def _answer(pipe: Connection, method: str, plan: Plan) -> None:
    """The process of a candidate: says what it serves, then answers until it is ended."""
    try:
        candidate = Served(method, plan)
        pipe.send((None, candidate.facts))
        while True:
            pipe.send((None, getattr(candidate, pipe.recv())()))
    except EOFError:
        return
    except Exception as error:  # whatever a method brings: its row says so
        with contextlib.suppress(OSError):  # nobody waits any more
            pipe.send((f"{type(error).__name__}: {error}", None))


def table(rows: Sequence[Row | NotMeasured]) -> str:
    """Markdown; a method that was not measured says why in its second cell."""
    columns = (
        *("method", "kernels", "turns", "tokens/s, 1", "x plain", "tokens/s, 8", "x plain", "TTFT ms", "weights MB"),
        *("perplexity", "KL/token"),
    )
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for row in rows:
        if isinstance(row, NotMeasured):
            cells = [row.method, row.reason, *[""] * (len(columns) - 2)]
        else:
            cells = [
                row.method, row.kernels, str(row.turns), f"{row.tokens_per_s_1:.0f}", f"{row.times_plain_1:.2f}",
                f"{row.tokens_per_s_8:.0f}", f"{row.times_plain_8:.2f}", f"{row.ttft_ms:.1f}", f"{row.weight_mb:.2f}",
                f"{row.perplexity:.3f}", f"{row.kl_per_token:.5f}",
            ]  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()

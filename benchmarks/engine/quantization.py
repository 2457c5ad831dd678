"""Speed, memory and accuracy of each quantization method on this device.

    python -m benchmarks.engine.quantization [--quick] [--model-id preset:llama-125m] [--methods none gptq ...]

One row per method: tokens/s of one sequence and of eight, time to first token for a prompt of 128 tokens, memory of
the weights, and accuracy on a fixed text: perplexity, and the mean KL divergence per token from the plain weights in
the same compute type. If the compiled CPU product rounds activations, the divergence of the same weights with products
of float inputs is shown next to it; on trained weights (`preset:tiny-llama`) the two show the cost of that rounding.

Each method is measured in turns with the plain model, up to `--rounds` turns within its time limit; speeds are medians,
and `x plain` is the median of the ratios of the turns. Each method runs in its own process; a method that fails or
exceeds its limit gets a row with the reason. Methods that need a quantized checkpoint get one that is rounded to
nearest: their rows show speed and memory, not the quality of a quantization tool. `--quick` takes one or two minutes on
a small model.
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

from benchmarks.engine.quantized_model import MethodPlan, Predictions, Served, Speed
from reference_server.messages import WarmupReply
from reference_server.model_server.quantization.schemes import SCHEMES

METHODS = ("none", *(scheme.name for scheme in SCHEMES))
PROCESSES = multiprocessing.get_context("spawn")


@dataclass(frozen=True, slots=True)
class MethodRow:
    """One method. `times_plain_*`: tokens/s relative to the plain model. turns: the number of measured turns."""

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
    kl_float_products: float | None


@dataclass(frozen=True, slots=True)
class NotMeasured:
    """A method without results, and the reason."""

    method: str
    reason: str


class MethodFailed(Exception):
    """A method failed or exceeded its time limit."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model-id", help="default: preset:llama-125m, with --quick preset:tiny-llama")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=METHODS)
    parser.add_argument("--rounds", type=int, help="default: 5, with --quick 2; one more round warms up")
    parser.add_argument(
        "--text-tokens", type=int, help="tokens of the text; default: 512, on preset:tiny-llama 20480, with --quick 256"
    )
    parser.add_argument("--cpu-memory-gib", type=float, default=1.0, help="memory of each model, with its K/V cache")
    parser.add_argument("--limit-s", type=float, default=55, help="time limit of one method in seconds")
    parser.add_argument("--quick", action="store_true", help="a small model, a short text, few rounds")
    parser.add_argument("--json", type=Path, help="file to write the rows to, after each method")
    args = parser.parse_args()
    model_id = args.model_id or ("preset:tiny-llama" if args.quick else "preset:llama-125m")
    rounds = args.rounds or (2 if args.quick else 5)
    new_tokens = 16 if args.quick else 32
    text_tokens = args.text_tokens or (256 if args.quick else 20_480 if model_id == "preset:tiny-llama" else 512)
    with tempfile.TemporaryDirectory() as folder:
        plan = MethodPlan(model_id, rounds, new_tokens, text_tokens, args.cpu_memory_gib, args.limit_s, Path(folder))
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
            sys.exit(f"could not measure the plain model: {error}")
    print(f"{model_id}, one compute thread, torch {torch.__version__}\n")
    print(table(rows))


def measure(plan: MethodPlan, methods: Sequence[str]) -> Iterator[MethodRow | NotMeasured]:
    """Yield the row of each method. Raises MethodFailed if the plain model cannot be measured."""
    plain = Candidate("none", plan)
    try:
        plain.restart_limit(10 * plan.limit_s)
        plain.call("speed")
        predictions = plain.call("predictions")
        for number, method in enumerate(methods, 1):
            print(f"[{number}/{len(methods)}] {method}: ", end="", file=sys.stderr, flush=True)
            try:
                yield compare(plain, method, plan, predictions)
            except MethodFailed as error:
                yield NotMeasured(method, str(error))
    finally:
        plain.close()


def compare(plain: "Candidate", method: str, plan: MethodPlan, predictions: Predictions) -> MethodRow:
    """Measure one method in turns with the plain model."""
    # The limit of the method covers both; this one only stops a hanging process.
    plain.restart_limit(10 * plan.limit_s)
    other = plain if method == "none" else Candidate(method, plan)
    try:
        predicted: Predictions = predictions if other is plain else other.call("predictions")
        other.call("speed")
        turns = take_turns(plain, other, plan.rounds, plan.limit_s if other is plain else other.left_s)
        speeds = [speed for _, speed in turns]
        facts = other.facts
        return MethodRow(
            method,
            facts.backends["kernels"],
            len(turns),
            statistics.median(speed.tokens_per_s_1 for speed in speeds),
            statistics.median(speed.tokens_per_s_8 for speed in speeds),
            statistics.median(speed.tokens_per_s_1 / base.tokens_per_s_1 for base, speed in turns),
            statistics.median(speed.tokens_per_s_8 / base.tokens_per_s_8 for base, speed in turns),
            statistics.median(speed.ttft_ms for speed in speeds),
            facts.weight_bytes / 1e6,
            predicted.perplexity,
            predicted.kl_per_token,
            predicted.kl_float_products,
        )
    finally:
        if other is not plain:
            other.close()


def take_turns(plain: "Candidate", other: "Candidate", max_turns: int, limit_s: float) -> list[tuple[Speed, Speed]]:
    """Measure both in turns, until `max_turns` or `limit_s` is reached."""
    turns: list[tuple[Speed, Speed]] = []
    start = time.monotonic()
    while len(turns) < max_turns:
        base: Speed = plain.call("speed")
        turns.append((base, base if other is plain else other.call("speed")))
        if (time.monotonic() - start) * (len(turns) + 1.5) / len(turns) > limit_s:
            break
    return turns


class Candidate:
    """The model of one method in its own process. It runs one call at a time; all calls together have `limit_s`."""

    def __init__(self, method: str, plan: MethodPlan) -> None:
        self._pipe, child_pipe = PROCESSES.Pipe()
        self._process = PROCESSES.Process(target=_serve_calls, args=(child_pipe, method, plan), daemon=True)
        self._process.start()
        child_pipe.close()
        self._method = method
        self.restart_limit(plan.limit_s)
        self.facts: WarmupReply = self._receive()

    def restart_limit(self, limit_s: float) -> None:
        """Start a new time limit."""
        self._limit_s, self._deadline = limit_s, time.monotonic() + limit_s

    @property
    def left_s(self) -> float:
        """Seconds until the time limit."""
        return max(0.0, self._deadline - time.monotonic())

    def call(self, name: str) -> Any:
        """Call the method `name` of `Served`. Raises MethodFailed if it does not return."""
        if self._pipe.closed:
            raise MethodFailed(f"{self._method}: its process has been stopped")
        # A dead process is reported when its answer is read.
        with contextlib.suppress(OSError):
            self._pipe.send(name)
        return self._receive()

    def _receive(self) -> Any:
        failure, answer = self._next()
        if failure is not None:
            # Otherwise a late answer would be read as the answer of the next call.
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
        """Kill the process."""
        self._process.kill()
        self._process.join()
        self._pipe.close()


def _serve_calls(pipe: Connection, method: str, plan: MethodPlan) -> None:
    """The main function of a candidate's process: sends the facts of the model, then runs calls."""
    try:
        candidate = Served(method, plan)
        pipe.send((None, candidate.facts))
        while True:
            pipe.send((None, getattr(candidate, pipe.recv())()))
    except EOFError:
        return
    except Exception as error:  # any error of a method is reported in its row
        with contextlib.suppress(OSError):  # the parent has closed the pipe
            pipe.send((f"{type(error).__name__}: {error}", None))


def table(rows: Sequence[MethodRow | NotMeasured]) -> str:
    """Markdown table; a method without results has the reason in its second cell."""
    columns = (
        *("method", "kernels", "turns", "tokens/s, 1", "x plain", "tokens/s, 8", "x plain", "TTFT ms", "weights MB"),
        *("perplexity", "KL/token", "KL, float products"),
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
                "" if row.kl_float_products is None else f"{row.kl_float_products:.5f}",
            ]  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()

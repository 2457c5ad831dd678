"""What each quantization method costs and gives on this device: `python benchmarks/quantization.py [--model-id ID]`.

One row a method: tokens/s of one sequence and of eight, time to the first token of a prompt of 128, memory of the
weights, and how far the model's predictions on a fixed text move: perplexity, and the mean KL divergence per token
from the plain weights' in the same compute type. Every method is measured in turns with the plain model; speeds are
medians, and `x plain` is the median over the turns of their ratio. A method runs in a process of its own: one that
fails, or takes longer than its limit, leaves a row that says why, and the others are measured all the same.
Checkpoints of the prepared methods are made here by rounding to the nearest, so that their rows show speed and memory,
not how well a tool quantizes. `--quick` takes a minute or two on a small model.
"""

import argparse
import asyncio
import itertools
import json
import multiprocessing
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from rounded_checkpoint import SETTINGS, save_rounded
from tiny_text import documents
from torch import Tensor

from reference_server.messages import Batch, ChooserParameters, Request, StoppingParameters, WarmupReply, WarmupRequest
from reference_server.model_server.distributed import RankGroup
from reference_server.model_server.models import loader
from reference_server.model_server.options import EngineOptions
from reference_server.model_server.quantization.schemes import SCHEMES
from reference_server.model_server.shard import LocalShard
from reference_server.tokenizer import load_tokenizer

PROMPT_TOKENS = 128
BLOCK_SIZE = 16
METHODS = ("none", *(scheme.name for scheme in SCHEMES))
PROCESSES = multiprocessing.get_context("spawn")


@dataclass(frozen=True, slots=True)
class Plan:
    """What every method is put through. `memory_gib`: of each model, its K/V cache included."""

    model_id: str
    rounds: int
    new_tokens: int
    text_tokens: int
    memory_gib: float
    limit_s: float
    folder: Path


@dataclass(frozen=True, slots=True)
class Speed:
    """One round of one method. ttft_ms: prefill of one prompt; tokens/s of the decode steps after it."""

    tokens_per_s_1: float
    tokens_per_s_8: float
    ttft_ms: float


@dataclass(frozen=True, slots=True)
class Row:
    """One method. `times_plain_*`: tokens/s against the plain model's."""

    method: str
    kernels: str
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
    new_tokens, text_tokens = (16, 256) if args.quick else (32, 1024)
    with tempfile.TemporaryDirectory() as folder:
        plan = Plan(model_id, rounds, new_tokens, text_tokens, args.cpu_memory_gib, args.limit_s, Path(folder))
        rows = []
        for row in measure(plan, args.methods):
            rows.append(row)
            print(row.reason if isinstance(row, NotMeasured) else "measured", file=sys.stderr, flush=True)
            if args.json:
                args.json.write_text(json.dumps({"model": model_id, "rows": [asdict(each) for each in rows]}, indent=1))
    print(f"{model_id}, one compute thread, torch {torch.__version__}\n")
    print(table(rows))


def measure(plan: Plan, methods: Sequence[str]) -> Any:
    """Yields the row of each method as soon as it is known; without the plain model there is none to compare with."""
    plain = Candidate("none", plan)
    try:
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
    plain.allow(plan.limit_s)
    other = plain if method == "none" else Candidate(method, plan)
    try:
        other.ask("speed")
        turns = [(plain.ask("speed"), other.ask("speed")) for _ in range(plan.rounds)]
        own = [turn[1] for turn in turns]
        perplexity, divergence = predictions if other is plain else other.ask("predictions")
        facts: WarmupReply = other.facts
        return Row(
            method,
            facts.backends["kernels"],
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


class Candidate:
    """One method's model in a process of its own, which answers one question at a time within `limit_s` in all."""

    def __init__(self, method: str, plan: Plan) -> None:
        self._pipe, theirs = PROCESSES.Pipe()
        self._process = PROCESSES.Process(target=_answer, args=(theirs, method, plan), daemon=True)
        self._process.start()
        theirs.close()
        self.allow(plan.limit_s)
        try:
            self.facts = self._receive()
        except MethodFailed:
            self.close()
            raise

    def allow(self, limit_s: float) -> None:
        """Begin its time anew."""
        self._limit_s, self._deadline = limit_s, time.monotonic() + limit_s

    def ask(self, question: str) -> Any:
        """Raises MethodFailed where there is no answer."""
        self._pipe.send(question)
        return self._receive()

    def _receive(self) -> Any:
        if not self._pipe.poll(max(0.0, self._deadline - time.monotonic())):
            raise MethodFailed(f"stopped at its limit of {self._limit_s:g} s")
        try:
            failure, answer = self._pipe.recv()
        except EOFError:
            self._process.join()
            raise MethodFailed(f"its process ended with status {self._process.exitcode}") from None
        if failure is not None:
            raise MethodFailed(failure)
        return answer

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
        pipe.send((f"{type(error).__name__}: {error}", None))


class Served:
    """One method's model, loaded and warmed up."""

    def __init__(self, method: str, plan: Plan) -> None:
        torch.set_num_threads(1)
        self._method, self._plan = method, plan
        model_id = (
            str(save_rounded(plan.model_id, method, plan.folder / method)) if method in SETTINGS else plan.model_id
        )
        flag = None if method == "none" else method
        self._options = EngineOptions(model_id, quantize=flag, compute_threads=1, cpu_memory_gib=plan.memory_gib)
        self._shard = LocalShard.load(self._options)
        self._runner = asyncio.Runner()
        warmup = WarmupRequest(Batch(0, requests(1, 1)), 8 * PROMPT_TOKENS)
        self.facts: WarmupReply = self._runner.run(self._shard.warmup(warmup))

    def speed(self) -> Speed:
        """A round: one sequence, then eight."""
        one, ttft_ms = self._runner.run(generate(self._shard, 1, self._plan.new_tokens))
        eight, _ = self._runner.run(generate(self._shard, 8, self._plan.new_tokens))
        return Speed(one, eight, ttft_ms)

    def predictions(self) -> tuple[float, float]:
        """Perplexity of the text, and KL divergence per token from the plain model, which has to be asked first."""
        ids = text_ids(self._options, self._plan.text_tokens)
        found = log_probabilities(self._options, ids)
        path = self._plan.folder / "plain.pt"
        if self._method == "none":
            torch.save(found, path)
        plain: Tensor = torch.load(path)
        loss = -found[:-1].gather(1, ids[1:, None]).mean()
        return loss.exp().item(), (plain.exp() * (plain - found)).sum(-1).mean().item()


async def generate(shard: LocalShard, count: int, new_tokens: int) -> tuple[float, float]:
    """Tokens/s of the decode steps, and milliseconds of the prefill."""
    start = time.perf_counter()
    step = await shard.prefill(Batch(1, requests(count, new_tokens)))
    first = time.perf_counter()
    produced = 0
    while step.batch is not None:
        step = await shard.decode([step.batch])
        produced += len(step.generations)
    return produced / (time.perf_counter() - first), (first - start) * 1000


def requests(count: int, new_tokens: int) -> tuple[Request, ...]:
    text = " ".join(" ".join(itertools.islice(documents(7), 40)).split()[: 4 * PROMPT_TOKENS])
    stopping = StoppingParameters(new_tokens, ignore_eos_token=True)
    blocks_each = (PROMPT_TOKENS + new_tokens) // BLOCK_SIZE + 1
    return tuple(
        Request(
            id_, (text,), PROMPT_TOKENS, ChooserParameters(), stopping,
            blocks=tuple(range(1 + id_ * blocks_each, 1 + (id_ + 1) * blocks_each)),
        )
        for id_ in range(count)
    )  # fmt: skip


def text_ids(options: EngineOptions, count: int) -> Tensor:
    """The first tokens of the fixed text."""
    files = loader.locate(options)
    vocabulary = json.loads((files.directory / "config.json").read_text())["vocab_size"]
    text = "\n".join(itertools.islice(documents(11), 40))
    return torch.tensor(load_tokenizer(files.tokenizer_directory, vocabulary).encode(text, True)[:count])


@torch.no_grad()
def log_probabilities(options: EngineOptions, ids: Tensor) -> Tensor:
    """[tokens, vocabulary] by the model's own modules."""
    padded = EngineOptions(options.model_id, quantize=options.quantize, compute_threads=1, tier="padded")
    model = loader.load(padded, loader.locate(padded), RankGroup(0, 1)).model
    return model(ids[None], use_cache=False).logits[0].float().log_softmax(-1)


def table(rows: Sequence[Row | NotMeasured]) -> str:
    """Markdown; a method that was not measured says why in its second cell."""
    columns = (
        *("method", "kernels", "tokens/s, 1", "x plain", "tokens/s, 8", "x plain", "TTFT ms", "weights MB"),
        *("perplexity", "KL/token"),
    )
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for row in rows:
        if isinstance(row, NotMeasured):
            cells = [row.method, row.reason, *[""] * (len(columns) - 2)]
        else:
            cells = [
                row.method, row.kernels, f"{row.tokens_per_s_1:.0f}", f"{row.times_plain_1:.2f}",
                f"{row.tokens_per_s_8:.0f}", f"{row.times_plain_8:.2f}", f"{row.ttft_ms:.1f}", f"{row.weight_mb:.2f}",
                f"{row.perplexity:.3f}", f"{row.kl_per_token:.5f}",
            ]  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()

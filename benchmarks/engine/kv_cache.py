"""An eight-bit K/V cache against one of bfloat16: decode speed at long context, capacity, effect on predictions.

    python -m benchmarks.engine.kv_cache [--quick] [--models tiny-llama llama-125m] [--contexts 512 4096] [--json FILE]

Models with each cache run in one process with one compute thread; rounds are interleaved, and their order rotates. One
measurement: some decode steps of a batch whose K/V are noise; tokens/s of the steps. The ratio to bfloat16 is computed
within each round; the table has medians with ranges. The KL divergence compares the predictions of a fixed text with
those of a bfloat16 cache. The text is computed in windows, as prompts: each token is predicted from the rounded K/V of
all tokens before it. Only `tiny-llama` has trained weights; other presets have random ones. Scales are 1, because no
preset has scales.
"""

import argparse
import json
import math
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from benchmarks.engine.in_process import machine
from benchmarks.engine.quantized_model import divergence, text_ids
from reference_server.model_server.forward.inputs import build_inputs
from reference_server.model_server.measure.record import MeasurePlan
from reference_server.model_server.measure.rig import Rig
from reference_server.model_server.memory.kv_cache import bytes_per_block
from reference_server.model_server.options import EngineOptions

CacheName = Literal["bfloat16", "fp8_e4m3fn", "fp8_e5m2"]
CACHES: tuple[CacheName, ...] = ("bfloat16", "fp8_e4m3fn", "fp8_e5m2")
WINDOW = 512
"""Tokens of the text that are predicted together."""


@dataclass(frozen=True, slots=True)
class DecodeSpeed:
    """Tokens/s of the decode steps of one shape, one value a round; and their ratios to bfloat16 in the same rounds."""

    rows: int
    context: int
    tokens_per_s: list[float]
    times_bfloat16: list[float]


@dataclass(frozen=True, slots=True)
class CacheResult:
    """One model with one cache."""

    model: str
    cache: CacheName
    kernels: str
    tokens_per_gib: int
    text_tokens: int
    kl_per_token: float
    perplexity: float
    speeds: list[DecodeSpeed]


@dataclass(frozen=True, slots=True)
class CachePlan:
    """steps: decode steps of one measurement, after one that is not timed."""

    rows: Sequence[int]
    contexts: Sequence[int]
    rounds: int
    steps: int
    text_tokens: int


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", default=["tiny-llama", "llama-125m"])
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 8])
    parser.add_argument("--contexts", nargs="+", type=int, default=[512, 4096])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--text-tokens", type=int, default=4096)
    parser.add_argument("--quick", action="store_true", help="tiny-llama, one context, three rounds, a short text")
    parser.add_argument("--json", type=Path, help="file to write the measurements to")
    args = parser.parse_args()
    if args.quick:
        args.models, args.contexts, args.rounds, args.text_tokens = ["tiny-llama"], [256], 3, WINDOW
    plan = CachePlan(args.rows, args.contexts, args.rounds, args.steps, args.text_tokens)
    torch.set_num_threads(1)
    results = [result for model in args.models for result in measure(model, plan)]
    print(table(results))
    if args.json:
        written = {"machine": machine(), "plan": asdict(plan), "results": [asdict(each) for each in results]}
        args.json.write_text(json.dumps(written, indent=1))


@torch.no_grad()
def measure(model: str, plan: CachePlan) -> list[CacheResult]:
    shapes = MeasurePlan(batches=tuple(plan.rows), contexts=tuple(plan.contexts), prefills=((1, WINDOW),) * 2)
    rigs: dict[CacheName, Rig] = {
        cache: Rig(model, shapes, load_format="auto", kv_cache_dtype=None if cache == "bfloat16" else cache)
        for cache in CACHES
    }
    speeds = speeds_of(rigs, plan)
    ids = text_ids(EngineOptions(f"preset:{model}"), plan.text_tokens)
    predicted = predictions_of(rigs, ids)
    results = []
    for cache, rig in rigs.items():
        block_bytes = bytes_per_block(rig.prepared.shapes, rig.block_size, rig.prepared.cache_dtype)
        capacity = (1 << 30) // block_bytes * rig.block_size
        backends = rig.prepared.backends
        kernels = f"{backends['decode']} attention, {backends['kernels']}"
        kl, perplexity = predicted[cache]
        results.append(CacheResult(model, cache, kernels, capacity, len(ids), kl, perplexity, speeds[cache]))
        rig.close()
    return results


def speeds_of(rigs: Mapping[CacheName, Rig], plan: CachePlan) -> dict[CacheName, list[DecodeSpeed]]:
    found: dict[CacheName, list[DecodeSpeed]] = {cache: [] for cache in rigs}
    for rows in plan.rows:
        for context in plan.contexts:
            rates: dict[CacheName, list[float]] = {cache: [] for cache in rigs}
            for turn in range(plan.rounds):
                order = CACHES[turn % len(CACHES) :] + CACHES[: turn % len(CACHES)]
                for cache in order:
                    rates[cache].append(decode_rate(rigs[cache], rows, context, plan.steps))
                print(f"{rows} rows of {context} tokens: round {turn + 1}", file=sys.stderr, flush=True)
            for cache, values in rates.items():
                ratios = [own / plain for own, plain in zip(values, rates["bfloat16"], strict=True)]
                found[cache].append(DecodeSpeed(rows, context, values, ratios))
    return found


def decode_rate(rig: Rig, rows: int, context: int, steps: int) -> float:
    """Tokens/s of decode steps over a cache of noise."""
    batch = rig.batch(rows, context, steps + 1, is_prefilled=True)
    for step in range(steps + 1):
        if step == 1:
            started = time.perf_counter()
        launched = rig.stepper.launch(batch, batch.live)
        rig.stepper.read(batch, [launched])
    return rows * steps / (time.perf_counter() - started)


def predictions_of(rigs: Mapping[CacheName, Rig], ids: Tensor) -> dict[CacheName, tuple[float, float]]:
    """KL divergence per token from the predictions with a bfloat16 cache, and perplexity; of each cache."""
    divergences: dict[CacheName, list[float]] = {cache: [] for cache in rigs}
    losses: dict[CacheName, list[float]] = {cache: [] for cache in rigs}
    for window in ids[: len(ids) // WINDOW * WINDOW].split(WINDOW):
        plain = log_probabilities(rigs["bfloat16"], window)
        for cache, rig in rigs.items():
            own = log_probabilities(rig, window)
            divergences[cache].append(divergence(plain, own))
            losses[cache].append(-own[:-1].gather(1, window[1:, None]).mean().item())
    return {cache: (statistics.mean(divergences[cache]), math.exp(statistics.mean(losses[cache]))) for cache in rigs}


def log_probabilities(rig: Rig, window: Tensor) -> Tensor:
    """[tokens, vocabulary], each token from those before it."""
    batch = rig.batch(1, len(window), 1, is_prefilled=False)
    (sequence,) = batch.sequences
    sequence.ids = window.tolist()
    sequence.request = replace(sequence.request, prefill_logprobs=True)
    return rig.prepared.forward(build_inputs(batch, prompt_logprobs=True)).float().log_softmax(-1)


def table(results: Sequence[CacheResult]) -> str:
    lines = [f"bfloat16 weights, one compute thread; {machine()}; medians (range)"]
    for each in results:
        lines.append(
            f"\n{each.model}, {each.cache} cache ({each.kernels}): {each.tokens_per_gib:,} tokens in 1 GiB; KL "
            f"{each.kl_per_token:.6f} per token, perplexity {each.perplexity:.4f} (n={each.text_tokens} tokens)"
        )
        lines += [
            f"  {speed.rows} rows of {speed.context} tokens: {_spread(speed.tokens_per_s, 1)} tokens/s, "
            f"{_spread(speed.times_bfloat16, 2)} x bfloat16, n={len(speed.tokens_per_s)}, higher is better"
            for speed in each.speeds
        ]
    return "\n".join(lines)


def _spread(values: Sequence[float], digits: int) -> str:
    low, high = min(values), max(values)
    return f"{statistics.median(values):.{digits}f} ({low:.{digits}f} - {high:.{digits}f})"


if __name__ == "__main__":
    main()

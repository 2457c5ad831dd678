"""Measure the cost of LoRA adapters in decode steps: 0, 1 and 8 adapters in one batch.

    python -m benchmarks.engine.adapter_cost [--model preset:llama-125m] [--rows 32] [--adapters 0 1 8] [--rank 16]
                                         [--rounds 9] [--steps 24] [--json FILE]

One engine with one compute thread has random adapters over all linears of the decoder. A measurement prefills the
rows, each with a prompt of 32 tokens, spreads them evenly over the adapters, and times the decode steps that follow.
Rounds are interleaved: each measures every count, and each starts with another one; the first round does not count. The
table has medians over rounds of a step's time, and of its ratio to the step without adapters in the same round, by time
and by processor time, which other programs change less. Prompts are measured the same way: one prefill of all rows.

Goals: at most 1.10 with one adapter and 1.25 with eight, at 32 rows of llama-125m and rank 16.
"""

import argparse
import asyncio
import functools
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file

from benchmarks.engine.in_process import machine
from reference_server.adapter_source import AdapterSource
from reference_server.messages import Batch, ChooserParameters, Request, StoppingParameters, WarmupRequest
from reference_server.model_server.calls.local_shard import LocalShard
from reference_server.model_server.options import EngineOptions
from reference_server.transport.shard import until_loaded

PROMPT_TOKENS = 32
PROMPT = "What is deep learning, and how does it differ from other kinds? " * 8
GOALS = {1: 1.10, 8: 1.25}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="preset:llama-125m")
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--adapters", nargs="+", type=int, default=[0, 1, 8])
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    result = asyncio.run(measure(args.model, args.rows, args.adapters, args.rank, args.rounds, args.steps))
    print(table(result))
    if args.json:
        args.json.write_text(json.dumps({"machine": machine(), "arguments": vars(args) | {"json": None}} | result))


async def measure(
    model: str, rows: int, counts: Sequence[int], rank: int, rounds: int, steps: int
) -> dict[str, dict[str, list[float]]]:
    """Seconds by measured quantity and number of adapters, one value for each round."""
    options = EngineOptions(model, dtype="bfloat16", cpu_memory_gib=3, compute_threads=1, adapter_bytes=1 << 30)
    shard = LocalShard.load(options)
    with tempfile.TemporaryDirectory() as directory:
        for number in range(max(counts)):
            path = save_random(shard, Path(directory) / str(number), rank, number)
            await until_loaded(functools.partial(shard.load_adapter, AdapterSource(f"adapter-{number}", str(path))))
    await shard.warmup(WarmupRequest(Batch(0, (request(0, None, 1),)), rows * PROMPT_TOKENS))
    kinds = ("decode_s", "decode_cpu_s", "prefill_s", "prefill_cpu_s")
    result: dict[str, dict[str, list[float]]] = {kind: {str(count): [] for count in counts} for kind in kinds}
    for number in range(rounds + 1):
        first = number % len(counts)
        for count in [*counts[first:], *counts[:first]]:
            times = await run(shard, rows, count, steps)
            if number:
                for kind, value in zip(kinds, times, strict=True):
                    result[kind][str(count)].append(value)
        print(f"round {number}", file=sys.stderr, flush=True)
    shard.close()
    return result


async def run(shard: LocalShard, rows: int, count: int, steps: int) -> tuple[float, float, float, float]:
    """Seconds and processor seconds of a decode step, the median of `steps`, and of the prefill."""
    names = [f"adapter-{row % count}" if count else None for row in range(rows)]
    requests = tuple(request(row, name, steps + 4) for row, name in enumerate(names))
    before, cpu = time.perf_counter(), time.process_time()
    result = await shard.prefill(Batch(1, requests))
    prefill = time.perf_counter() - before, time.process_time() - cpu
    times, cpu_times = [], []
    for _ in range(steps):
        before, cpu = time.perf_counter(), time.process_time()
        assert result.batch is not None
        result = await shard.decode([result.batch])
        times.append(time.perf_counter() - before)
        cpu_times.append(time.process_time() - cpu)
    await shard.clear_cache()
    return statistics.median(times), statistics.median(cpu_times), *prefill


def request(row: int, adapter_id: str | None, new_tokens: int) -> Request:
    num_blocks = -(-(PROMPT_TOKENS + new_tokens) // 16)
    return Request(
        id=row,
        chunks=(PROMPT,),
        truncate=PROMPT_TOKENS,
        parameters=ChooserParameters(),
        stopping=StoppingParameters(new_tokens, ignore_eos_token=True),
        blocks=tuple(range(1 + row * num_blocks, 1 + (row + 1) * num_blocks)),
        num_slots=PROMPT_TOKENS + new_tokens - 1,
        adapter_id=adapter_id,
    )


def save_random(shard: LocalShard, directory: Path, rank: int, seed: int) -> Path:
    """A random adapter over all linears of the decoder, in peft's files."""
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name, linear in shard.engine.loaded.linears.items():
        prefix = f"base_model.model.{name}.lora_"
        weights[f"{prefix}A.weight"] = torch.randn(rank, linear.inputs, generator=generator) * linear.inputs**-0.5
        weights[f"{prefix}B.weight"] = torch.randn(linear.outputs, rank, generator=generator) * 0.01
    directory.mkdir()
    save_file(weights, directory / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "base_model_name_or_path": "random", "r": rank, "lora_alpha": rank}
    (directory / "adapter_config.json").write_text(json.dumps(config))
    return directory


def table(result: dict[str, dict[str, list[float]]]) -> str:
    lines = [
        "| adapters | decode step, ms | ratio | by processor time | prefill, ms | by processor time | goal |",
        "|---|---|---|---|---|---|---|",
    ]
    for count, times in result["decode_s"].items():
        cells = [
            f"{statistics.median(times) * 1e3:.2f}",
            ratio(result["decode_s"], count),
            ratio(result["decode_cpu_s"], count),
            f"{statistics.median(result['prefill_s'][count]) * 1e3:.1f}",
            ratio(result["prefill_cpu_s"], count),
            str(GOALS.get(int(count), "")),
        ]
        lines.append(f"| {count} | {' | '.join(cells)} |")
    return "\n".join(lines)


def ratio(times: dict[str, list[float]], count: str) -> str:
    """The median and the range of the ratios to no adapter in the same round."""
    without = times.get("0")
    if without is None:
        return ""
    ratios = sorted(own / base for own, base in zip(times[count], without, strict=True))
    return f"{statistics.median(ratios):.3f} ({ratios[0]:.3f} to {ratios[-1]:.3f})"


if __name__ == "__main__":
    main()

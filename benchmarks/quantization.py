"""What each quantization method costs and gives on this device: `python benchmarks/quantization.py [--model-id ID]`.

One row a method: tokens/s of one sequence and of eight, time to the first token of a prompt of 128, memory of the
weights, and how far the model's predictions on a fixed text move: perplexity, and the mean KL divergence per token
from the plain weights' in the same compute type. Rounds are interleaved; speeds are medians. Checkpoints of the
prepared methods are made here by rounding to the nearest, so that their rows show speed and memory, not how well a
tool quantizes.
"""

import argparse
import asyncio
import itertools
import json
import shutil
import statistics
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tiny_text import documents
from torch import Tensor

from reference_server.errors import StartupError
from reference_server.messages import Batch, ChooserParameters, Request, StoppingParameters, WarmupReply, WarmupRequest
from reference_server.model_server.distributed import RankGroup
from reference_server.model_server.models import loader
from reference_server.model_server.models.quantize import quantizable
from reference_server.model_server.options import EngineOptions
from reference_server.model_server.quantization import int4
from reference_server.model_server.quantization.schemes import SCHEMES, Quantization, find
from reference_server.model_server.shard import LocalShard
from reference_server.tokenizer import load_tokenizer

PROMPT_TOKENS = 128
NEW_TOKENS = 32
TEXT_TOKENS = 1024
GROUP = 32
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


@dataclass(frozen=True, slots=True)
class Row:
    """One method."""

    method: str
    kernels: str
    tokens_per_s_1: float
    tokens_per_s_8: float
    ttft_ms: float
    weight_mb: float
    perplexity: float
    kl_per_token: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model-id", default="preset:tiny-llama")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--methods", nargs="+", default=["none", *(scheme.name for scheme in SCHEMES)])
    parser.add_argument("--cpu-memory-gib", type=float, default=0.2, help="of each model, its K/V cache included")
    parser.add_argument("--json", type=Path, help="also write the rows here")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        rows = measure(args.model_id, args.methods, args.rounds, Path(folder), args.cpu_memory_gib)
    print(f"{args.model_id}, {torch.get_num_threads()} compute thread(s), torch {torch.__version__}\n")
    print(table(rows))
    if args.json:
        args.json.write_text(json.dumps([asdict(row) for row in rows], indent=1))


def measure(model_id: str, methods: list[str], rounds: int, folder: Path, memory_gib: float) -> list[Row]:
    """A row for each method that this device serves; a line on stdout for each that it refuses."""
    plain = EngineOptions(model_id, compute_threads=1)
    files = loader.locate(plain)
    ids = text_ids(files.tokenizer_directory, files.directory)
    reference = log_probabilities(plain, ids)
    shards: dict[str, LocalShard] = {}
    options: dict[str, EngineOptions] = {}
    for method in methods:
        prepared = method != "none" and find(method).quantize is None and find(method).refused is None
        name = str(prepare(method, plain, folder / method)) if prepared else model_id
        flag = None if method == "none" else method
        options[method] = EngineOptions(name, quantize=flag, compute_threads=1, cpu_memory_gib=memory_gib)
        try:
            shards[method] = LocalShard.load(options[method])
        except StartupError as error:
            print(f"{method}: {error}")
    race = asyncio.run(run_race(shards, rounds))
    return [
        row(method, race.replies[method], race.speeds[method], reference, log_probabilities(options[method], ids), ids)
        for method in shards
    ]


Speeds = list[tuple[float, float, float]]


@dataclass(frozen=True, slots=True)
class Race:
    """What every shard said of itself, and per round its tokens/s of one and of eight sequences and its TTFT in ms."""

    replies: dict[str, WarmupReply]
    speeds: dict[str, Speeds]


def row(method: str, reply: WarmupReply, speeds: Speeds, plain: Tensor, found: Tensor, ids: Tensor) -> Row:
    one, eight, ttft = (statistics.median(values) for values in zip(*speeds, strict=True))
    loss = -found[:-1].gather(1, ids[1:, None]).mean()
    divergence = (plain.exp() * (plain - found)).sum(-1).mean()
    kernels, megabytes = reply.backends["kernels"], reply.weight_bytes / 1e6
    return Row(method, kernels, one, eight, ttft, megabytes, loss.exp().item(), divergence.item())


async def run_race(shards: dict[str, LocalShard], rounds: int) -> Race:
    """The first round warms up and does not count."""
    warmup = WarmupRequest(Batch(0, requests(1, 1)), 8 * PROMPT_TOKENS)
    replies = {method: await shard.warmup(warmup) for method, shard in shards.items()}
    found: dict[str, Speeds] = {method: [] for method in shards}
    for number, (method, shard) in itertools.product(range(rounds + 1), shards.items()):
        one, ttft = await generate(shard, 1)
        eight, _ = await generate(shard, 8)
        if number:
            found[method].append((one, eight, ttft))
    return Race(replies, found)


async def generate(shard: LocalShard, count: int) -> tuple[float, float]:
    """Tokens/s of the decode steps, and milliseconds of the prefill."""
    start = time.perf_counter()
    step = await shard.prefill(Batch(1, requests(count, NEW_TOKENS)))
    first = time.perf_counter()
    produced = 0
    while step.batch is not None:
        step = await shard.decode([step.batch])
        produced += len(step.generations)
    return produced / (time.perf_counter() - first), (first - start) * 1000


def requests(count: int, new_tokens: int) -> tuple[Request, ...]:
    text = " ".join(itertools.islice(" ".join(documents(7)).split(), 4 * PROMPT_TOKENS))
    stopping = StoppingParameters(new_tokens, ignore_eos_token=True)
    blocks_each = (PROMPT_TOKENS + NEW_TOKENS) // 16 + 1
    return tuple(
        Request(
            id_, (text,), PROMPT_TOKENS, ChooserParameters(), stopping,
            blocks=tuple(range(1 + id_ * blocks_each, 1 + (id_ + 1) * blocks_each)),
        )
        for id_ in range(count)
    )  # fmt: skip


def text_ids(tokenizer_directory: Path, directory: Path) -> Tensor:
    vocabulary = json.loads((directory / "config.json").read_text())["vocab_size"]
    tokenizer = load_tokenizer(tokenizer_directory, vocabulary)
    text = "\n".join(itertools.islice(documents(11), 40))
    return torch.tensor(tokenizer.encode(text, True)[:TEXT_TOKENS])


@torch.no_grad()
def log_probabilities(options: EngineOptions, ids: Tensor) -> Tensor:
    """[tokens, vocabulary] by the model's own modules."""
    padded = EngineOptions(options.model_id, quantize=options.quantize, compute_threads=1, tier="padded")
    model = loader.load(padded, loader.locate(padded), RankGroup(0, 1)).model
    return model(ids[None], use_cache=False).logits[0].float().log_softmax(-1)


def prepare(method: str, plain: EngineOptions, directory: Path) -> Path:
    """A checkpoint of the model, rounded to the nearest four bits and stored as `method` wants it."""
    files = loader.locate(plain)
    shutil.copytree(files.directory, directory)
    for path in files.tokenizer_directory.glob("tokenizer*"):
        shutil.copy(path, directory)
    model = loader.load(EngineOptions(plain.model_id, dtype="float32", tier="padded"), files, RankGroup(0, 1)).model
    tensors = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    if (directory / "model.safetensors").is_file():
        tensors = load_file(directory / "model.safetensors")
    for name in quantizable(model, Quantization(find("eetq"), None)):
        prefix = name.removesuffix(".weight")
        tensors |= {f"{prefix}.{leaf}": part for leaf, part in stored(method, tensors.pop(name).float()).items()}
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": SETTINGS[method]}))
    return directory


def stored(method: str, weight: Tensor) -> dict[str, Tensor]:
    """A weight [outputs, inputs] in four bits, symmetric, in groups of 32."""
    groups = weight.view(len(weight), -1, GROUP)
    scales = (groups.abs().amax(2) / 7).clamp(min=1e-8).half()
    codes = (groups / scales.float()[..., None]).round().clamp(-8, 7).add(8).to(torch.uint8).flatten(1)
    zeros = torch.full(scales.shape, 8, dtype=torch.uint8)
    if method == "compressed-tensors":
        shape = torch.tensor(weight.shape)
        return {"weight_packed": int4.pack(codes, 4, 1), "weight_scale": scales, "weight_shape": shape}
    by_input = scales.t().contiguous()
    if method == "awq":
        parts = {name: part.t().reshape(part.shape[1], -1, 8)[..., AWQ_ORDER].flatten(1)
                 for name, part in (("qweight", codes), ("qzeros", zeros))}  # fmt: skip
        return {name: int4.pack(part, 4, 1) for name, part in parts.items()} | {"scales": by_input}
    return {
        "qweight": int4.pack(codes.t().contiguous(), 4, 0),
        "qzeros": int4.pack(zeros.t() - 1, 4, 1),
        "scales": by_input,
        "g_idx": (torch.arange(weight.shape[1]) // GROUP).int(),
    }


_GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "sym": True, "desc_act": False}
SETTINGS: dict[str, dict[str, Any]] = {
    "gptq": _GPTQ,
    "marlin": _GPTQ,
    "awq": {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm", "zero_point": True},
    "compressed-tensors": {
        "quant_method": "compressed-tensors", "format": "pack-quantized", "quantization_status": "compressed",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": {"num_bits": 4, "type": "int"}}},
    },
}  # fmt: skip


def table(rows: list[Row]) -> str:
    lines = ["| method | kernels | tokens/s, 1 | tokens/s, 8 | TTFT ms | weights MB | perplexity | KL/token |"]
    lines.append("|---|---|---|---|---|---|---|---|")
    lines += [
        f"| {each.method} | {each.kernels} | {each.tokens_per_s_1:.0f} | {each.tokens_per_s_8:.0f} | "
        f"{each.ttft_ms:.1f} | {each.weight_mb:.2f} | {each.perplexity:.3f} | {each.kl_per_token:.5f} |"
        for each in rows
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    main()

"""The model of one method, served in this process: its speed, and its predictions on a text."""

import asyncio
import itertools
import json
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.engine.rounded_checkpoint import SETTINGS, save_rounded
from benchmarks.presets.tiny_text import documents
from reference_server.messages import Batch, ChooserParameters, Request, StoppingParameters, WarmupReply, WarmupRequest
from reference_server.model_server.calls.local_shard import LocalShard
from reference_server.model_server.distributed import RankGroup
from reference_server.model_server.models import loader
from reference_server.model_server.options import EngineOptions
from reference_server.model_server.quantization.integers import float_products, instructions
from reference_server.tokenizer import load_tokenizer

PROMPT_TOKENS = 128
BLOCK_SIZE = 16
WINDOW = 512
"""Tokens that are predicted together, each from those before it in the window."""
DECODE_S = 3.0
"""Time limit of decoding in one round; a few steps are enough for a slow method."""


@dataclass(frozen=True, slots=True)
class MethodPlan:
    """Settings of the measurement, equal for all methods. memory_gib: for each model and its K/V cache."""

    model_id: str
    rounds: int
    new_tokens: int
    text_tokens: int
    memory_gib: float
    limit_s: float
    folder: Path


@dataclass(frozen=True, slots=True)
class Speed:
    """One round of one method. ttft_ms: prefill of one prompt. tokens/s: of the decode steps."""

    tokens_per_s_1: float
    tokens_per_s_8: float
    ttft_ms: float


@dataclass(frozen=True, slots=True)
class Predictions:
    """Perplexity, and KL divergence per token from the plain model.

    kl_float_products: with the same weights, but a plain head, if the compiled product rounds activations; else None.
    """

    perplexity: float
    kl_per_token: float
    kl_float_products: float | None


class Served:
    """The model of one method, loaded and warmed up."""

    def __init__(self, method: str, plan: MethodPlan) -> None:
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

    def close(self) -> None:
        """Close the shard and the event loop."""
        self._shard.close()
        self._runner.close()

    def speed(self) -> Speed:
        """Measure one sequence, then eight."""
        one, ttft_ms = self._runner.run(generate(self._shard, 1, self._plan.new_tokens))
        eight, _ = self._runner.run(generate(self._shard, 8, self._plan.new_tokens))
        return Speed(one, eight, ttft_ms)

    def predictions(self) -> Predictions:
        """Predictions of the text. The plain model must be measured first."""
        ids = text_ids(self._options, self._plan.text_tokens)
        logprobs = log_probabilities(self._options, ids)
        path = self._plan.folder / "plain.pt"
        if self._method == "none":
            torch.save(logprobs, path)
        plain: Tensor = torch.load(path)
        loss = -logprobs[:-1].gather(1, ids[1:, None]).mean()
        kernels = self.facts.backends["kernels"].split(",")
        unrounded = None
        if any(name.endswith(f"-{instructions()}") for name in kernels):
            with float_products():
                unrounded = divergence(plain, log_probabilities(self._options, ids))
        return Predictions(loss.exp().item(), divergence(plain, logprobs), unrounded)


async def generate(shard: LocalShard, count: int, new_tokens: int) -> tuple[float, float]:
    """Tokens/s of the decode steps within DECODE_S, and milliseconds of the prefill."""
    start = time.perf_counter()
    step = await shard.prefill(Batch(1, requests(count, new_tokens)))
    first = time.perf_counter()
    produced = 0
    while step.batch is not None and time.perf_counter() - first < DECODE_S:
        step = await shard.decode([step.batch])
        produced += len(step.generations)
    elapsed = time.perf_counter() - first
    await shard.clear_cache()
    return produced / elapsed, (first - start) * 1000


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
    """The first `count` tokens of the fixed text."""
    files = loader.locate(options)
    vocabulary = json.loads((files.directory / "config.json").read_text())["vocab_size"]
    text = "\n".join(itertools.islice(documents(11), max(40, count // 40)))
    return torch.tensor(load_tokenizer(files.tokenizer_directory, vocabulary).encode(text, True)[:count])


@torch.no_grad()
def log_probabilities(options: EngineOptions, ids: Tensor) -> Tensor:
    """[tokens, vocabulary], computed with Transformers' modules in windows of WINDOW tokens."""
    padded = EngineOptions(options.model_id, quantize=options.quantize, compute_threads=1, tier="padded")
    model = loader.load(padded, loader.locate(padded), RankGroup(0, 1)).model
    logits = [model(window[None], use_cache=False).logits[0].float() for window in ids.split(WINDOW)]
    return torch.cat(logits).log_softmax(-1)


def divergence(plain: Tensor, other: Tensor) -> float:
    """Mean KL divergence of log probabilities [tokens, vocabulary]."""
    return (plain.exp() * (plain - other)).sum(-1).mean().item()

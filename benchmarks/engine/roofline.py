"""Memory bandwidth and matrix-product throughput of this machine, and the resulting limit of decode speed."""

import functools
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

LONG_S = 0.05
"""A product that takes this long is not followed by one of eight times its size."""


@dataclass(frozen=True, slots=True)
class Roofline:
    """Measured with the compute threads of a server."""

    threads: int
    read_gb_per_s: float
    bf16_gflop_per_s: float
    fp32_gflop_per_s: float

    def decode_tokens_per_s(self, weights: int, rows: int, itemsize: int) -> float:
        """The upper bound: each step reads all weights once and multiplies them once per row; attention is ignored.

        Weights of two bytes can also be multiplied as float32, which is faster without instructions for bfloat16.
        """
        flops = max(self.bf16_gflop_per_s, self.fp32_gflop_per_s) if itemsize == 2 else self.fp32_gflop_per_s
        step_s = max(weights * itemsize / self.read_gb_per_s, 2 * weights * rows / flops) / 1e9
        return rows / step_s


def measure(threads: int) -> Roofline:
    """Measure this machine, which takes a few seconds and half a gigabyte."""
    import torch

    torch.set_num_threads(threads)
    stream = torch.ones(64_000_000, dtype=torch.int64)
    rates = (_gflop_per_s(dtype) for dtype in (torch.bfloat16, torch.float32))
    return Roofline(threads, stream.nbytes / _best_s(stream.sum) / 1e9, *rates)


def weights_a_step(config: dict[str, Any]) -> int:
    """The number of weights in a decode step of a Llama or BLOOM: those of the layers and of the head."""
    hidden = config.get("hidden_size") or config["n_embed"]
    layers = config.get("num_hidden_layers") or config["n_layer"]
    head = config["vocab_size"] * hidden
    if "intermediate_size" not in config:
        return int(layers * 12 * hidden * hidden + head)
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or hidden // heads
    attention = hidden * head_dim * (2 * heads + 2 * config.get("num_key_value_heads", heads))
    return int(layers * (attention + 3 * hidden * config["intermediate_size"]) + head)


def _gflop_per_s(dtype: Any) -> float:
    """Of products of square matrices, which grow until one takes long: some processors have no product of bfloat16."""
    import torch

    rate = 0.0
    for size in (256, 512, 1024, 2048):
        square = torch.randn(size, size).to(dtype)
        seconds = _best_s(functools.partial(torch.matmul, square, square))
        rate = max(rate, 2 * size**3 / seconds / 1e9)
        if seconds > LONG_S:
            break
    return rate


def _best_s(call: Callable[[], object]) -> float:
    call()
    times = []
    for _ in range(5):
        started = time.perf_counter()
        call()
        times.append(time.perf_counter() - started)
    return min(times)

"""Level K, single kernels: ceilings of the device, decode attention, packed and separate projections."""

import itertools
from collections.abc import Iterator, Sequence
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from reference_server.model_server.attention.kernel import AttentionNeeds, AttentionOptions
from reference_server.model_server.attention.select import AttentionChoice, choose
from reference_server.model_server.attention.staging import tensors_on
from reference_server.model_server.measure.record import MeasurePlan, Record, smi_facts
from reference_server.model_server.measure.timing import median_and_spread
from reference_server.model_server.memory.kv_cache import LayerCache, blocks_for
from reference_server.model_server.options import EngineOptions
from reference_server.model_server.step_state import Step, StepMetadata

HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128
DTYPE = torch.bfloat16
# Input sets are used in turn, so that no cache of the device holds them.
SETS = 4
MAX_SETS_BYTES = 24 << 30
HIDDEN, INTERMEDIATE = 4096, 14336
NUM_EMPTY_KERNELS = 100


def measure_ceilings(record: Record, plan: MeasurePlan) -> None:
    """Copy and read bandwidth in bytes/s, matrix products in FLOP/s, time of an empty kernel in a CUDA graph."""
    device = record.device
    source = torch.empty(plan.ceiling_bytes // 2, dtype=torch.int16, device=device).random_()
    target = torch.empty_like(source)
    copy_ms, _ = median_and_spread(device, lambda: target.copy_(source), 2, 6)
    record.ceilings["copy_bytes_per_s"] = 2 * source.nbytes / copy_ms * 1e3
    words = source.view(torch.float32).nan_to_num_()
    read_ms, _ = median_and_spread(device, words.sum, 2, 6)
    record.ceilings["read_bytes_per_s"] = source.nbytes / read_ms * 1e3
    # Random data, because zeros draw less power and run at higher clocks.
    left = torch.randn(plan.square, plan.square, device=device).to(torch.bfloat16)
    right = torch.randn(plan.square, plan.square, device=device).to(torch.bfloat16)
    product_ms, _ = median_and_spread(device, lambda: left @ right, 3, 10)
    record.ceilings["bf16_flop_per_s"] = 2 * plan.square**3 / product_ms * 1e3
    # Read now: the clocks are those of a busy device.
    record.device_facts |= smi_facts(device)
    if device.type == "cuda":
        record.ceilings["us_per_graphed_kernel"] = _graphed_kernel_us(device)


def _graphed_kernel_us(device: torch.device) -> float:
    """Microseconds of one of many tiny dependent kernels in a graph."""
    number = torch.zeros(1, device=device)
    number.add_(1)
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(NUM_EMPTY_KERNELS):
            number.add_(1)
    replay_ms, _ = median_and_spread(device, graph.replay, 3, 20)
    return replay_ms * 1e3 / NUM_EMPTY_KERNELS


def measure(record: Record, plan: MeasurePlan, attention: str | None) -> None:
    """Time decode attention and projections of an 8B Llama."""
    needs = AttentionNeeds(record.device.type, DTYPE, frozenset({HEAD_DIM}))
    choice = choose(EngineOptions("model", attention=attention), needs)
    for rows, context in itertools.product(plan.kernel_batches, plan.kernel_contexts):
        name = f"K decode attention b={rows} ctx={context}"
        record.attempt(name, partial(_decode_attention, record, plan, choice, rows, context))
    record.attempt("K projections", lambda: _projections(record, plan))


def _decode_attention(record: Record, plan: MeasurePlan, choice: AttentionChoice, rows: int, context: int) -> None:
    pages = rows * blocks_for(context, choice.block_size)
    shape = (pages + 1, 2, KV_HEADS, choice.block_size, HEAD_DIM)
    sets = SETS if SETS * np.prod(shape) * DTYPE.itemsize <= MAX_SETS_BYTES else 1
    caches = [LayerCache(torch.randn(shape, dtype=DTYPE, device=record.device)) for _ in range(sets)]
    query = torch.randn((rows, HEADS, HEAD_DIM), dtype=DTYPE, device=record.device)
    table = np.random.default_rng(1).permutation(pages).reshape(rows, -1) + 1
    lengths = np.full(rows, context, dtype=np.int64)
    metadata = StepMetadata(lengths, table, np.ones(rows, dtype=np.int64), lengths, rows)
    step = Step(metadata, tensors_on(record.device, metadata))
    options, in_turn = AttentionOptions(HEAD_DIM**-0.5), itertools.cycle(caches)

    def attend() -> Tensor:
        return choice.decode(query, next(in_turn), step, options)

    value, spread = median_and_spread(record.device, attend, plan.warmups, plan.replays)
    size = 2 * rows * context * KV_HEADS * HEAD_DIM * DTYPE.itemsize
    bytes_per_s = record.ceilings.get("copy_bytes_per_s")
    record.add(
        *("llama-3.1-8b", "K", "decode attention", rows, context, value),
        floor=None if bytes_per_s is None else size / bytes_per_s * 1e3,
        spread=spread,
        settings={"kernel": choice.decode.name, "gb_per_s": size / value / 1e6},
    )


def _multiply(hidden: Tensor, weights: Iterator[Sequence[Tensor]]) -> list[Tensor]:
    return [F.linear(hidden, weight) for weight in next(weights)]


def _projections(record: Record, plan: MeasurePlan) -> None:
    """Time one packed product, and the same product in separate parts."""
    parts = {
        "qkv": (HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM),
        "gate_up": (INTERMEDIATE, INTERMEDIATE),
    }
    for name, outputs in parts.items():
        whole = [torch.randn((sum(outputs), HIDDEN), dtype=DTYPE, device=record.device) for _ in range(SETS)]
        for rows in plan.kernel_batches:
            hidden = torch.randn((rows, HIDDEN), dtype=DTYPE, device=record.device)
            forms: dict[str, list[Sequence[Tensor]]] = {
                "packed": [(weight,) for weight in whole],
                "separate": [torch.split(weight, list(outputs)) for weight in whole],
            }
            for form, weights in forms.items():
                multiply = partial(_multiply, hidden, itertools.cycle(weights))
                value, spread = median_and_spread(record.device, multiply, plan.warmups, plan.replays)
                record.add("llama-3.1-8b", "K", f"{name} {form}", rows, 0, value, spread=spread)

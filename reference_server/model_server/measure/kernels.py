"""Level K: decode attention in bytes of K/V a second, and projections packed and apart."""

import itertools
from collections.abc import Iterator, Sequence
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from reference_server.model_server.attention import backend
from reference_server.model_server.attention.backend import AttentionChoice, AttentionNeeds
from reference_server.model_server.attention.state import AttentionMetadata, AttentionOptions
from reference_server.model_server.kv_cache import blocks_for
from reference_server.model_server.measure.record import Plan, Record, median_and_spread
from reference_server.model_server.options import EngineOptions

HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128
DTYPE = torch.bfloat16
# Sets of inputs taken in turn, so that no cache of the device holds them.
SETS = 4
MOST_BYTES = 24 << 30
HIDDEN, INTERMEDIATE = 4096, 14336


def measure(record: Record, plan: Plan, attention: str | None) -> None:
    """The shapes of an 8B Llama."""
    needs = AttentionNeeds(record.device.type, DTYPE, frozenset({HEAD_DIM}))
    choice = backend.choose(EngineOptions("model", attention=attention), needs)
    for rows, context in itertools.product(plan.kernel_batches, plan.kernel_contexts):
        name = f"K decode attention b={rows} ctx={context}"
        record.attempt(name, partial(_decode_attention, record, plan, choice, rows, context))
    record.attempt("K projections", lambda: _projections(record, plan))


def _decode_attention(record: Record, plan: Plan, choice: AttentionChoice, rows: int, context: int) -> None:
    pages = rows * blocks_for(context, choice.block_size)
    shape = (pages + 1, 2, KV_HEADS, choice.block_size, HEAD_DIM)
    sets = SETS if SETS * np.prod(shape) * DTYPE.itemsize <= MOST_BYTES else 1
    caches = [torch.randn(shape, dtype=DTYPE, device=record.device) for _ in range(sets)]
    query = torch.randn((rows, HEADS, HEAD_DIM), dtype=DTYPE, device=record.device)
    table = np.random.default_rng(1).permutation(pages).reshape(rows, -1) + 1
    lengths = np.full(rows, context, dtype=np.int64)
    metadata = AttentionMetadata(lengths, table, np.ones(rows, dtype=np.int64), lengths, rows)
    options, in_turn = AttentionOptions(HEAD_DIM**-0.5), itertools.cycle(caches)

    def attend() -> Tensor:
        return choice.decode(query, next(in_turn), metadata, options)

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


def _projections(record: Record, plan: Plan) -> None:
    """One packed product of an input against its parts, one after the other."""
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
                "apart": [torch.split(weight, list(outputs)) for weight in whole],
            }
            for form, weights in forms.items():
                multiply = partial(_multiply, hidden, itertools.cycle(weights))
                value, spread = median_and_spread(record.device, multiply, plan.warmups, plan.replays)
                record.add("llama-3.1-8b", "K", f"{name} {form}", rows, 0, value, spread=spread)

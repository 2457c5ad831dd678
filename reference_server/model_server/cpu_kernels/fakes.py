"""The result shapes of the compiled operators, which torch needs for tracing and checks."""

from typing import Any

import torch
from torch import Tensor

INTEGER_LINEARS = ("integer_linear_vnni", "integer_linear_avx2")
"""The product of int8 rows and packed integers, by instruction set; a library has one of them at most."""


def register(operators: Any) -> None:
    """Register the shape function of every operator but `walk`, whose result depends on the table that it reads."""
    if hasattr(operators, "linear"):
        torch.library.register_fake("reference_server_cpu::linear")(_linear)
    if hasattr(operators, "float8_linear"):
        torch.library.register_fake("reference_server_cpu::float8_linear")(_float8_linear)
    for name in INTEGER_LINEARS:
        if hasattr(operators, name):
            torch.library.register_fake(f"reference_server_cpu::{name}")(_integer_linear)
    if hasattr(operators, "adapters"):
        torch.library.register_fake("reference_server_cpu::adapters")(_nothing)
    torch.library.register_fake("reference_server_cpu::attend_decode")(_like_the_query)
    torch.library.register_fake("reference_server_cpu::attend_prefill")(_like_the_query)
    torch.library.register_fake("reference_server_cpu::store")(_nothing)
    torch.library.register_fake("reference_server_cpu::add_norm")(_add_norm)
    torch.library.register_fake("reference_server_cpu::norm_heads")(_nothing)
    torch.library.register_fake("reference_server_cpu::rotate")(_nothing)
    torch.library.register_fake("reference_server_cpu::silu_mul")(_silu_mul)
    torch.library.register_fake("reference_server_cpu::greedy")(_greedy)


def _linear(hidden: Tensor, _packed: Tensor, _bias: Tensor | None, outputs: int) -> Tensor:
    return hidden.new_empty((hidden.shape[0], outputs))


def _float8_linear(
    hidden: Tensor, _packed: Tensor, _factors: Tensor, _bias: Tensor | None, outputs: int, _group: int
) -> Tensor:
    return hidden.new_empty((hidden.shape[0], outputs))


def _integer_linear(rows: Tensor, *operands: Any) -> Tensor:
    outputs: int = operands[5]
    return rows.new_empty((rows.shape[0], outputs))


def _like_the_query(query: Tensor, *_: object) -> Tensor:
    return query.new_empty(query.shape)


def _add_norm(residual: Tensor, *_: object) -> Tensor:
    return residual.new_empty(residual.shape)


def _silu_mul(gate_up: Tensor) -> Tensor:
    return gate_up.new_empty((gate_up.shape[0], gate_up.shape[1] // 2))


def _greedy(logits: Tensor) -> tuple[Tensor, Tensor]:
    rows = logits.shape[:1]
    return logits.new_empty(rows, dtype=torch.int64), logits.new_empty(rows, dtype=torch.float32)


def _nothing(*_: object) -> None:
    return None

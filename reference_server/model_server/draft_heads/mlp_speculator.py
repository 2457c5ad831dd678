"""MLP speculators: a chain of heads; each head also reads the token of the previous head (arXiv:2404.19124).

TGI's layout (server/text_generation_server/layers/mlp.py): `speculator.{emb,proj,head,ln}.I` of head I; with
`tie_weights` all heads share emb, head and ln 0, and all heads except the first share proj 1. The weights of state and
token depend on the number of trained heads, `n_predict`; in TGI they depend on `--speculate`. Every rank holds all
heads.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from reference_server.model_server.draft_heads.base_model import BaseModel
from reference_server.model_server.draft_heads.weights import MOST_HEADS, SpeculatorWeights, best_of, number_of, packed
from reference_server.model_server.models.fused.walk import Linear
from reference_server.model_server.weights.files import weight_files

EPSILON = 1e-6
MOST_INNER = 1 << 16


@dataclass(frozen=True, slots=True)
class SpeculatorHead:
    """One head. embedding: [vocab_size, inner_dim]. scale, shift: [inner_dim], of its norm."""

    embedding: Tensor
    project: Linear
    output: Linear
    scale: Tensor
    shift: Tensor


class MLPSpeculator:
    """All heads. scales_input: the hidden state is normed first."""

    name = "mlp-speculator"

    def __init__(
        self, heads: tuple[SpeculatorHead, ...], inner_dim: int, *, scales_input: bool, weight_bytes: int
    ) -> None:
        self._heads = heads
        self._scales_input = scales_input
        self.weight_bytes = weight_bytes
        # At the last head, the base model's state contributes half of the sum of squares.
        self._state_weight = 0.5 ** (0.5 / len(heads))
        self._token_weight = math.sqrt(1 - self._state_weight**2) * math.sqrt(inner_dim / 2)

    def guess(self, hidden: Tensor, newest: Tensor, count: int, /) -> tuple[Tensor, Tensor]:
        """The choices of the first `count` heads."""
        state, ids = hidden, newest
        if self._scales_input:
            state = _normed(state) / math.sqrt(2)
        choices = []
        for head in self._heads[:count]:
            token = F.embedding(ids, head.embedding) * self._token_weight
            state = head.project(state) * self._state_weight + token
            state = F.gelu(_normed(state) * head.scale + head.shift)
            choices.append(best_of(head.output(state)))
            ids = choices[-1][0]
        return torch.stack([ids for ids, _ in choices], 1), torch.stack([logprobs for _, logprobs in choices], 1)


def _normed(states: Tensor) -> Tensor:
    """Divided by the root of the mean square of each row."""
    return states * torch.rsqrt(states.pow(2).mean(-1, keepdim=True) + EPSILON)


def load_mlp_speculator(
    directory: Path, config: Mapping[str, Any], base: BaseModel, dtype: torch.dtype, device: torch.device
) -> MLPSpeculator:
    """Read the heads. Raises StartupError."""
    num_heads, inner = number_of(config, "n_predict", MOST_HEADS), number_of(config, "inner_dim", MOST_INNER)
    weights = SpeculatorWeights.open(weight_files(directory), dtype, device)
    vocab_size, size = base.vocab_size, base.hidden_size

    def projection(number: int) -> Linear:
        inputs = inner if number else size
        return packed(weights.linear(f"speculator.proj.{number}", inner, inputs))

    def head(number: int, project: Linear) -> SpeculatorHead:
        return SpeculatorHead(
            weights.take(f"speculator.emb.{number}.weight", vocab_size, inner),
            project,
            packed(weights.linear(f"speculator.head.{number}", vocab_size, inner)),
            weights.take(f"speculator.ln.{number}.weight", inner),
            weights.take(f"speculator.ln.{number}.bias", inner),
        )

    if config.get("tie_weights") and num_heads > 1:
        first, later = head(0, projection(0)), projection(1)
        shared = SpeculatorHead(first.embedding, later, first.output, first.scale, first.shift)
        heads = (first, *[shared] * (num_heads - 1))
    else:
        heads = tuple(head(number, projection(number)) for number in range(num_heads))
    return MLPSpeculator(heads, inner, scales_input=bool(config.get("scale_input")), weight_bytes=weights.num_bytes)

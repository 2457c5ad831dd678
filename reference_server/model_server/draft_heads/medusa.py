"""Medusa heads: each guesses one of the next tokens from the hidden state alone (arXiv:2401.10774, section 2.1.1).

TGI's layouts (server/text_generation_server/layers/medusa.py): `I.L.linear` is the residual block L of head I. V1 has
an output matrix of each head after its blocks, `I.N.weight`; V2 has one block and no such matrix, and takes its logits
from the base model's output head. Every rank holds all heads.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from reference_server.errors import StartupError
from reference_server.model_server.draft_heads.base_model import BaseModel
from reference_server.model_server.draft_heads.weights import MOST_HEADS, SpeculatorWeights, best_of, number_of, packed
from reference_server.model_server.models.fused.walk import Linear

FILES = ("medusa_lm_head.safetensors", "medusa_lm_head.pt")
MOST_LAYERS = 16


class MedusaHeads:
    """All heads. first: the first block of every head in one product. blocks: the later ones of each head.

    outputs: the output matrix of each head; empty for V2, which uses `head`.
    """

    def __init__(
        self,
        first: Linear,
        blocks: Sequence[Sequence[Linear]],
        outputs: Sequence[Linear],
        head: Linear,
        weight_bytes: int,
    ) -> None:
        self._first = first
        self._blocks = blocks
        self._outputs = outputs
        self._head = head
        self.weight_bytes = weight_bytes
        self.name = f"medusa-v{1 if outputs else 2}"

    def guess(self, hidden: Tensor, _newest: Tensor, count: int, /) -> tuple[Tensor, Tensor]:
        """The choices of the first `count` heads; a head does not depend on the choices of others."""
        rows, size = hidden.shape
        first = F.silu(self._first(hidden)).view(rows, -1, size)[:, :count]
        if not self._outputs:
            guessed = (first + hidden[:, None]).view(-1, size)
            return best_of(self._head(guessed).view(rows, count, -1))
        # By head, so that the rows of each head are contiguous.
        by_head = torch.add(first.transpose(0, 1), hidden, out=first.new_empty(count, rows, size))
        logits = [self._output(place, own) for place, own in enumerate(by_head.unbind())]
        return best_of(torch.stack(logits, 1))

    def _output(self, place: int, hidden: Tensor) -> Tensor:
        for block in self._blocks[place]:
            hidden = hidden + F.silu(block(hidden))
        return self._outputs[place](hidden)


def load_medusa(
    directory: Path, config: Mapping[str, Any], base: BaseModel, dtype: torch.dtype, device: torch.device
) -> MedusaHeads:
    """Read the heads. Raises StartupError."""
    num_heads = number_of(config, "medusa_num_heads", MOST_HEADS)
    num_layers = number_of(config, "medusa_num_layers", MOST_LAYERS)
    files = [directory / name for name in FILES if (directory / name).is_file()]
    if not files:
        raise StartupError(f"there is no {FILES[0]}")
    weights = SpeculatorWeights.open(files[:1], dtype, device)
    size = base.hidden_size
    has_outputs = f"0.{num_layers}.weight" in weights
    if not has_outputs and num_layers != 1:
        raise StartupError(f"`medusa_num_layers` is {num_layers}, but heads without `0.{num_layers}.weight` have 1")

    def block(head: int, layer: int) -> Any:
        return weights.linear(f"{head}.{layer}.linear", size, size, has_bias=True)

    first = packed(*(block(head, 0) for head in range(num_heads)))
    blocks = [[packed(block(head, layer)) for layer in range(1, num_layers)] for head in range(num_heads)]
    outputs = [
        packed(weights.linear(f"{head}.{num_layers}", base.vocab_size, size))
        for head in range(num_heads if has_outputs else 0)
    ]
    return MedusaHeads(first, blocks, outputs, base.head, weights.num_bytes)

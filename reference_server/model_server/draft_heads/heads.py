"""The protocol of draft heads, and the kinds of a speculator's checkpoint."""

from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from reference_server.errors import ArgumentError, StartupError
from reference_server.json_files import read_json
from reference_server.model_server.draft_heads.base_model import BaseModel
from reference_server.model_server.draft_heads.medusa import load_medusa
from reference_server.model_server.draft_heads.mlp_speculator import load_mlp_speculator
from reference_server.model_server.draft_heads.weights import MOST_HEADS, number_of


class DraftHeads(Protocol):
    """Heads that draft the tokens after the newest token, from the hidden state that produced the newest token."""

    @property
    def name(self) -> str: ...

    @property
    def weight_bytes(self) -> int: ...

    def guess(self, hidden: Tensor, newest: Tensor, count: int, /) -> tuple[Tensor, Tensor]:
        """The choices of the first `count` heads: ids [rows, count] int64 and their logprobs [rows, count] float32.

        hidden: [rows, hidden]. newest: [rows] int64, the tokens chosen from it.
        """
        ...


def num_drafted(directory: Path | None, speculate: int | None) -> int:
    """Largest number of tokens in a draft: `--speculate`, else all heads of a speculator, else 0.

    directory: that of the speculator, if there is one. Raises ArgumentError for more tokens than heads.
    """
    if directory is None:
        return speculate or 0
    config = read_json(directory / "config.json")
    name = "medusa_num_heads" if "medusa_num_heads" in config else "n_predict"
    heads = number_of(config, name, MOST_HEADS)
    if speculate is not None and speculate > heads:
        raise ArgumentError(
            f"`--speculate {speculate}` needs {speculate} heads, but the speculator has {heads} (`{name}`): "
            f"give at most {heads}"
        )
    return heads if speculate is None else speculate


def load_heads(directory: Path, base: BaseModel, dtype: torch.dtype, device: torch.device) -> DraftHeads:
    """Read the heads of a speculator. Raises StartupError for missing weights, or for weights of another base model."""
    config = read_json(directory / "config.json")
    try:
        if "medusa_num_heads" in config:
            return load_medusa(directory, config, base, dtype, device)
        return load_mlp_speculator(directory, config, base, dtype, device)
    except StartupError as error:
        raise StartupError(f"the speculator in {directory} does not fit its base model: {error}") from error

"""The parts of the base model that draft heads use."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class BaseModel:
    """Sizes, and the output head: [rows, hidden_size] -> [rows, vocab_size]."""

    hidden_size: int
    vocab_size: int
    head: Callable[[Tensor], Tensor]

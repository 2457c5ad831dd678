"""The base model as draft heads see it."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class BaseModel:
    """Sizes, and the output head: [rows, hidden_size] -> [rows, vocab_size]."""

    hidden_size: int
    vocab_size: int
    head: Callable[[Tensor], Tensor]

"""The hidden states that draft heads read: the input of the output head for the newest chosen token."""

from typing import NamedTuple

from torch import Tensor


class HiddenStates:
    """Keeps the input of the output head in the last forward: [logit rows, hidden], in the model's dtype."""

    __slots__ = ("rows",)

    def __init__(self) -> None:
        self.rows: Tensor | None = None


class HiddenRow(NamedTuple):
    """One row of a step's hidden states: [rows, hidden].

    num_ids: of the sequence, with the token that was chosen from this row.
    """

    states: Tensor
    row: int
    num_ids: int

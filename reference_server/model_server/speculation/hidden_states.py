"""The hidden states that draft heads read: the input of the output head for the newest chosen token."""

from typing import NamedTuple

from torch import Tensor


class HiddenStates:
    """Keeps the input of the output head in the last forward: [logit rows, hidden], in the model's dtype.

    is_read: whether drafts are computed from the next forward; otherwise the forward need not copy its states.
    """

    __slots__ = ("is_read", "rows")

    def __init__(self) -> None:
        self.rows: Tensor | None = None
        self.is_read = True


class HiddenRow(NamedTuple):
    """One row of a step's hidden states: [rows, hidden].

    num_ids: number of ids of the sequence, including the token that was chosen from this row.
    """

    states: Tensor
    row: int
    num_ids: int

"""The tokens that a source of drafts proposes for one request."""

from collections.abc import Sequence
from typing import NamedTuple

NUM_LEVELS = 5
"""Number of classes of proposed tokens. The acceptance of each class is estimated separately."""


class ProposedDraft(NamedTuple):
    """Ids that may follow those of a request, each with its class: the length of the match for n-grams, the confidence
    for heads."""

    ids: Sequence[int]
    levels: Sequence[int]


NO_PROPOSAL = ProposedDraft((), ())

"""The tokens that a source of drafts proposes for one request."""

from collections.abc import Sequence
from typing import NamedTuple

NUM_LEVELS = 5
"""Classes of a proposed token, whose acceptance is estimated class by class."""


class ProposedDraft(NamedTuple):
    """Ids that may follow a request's, each with its class: of n-grams the length of the match, of heads the
    confidence."""

    ids: Sequence[int]
    levels: Sequence[int]


NO_PROPOSAL = ProposedDraft((), ())

"""Drafts by heads: one forward of the heads for all sequences of a step."""

from collections.abc import Sequence as SequenceOf

import torch
from torch import Tensor

from reference_server.model_server.decoding.host_copy import to_device
from reference_server.model_server.distributed import RankGroup
from reference_server.model_server.draft_heads.heads import DraftHeads
from reference_server.model_server.sequence import Sequence
from reference_server.model_server.speculation.hidden_states import HiddenRow
from reference_server.model_server.speculation.proposed_draft import NO_PROPOSAL, NUM_LEVELS, ProposedDraft

CONFIDENCES = (0.3, 0.6, 0.8, 0.95)
"""The lowest probabilities of the levels 1, 2, 3 and 4. The head computes the probability of its token."""
PRIORS = (0.2, 0.45, 0.7, 0.87, 0.97)
"""Assumed acceptance by level before outcomes are known, near the heads' own probabilities."""


class HeadsSource:
    """Proposes the choices of the heads. The level of a token is the class of its head's probability."""

    def __init__(self, heads: DraftHeads, group: RankGroup) -> None:
        self._heads = heads
        self._group = group
        self._confidences: Tensor | None = None

    @property
    def priors(self) -> SequenceOf[float]:
        return PRIORS

    def propose(self, sequences: SequenceOf[Sequence], counts: SequenceOf[int], /) -> list[ProposedDraft]:
        """Proposals of the lengths `counts`; none for a sequence whose newest token has no hidden state here."""
        proposals = [NO_PROPOSAL] * len(sequences)
        known = [
            (place, sequence.hidden, sequence.ids[-1])
            for place, (sequence, count) in enumerate(zip(sequences, counts, strict=True))
            if count and sequence.hidden is not None and sequence.hidden.num_ids == len(sequence.ids)
        ]
        if not known:
            return proposals
        places, rows, newest = zip(*known, strict=True)
        hidden = gathered(rows)
        ids, logprobs = self._heads.guess(hidden, to_device(list(newest), hidden.device), max(counts))
        levels = torch.bucketize(logprobs, self._bounds(hidden.device))
        # The logits of two ranks may differ in the last bit.
        coded = self._group.broadcast(ids * NUM_LEVELS + levels).tolist()
        for place, codes in zip(places, coded, strict=True):
            own = codes[: counts[place]]
            proposals[place] = ProposedDraft([code // NUM_LEVELS for code in own], [code % NUM_LEVELS for code in own])
        return proposals

    def _bounds(self, device: torch.device) -> Tensor:
        if self._confidences is None:
            self._confidences = torch.tensor(CONFIDENCES, device=device).log()
        return self._confidences


def gathered(rows: SequenceOf[HiddenRow]) -> Tensor:
    """[rows, hidden], in order. Most rows come from one step, so the rows of a step are gathered together."""
    first = rows[0].states
    if all(row.states is first for row in rows):
        if len(rows) == 1:
            return first[rows[0].row :][:1]
        numbers = [row.row for row in rows]
        if numbers == list(range(len(first))):
            return first
        return first.index_select(0, to_device(numbers, first.device))
    return torch.stack([row.states[row.row] for row in rows])

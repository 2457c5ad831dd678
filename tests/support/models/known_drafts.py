"""Drafts from outputs that the test knows, some of them with a wrong token, so that both kinds are verified."""

import random
from collections.abc import Mapping, Sequence

from reference_server.model_server.sequence import Sequence as ModelSequence
from reference_server.model_server.speculation.proposed_draft import ProposedDraft

WRONG_SHARE = 0.2


class KnownDrafts:
    """`DraftSource` of requests with these outputs, by request id. Depends on the request and its length only."""

    priors = (0.5,)

    def __init__(self, outputs: Mapping[int, Sequence[int]]) -> None:
        self._outputs = outputs

    def propose(self, sequences: Sequence[ModelSequence], counts: Sequence[int]) -> list[ProposedDraft]:
        return [self._of(sequence, count) for sequence, count in zip(sequences, counts, strict=True)]

    def _of(self, sequence: ModelSequence, count: int) -> ProposedDraft:
        place = len(sequence.ids) - sequence.prompt_len
        chance = random.Random(1000 * sequence.id + place)
        known = self._outputs.get(sequence.id, [])[place : place + chance.randint(0, count)]
        ids = [(id_ + 1) % 90 if chance.random() < WRONG_SHARE else id_ for id_ in known]
        return ProposedDraft(ids, [0] * len(ids))

"""Drafts of heads, from the hidden state of each sequence's newest token only."""

import numpy as np
import torch
from torch import Tensor

from reference_server.messages import ChooserParameters, Request, StoppingParameters
from reference_server.model_server.decoding.detokenize import IncrementalDetokenizer
from reference_server.model_server.decoding.stopping import StoppingCriteria
from reference_server.model_server.distributed import RankGroup
from reference_server.model_server.draft_heads.source import HeadsSource
from reference_server.model_server.sequence import Sequence
from reference_server.model_server.speculation.hidden_states import HiddenRow
from reference_server.presets.catalog import find
from reference_server.tokenizer import load_tokenizer

STATES = torch.tensor([[10.0], [20.0], [30.0]])


class Counting:
    """Heads that guess the hidden state plus 1, 2, ..."""

    name = "counting"
    weight_bytes = 0

    def guess(self, hidden: Tensor, _newest: Tensor, count: int, /) -> tuple[Tensor, Tensor]:
        return hidden.long() + torch.arange(1, 1 + count), torch.zeros(len(hidden), count)


def sequence(hidden: HiddenRow | None) -> Sequence:
    preset = find("preset:tiny-llama")
    assert preset is not None
    tokenizer = load_tokenizer(preset.tokenizer_directory, 4096)
    return Sequence(
        request=Request(0, (), 3, ChooserParameters(), StoppingParameters(20)),
        ids=[1, 2, 3],
        prompt_len=2,
        cache_len=2,
        input_len=1,
        blocks=np.zeros(1, dtype=np.int64),
        stopping=StoppingCriteria(StoppingParameters(20), frozenset()),
        detokenizer=IncrementalDetokenizer(tokenizer, [1, 2, 3]),
        hidden=hidden,
    )


def test_a_sequence_without_the_hidden_state_of_its_newest_token_has_no_draft() -> None:
    rows = [sequence(HiddenRow(STATES, 2, 3)), sequence(None), sequence(HiddenRow(STATES, 1, 2))]

    proposals = HeadsSource(Counting(), RankGroup(0, 1)).propose(rows, [2, 2, 2])

    assert [list(ids) for ids, _ in proposals] == [[31, 32], [], []]

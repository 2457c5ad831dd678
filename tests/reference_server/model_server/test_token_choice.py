"""The chooser of a batch outlasts steps with drafts, whose rows differ each time."""

import numpy as np
import pytest
import torch

from reference_server.messages import ChooserParameters, Request, StoppingParameters
from reference_server.model_server.decoding.detokenize import IncrementalDetokenizer
from reference_server.model_server.decoding.stopping import StoppingCriteria
from reference_server.model_server.decoding.watermark import Watermark
from reference_server.model_server.distributed import RankGroup
from reference_server.model_server.sequence import Sequence
from reference_server.model_server.token_choice import ChoiceRows, ChoosingOptions, TokenChoice
from reference_server.presets.catalog import find
from reference_server.tokenizer import load_tokenizer

VOCAB_SIZE = 50


def sequences(parameters: ChooserParameters) -> tuple[Sequence, ...]:
    preset = find("preset:tiny-llama")
    assert preset is not None
    tokenizer = load_tokenizer(preset.tokenizer_directory, 4096)
    return tuple(
        Sequence(
            request=Request(number, (), 3, parameters, StoppingParameters(20)),
            ids=[1, 2, 3],
            prompt_len=2,
            cache_len=2,
            input_len=1,
            blocks=np.zeros(1, dtype=np.int64),
            stopping=StoppingCriteria(StoppingParameters(20), frozenset()),
            detokenizer=IncrementalDetokenizer(tokenizer, [1, 2, 3]),
        )
        for number in range(2)
    )


@pytest.mark.parametrize(
    "parameters",
    [ChooserParameters(), ChooserParameters(do_sample=True, seed=3), ChooserParameters(frequency_penalty=0.5)],
)
def test_steps_with_drafts_use_and_keep_the_chooser_of_the_sequences(parameters: ChooserParameters) -> None:
    choice = TokenChoice(ChoosingOptions(frozenset(), Watermark(), prompt_logprobs=False), RankGroup(0, 1))
    rows = sequences(parameters)
    logits = torch.randn(6, VOCAB_SIZE, generator=torch.Generator().manual_seed(1))
    _, chooser = choice.choose(None, ChoiceRows.of(rows), logits[:2], None)

    _, after = choice.choose(chooser, ChoiceRows.with_drafts(rows, ((7, 8, 9), (7,))), logits, None)
    assert after is chooser
    for sequence, new in zip(rows, ((7, 8), (7, 9)), strict=True):
        sequence.ids.extend(new)
    chosen, kept = choice.choose(after, ChoiceRows.of(rows), logits[:2], None)

    assert kept is chooser
    expected, _ = choice.choose(None, ChoiceRows.of(rows), logits[:2], None)
    assert chosen.ids.tolist() == expected.ids.tolist()
    assert chosen.logprobs.tolist() == expected.logprobs.tolist()

import math

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from transformers import (
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

from reference_server.messages import ChooserParameters
from reference_server.model_server.decoding.logits import LogitsPipeline, RowParameters
from reference_server.model_server.decoding.watermark import Watermark

CPU = torch.device("cpu")
VOCAB_SIZE = 50


def pipeline(*choosers, vocab_size=VOCAB_SIZE, eos_ids=frozenset({2}), prompt_len=0, min_new_tokens=0):
    rows = [RowParameters(chooser, prompt_len, min_new_tokens) for chooser in choosers]
    return LogitsPipeline(rows, vocab_size, eos_ids, CPU, Watermark())


def scores_of(chooser, logits, ids, **options):
    return pipeline(chooser, vocab_size=logits.shape[-1], **options).process(logits, [ids], None)


@pytest.fixture
def logits():
    return torch.randn(1, VOCAB_SIZE, generator=torch.Generator().manual_seed(0)) * 3


@pytest.mark.parametrize(
    ("chooser", "warper"),
    [
        (ChooserParameters(top_k=7), TopKLogitsWarper(7)),
        (ChooserParameters(top_p=0.7), TopPLogitsWarper(0.7)),
        (ChooserParameters(typical_p=0.6), TypicalLogitsWarper(0.6)),
    ],
)
def test_filters_keep_the_same_ids_as_transformers(logits, chooser, warper):
    assert torch.equal(scores_of(chooser, logits, [1, 4]), warper(torch.tensor([[1, 4]]), logits))


def test_temperature_gives_the_distribution_of_transformers(logits):
    ours = scores_of(ChooserParameters(temperature=0.3), logits, [1]).softmax(-1)

    assert torch.allclose(ours, TemperatureLogitsWarper(0.3)(None, logits).softmax(-1), atol=1e-6)


def test_repetition_penalty_is_that_of_transformers(logits):
    ids = [1, 4, 4, 30, 1]

    ours = scores_of(ChooserParameters(repetition_penalty=1.3), logits, ids)

    assert torch.equal(ours, RepetitionPenaltyLogitsProcessor(1.3)(torch.tensor([ids]), logits.clone()))


def test_frequency_penalty_divides_the_count_by_the_rows_own_length():
    scores = scores_of(ChooserParameters(frequency_penalty=2.0), torch.zeros(1, 5), [3, 3, 3, 1])

    assert scores.tolist() == [[0.0, -0.5, 0.0, -1.5, 0.0]]


def test_presence_penalty_is_for_generated_ids_only_and_once():
    scores = scores_of(ChooserParameters(presence_penalty=0.5), torch.zeros(1, 5), [3, 1, 1, 4, 1], prompt_len=2)

    assert scores.tolist() == [[0.0, -0.5, 0.0, 0.0, -0.5]]


def test_model_server_M14_watermark_adds_delta_to_the_green_list_of_the_rows_own_last_token():
    rows = pipeline(ChooserParameters(watermark=True), ChooserParameters(), vocab_size=10)

    scores = rows.process(torch.zeros(2, 10), [[1, 103], [5]], None)

    assert scores.tolist() == [[0, 0, 0, 0, 2, 2, 0, 2, 2, 2], [0] * 10]


def test_model_server_M12_repetition_penalty_does_not_change_a_shorter_row():
    rows = pipeline(ChooserParameters(repetition_penalty=1.3), ChooserParameters(repetition_penalty=1.3), vocab_size=5)

    scores = rows.process(torch.ones(2, 5), [[3], [1, 2, 3, 4, 4, 4]], None)

    assert scores[0].tolist() == pytest.approx([1, 1, 1, 1 / 1.3, 1])


def test_model_server_M13_frequency_penalty_in_a_ragged_batch_equals_solo():
    chooser = ChooserParameters(frequency_penalty=0.7)
    batch = pipeline(chooser, chooser).process(torch.zeros(2, VOCAB_SIZE), [[3, 3, 1], [7] * 40], None)

    assert torch.equal(batch[:1], scores_of(chooser, torch.zeros(1, VOCAB_SIZE), [3, 3, 1]))


def test_min_new_tokens_filters_every_eos_id_until_they_are_generated():
    rows = pipeline(
        ChooserParameters(), ChooserParameters(), vocab_size=5, eos_ids={1, 4, 99}, prompt_len=2, min_new_tokens=2
    )

    first = rows.process(torch.zeros(2, 5), [[0, 0], [0, 0, 0, 0]], None)
    last = rows.process(torch.zeros(2, 5), [[0, 0, 0], [0, 0, 0, 0, 0]], None)
    after = rows.process(torch.zeros(2, 5), [[0, 0, 0, 0], [0, 0, 0, 0, 0, 0]], None)

    assert first.isinf().tolist() == [[False, True, False, False, True], [False] * 5]
    assert torch.equal(last, first)
    assert after.isfinite().all()


@pytest.mark.parametrize(
    ("parameters", "kept"),
    [
        ({"top_k": 2}, [0, 1, 2]),
        ({"top_k": 99}, [0, 1, 2, 3]),
        ({"top_p": 1e-9}, [2]),
        ({"top_p": 0.999_999}, [0, 1, 2, 3]),
        ({"top_k": -1}, [0, 1, 2, 3]),
    ],
)
def test_edges_of_the_filters(parameters, kept):
    # The second and third largest are equal; of equals, top-p keeps the highest id longest.
    logits = torch.tensor([[1.0, 1.0, 1.0, -2.0]]) if "top_p" in parameters else torch.tensor([[1.0, 1.0, 3.0, -2.0]])

    assert scores_of(ChooserParameters(**parameters), logits, [0]).isfinite().nonzero()[:, 1].tolist() == kept


@settings(max_examples=100)
@given(
    levels=st.lists(st.integers(-3, 3), min_size=1, max_size=12),
    top_p=st.floats(0.01, 0.99) | st.sampled_from([0.25, 0.5, 0.75]),
)
@example(levels=[0, 0], top_p=0.5)
def test_top_p_drops_by_a_stable_ascending_sort_also_among_ties(levels, top_p):
    logits = torch.tensor([levels], dtype=torch.float32)
    ascending, order = logits[0].sort(stable=True)
    cumulative = ascending.softmax(-1).cumsum(-1)
    dropped = [int(id_) for id_, total in zip(order[:-1], cumulative, strict=False) if total <= 1 - torch.tensor(top_p)]

    scores = scores_of(ChooserParameters(top_p=top_p), logits, [0])

    assert scores.isinf().nonzero()[:, 1].tolist() == sorted(dropped)


def test_every_unset_wire_value_is_off(logits):
    zeros = ChooserParameters(temperature=0.0, top_k=0, top_p=0.0, typical_p=0.0, repetition_penalty=0.0)

    assert pipeline(zeros).is_identity
    assert torch.equal(scores_of(zeros, logits, [1, 2]), logits)


def test_the_logits_are_not_changed(logits):
    before = logits.clone()

    scores_of(ChooserParameters(repetition_penalty=2.0, temperature=0.5, top_k=3), logits, [1, 2, 3], min_new_tokens=5)

    assert torch.equal(logits, before)


def test_updates_with_a_growing_sequence_equal_one_update_at_its_end():
    parameters = {"repetition_penalty": 1.4, "frequency_penalty": 0.5, "presence_penalty": 0.3}
    chooser = ChooserParameters(**parameters)
    logits = torch.randn(2, VOCAB_SIZE, generator=torch.Generator().manual_seed(1))
    growing = pipeline(chooser, ChooserParameters(), prompt_len=3)
    ids = [[5, 6, 5], [1, 2, 3]]
    for new in (7, 5, 30, 7):
        growing.process(logits, ids, None)
        ids = [[*row, new] for row in ids]

    followed = growing.process(logits, ids, None)

    assert torch.equal(followed, pipeline(chooser, ChooserParameters(), prompt_len=3).process(logits, ids, None))


def test_a_newest_id_on_the_device_counts_like_one_on_the_host_and_only_once():
    chooser = ChooserParameters(repetition_penalty=1.4, frequency_penalty=0.5, presence_penalty=0.3)
    logits = torch.randn(2, VOCAB_SIZE, generator=torch.Generator().manual_seed(1))
    ids = [[5, 6, 5], [9, 9]]
    ahead = pipeline(ChooserParameters(), chooser, prompt_len=1, min_new_tokens=3)

    for newest in ([7, 8], [7, 9], [4, 4]):
        followed = ahead.process(logits, ids, torch.tensor(newest))
        ids = [[*row, new] for row, new in zip(ids, newest, strict=True)]
        fresh = pipeline(ChooserParameters(), chooser, prompt_len=1, min_new_tokens=3).process(logits, ids, None)
        assert torch.equal(followed, fresh)


def test_a_watermark_needs_its_last_id_on_the_host():
    assert pipeline(ChooserParameters(watermark=True)).needs_host_ids
    assert not pipeline(ChooserParameters(repetition_penalty=2.0)).needs_host_ids


def test_an_id_outside_the_vocabulary_does_not_change_another_row():
    rows = pipeline(ChooserParameters(repetition_penalty=2.0), ChooserParameters(), vocab_size=4)

    scores = rows.process(torch.ones(2, 4), [[1, 5], [0]], None)

    assert scores.tolist() == [[1.0, 0.5, 1.0, 1.0], [1.0] * 4]


def test_infinite_logits_are_not_hidden_by_the_clamp_of_the_penalty():
    logits = torch.tensor([[math.inf, 1.0]])

    assert scores_of(ChooserParameters(repetition_penalty=2.0), logits, [0, 1]).tolist() == [[math.inf, 0.5]]

"""The plan of one packed forward: tokens, slots, rows of the logits."""

from dataclasses import replace
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reference_server.messages import ChooserParameters, Request, StoppingParameters
from reference_server.model_server.batch import SequenceBatch, plan_chunks
from reference_server.model_server.decoding.detokenize import IncrementalDetokenizer
from reference_server.model_server.decoding.stopping import StoppingCriteria
from reference_server.model_server.forward.inputs import build_inputs
from reference_server.model_server.sequence import Sequence
from tests.support.models.word_tokenizer import WordTokenizer

BLOCK_SIZE = 4


def sequence(
    id_: int, ids: list[int], prompt_len: int, cache_len: int, input_len: int, blocks: list[int], logprobs: bool = False
) -> Sequence:
    stopping = StoppingParameters(10)
    return Sequence(
        request=Request(id_, ("",), 100, ChooserParameters(), stopping, prefill_logprobs=logprobs),
        ids=ids,
        prompt_len=prompt_len,
        cache_len=cache_len,
        input_len=input_len,
        blocks=np.array(blocks),
        stopping=StoppingCriteria(stopping, frozenset()),
        detokenizer=IncrementalDetokenizer(WordTokenizer(), ids),
    )


def test_decodes_take_their_last_token_in_batch_order() -> None:
    batch = SequenceBatch(
        1,
        (sequence(0, [5, 6, 7], 2, 2, 1, [9]), sequence(1, [1, 2, 3, 4, 8], 4, 4, 1, [3, 7])),
        BLOCK_SIZE,
    )

    inputs = build_inputs(batch, prompt_logprobs=False)

    assert inputs.input_ids.tolist() == [7, 8]
    assert inputs.positions.tolist() == [2, 4]
    assert inputs.logits_index is None
    assert inputs.metadata.slots.tolist() == [9 * 4 + 2, 7 * 4 + 0]
    assert inputs.metadata.seqlen_k.tolist() == [3, 5]
    assert inputs.metadata.num_single_rows == 2


def test_the_plan_of_a_membership_is_reused_between_decodes() -> None:
    batch = SequenceBatch(1, (sequence(0, [5, 6, 7], 2, 2, 1, [9]), sequence(1, [1, 2], 1, 1, 1, [3])), BLOCK_SIZE)

    first = build_inputs(batch, prompt_logprobs=False)
    batch = replace(batch, plan=first.plan)
    again = build_inputs(batch, prompt_logprobs=False)
    batch.sequences[0].stopped = True
    without_stopped = build_inputs(batch, prompt_logprobs=False)

    assert again.plan is first.plan
    assert without_stopped.input_ids.tolist() == [2]
    assert without_stopped.metadata.block_table.tolist() == [[3]]


def test_single_tokens_are_packed_before_chunks_but_logits_keep_batch_order() -> None:
    chunk = sequence(0, [10, 11, 12, 13, 14], 5, 1, 3, [2, 4])
    decode = sequence(1, [20, 21], 1, 1, 1, [6])
    ending = sequence(2, [30, 31], 2, 0, 2, [8])
    batch = SequenceBatch(1, (chunk, decode, ending), BLOCK_SIZE)

    inputs = build_inputs(batch, prompt_logprobs=False)

    assert inputs.input_ids.tolist() == [21, 11, 12, 13, 30, 31]
    assert inputs.positions.tolist() == [1, 1, 2, 3, 0, 1]
    assert inputs.metadata.slots.tolist() == [25, 9, 10, 11, 32, 33]
    assert inputs.metadata.seqlen_q.tolist() == [1, 3, 2]
    assert inputs.metadata.seqlen_k.tolist() == [2, 4, 2]
    assert inputs.metadata.num_single_rows == 1
    # The chunk is not the prompt's last, so it gives no token.
    assert [each.id for each in inputs.sampled] == [1, 2]
    assert inputs.logits_index is not None
    assert inputs.logits_index.tolist() == [0, 5]


# Of each row: tokens whose K/V exist, new ones, and whether its prompt ends with them.
ROWS = st.lists(st.tuples(st.integers(0, 20), st.integers(1, 12), st.booleans()), min_size=1, max_size=8)


@settings(max_examples=50)
@given(ROWS, st.randoms(use_true_random=False))
def test_every_token_has_one_slot_in_its_own_rows_blocks(rows: list[tuple[int, int, bool]], random: Random) -> None:
    needed = [-(-(cache_len + input_len) // BLOCK_SIZE) for cache_len, input_len, _ in rows]
    blocks = list(range(1, sum(needed) + 1))
    random.shuffle(blocks)
    own = [[blocks.pop() for _ in range(count)] for count in needed]
    sequences = tuple(
        sequence(id_, [7] * (length := cache_len + input_len), length + (not ends), cache_len, input_len, own[id_])
        for id_, (cache_len, input_len, ends) in enumerate(rows)
    )

    inputs = build_inputs(SequenceBatch(1, sequences, BLOCK_SIZE), prompt_logprobs=False)

    attention = inputs.metadata
    slots = attention.slots.tolist()
    assert len(slots) == len(set(slots)) == sum(input_len for _, input_len, _ in rows) == len(inputs.positions)
    ends = np.cumsum(attention.seqlen_q)
    for row, (end, new, length) in enumerate(zip(ends, attention.seqlen_q, attention.seqlen_k, strict=True)):
        table = attention.block_table[row].tolist()
        # The table of a row leads to the slots where its tokens lie, and covers all that it attends to.
        expected = [table[position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE for position in range(length)]
        assert slots[end - new : end] == expected[length - new :]
        assert inputs.positions[end - new : end].tolist() == list(range(length - new, length))
        assert 0 not in table[: -(-int(length) // BLOCK_SIZE)]
    assert (attention.seqlen_q[: attention.num_single_rows] == 1).all()
    assert (attention.seqlen_q[attention.num_single_rows :] > 1).all()


def test_prompt_logprobs_use_the_rows_that_predict_prompt_tokens() -> None:
    first_chunk = sequence(0, [10, 11, 12, 13], 4, 0, 2, [2], logprobs=True)
    last_chunk = sequence(1, [20, 21, 22], 3, 1, 2, [3], logprobs=True)
    batch = SequenceBatch(1, (first_chunk, last_chunk), BLOCK_SIZE)

    inputs = build_inputs(batch, prompt_logprobs=True)

    # Packed: 10 11 21 22. The rows predict 11, 12; 22, and the row of 22 is sampled.
    assert inputs.logits_index is not None
    assert inputs.logits_index.tolist() == [0, 1, 2, 3]
    assert [(span.first_row, span.next_prompt_ids) for span in inputs.spans] == [(0, [11, 12]), (2, [22])]
    assert inputs.sampled_rows is not None
    assert inputs.sampled_rows.tolist() == [3]
    assert [(span.count, span.next_prompt_ids) for span in build_inputs(batch, prompt_logprobs=False).spans] == [
        (1, [])
    ]


@pytest.mark.parametrize(
    ("remaining", "budget", "planned"),
    [
        # From last to first; what has its prompt takes one token, and one is set aside for each other request.
        ([10, 0, 20], 12, [1, 1, 10]),
        ([3, 4], 16, [3, 4]),
        ([9, 4], 9, [4, 4]),
        ([5, 5, 5], 4, [1, 1, 2]),
        ([7], 4, [4]),
    ],
)
def test_chunks_are_planned_as_the_router_counts_them(remaining: list[int], budget: int, planned: list[int]) -> None:
    sequences = [
        sequence(id_, list(range(30)), 30 if left else 29, 30 - left if left else 29, 0, [1])
        for id_, left in enumerate(remaining)
    ]

    plan_chunks(sequences, budget)

    assert [each.input_len for each in sequences] == planned

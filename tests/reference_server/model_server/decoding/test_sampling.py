import doctest
import math
from dataclasses import astuple, replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from reference_server.messages import ChooserParameters
from reference_server.model_server.decoding import sampling
from reference_server.model_server.decoding.logits import RowParameters
from reference_server.model_server.decoding.sampling import (
    HostChoice,
    TokenChooser,
    inverse_cdf,
    splitmix64,
    uniforms,
)

CPU = torch.device("cpu")
VOCAB_SIZE = 40
EOS = frozenset({2})
CHOOSER = ChooserParameters()


def uint64(*values):
    return np.array(values, dtype=np.uint64)


def choose(rows, logits, ids, newest=None):
    return TokenChooser(rows, logits.shape[-1], EOS, CPU).choose(logits, ids, newest).to_host()


def random_logits(rows, seed=0, vocab_size=VOCAB_SIZE):
    return torch.randn(rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * 3


def test_splitmix64_has_its_published_first_outputs():
    assert splitmix64(uint64(0, 0), uint64(0, 1)).tolist() == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4]


def test_the_uniform_of_seed_42_at_position_0():
    assert float(uniforms(uint64(42), uint64(0))[0]) == 0.7415648787718233


def test_doctests():
    assert doctest.testmod(sampling).failed == 0


def test_adding_the_golden_gamma_to_the_seed_shifts_every_position():
    shifted = (42 + 3 * 0x9E3779B97F4A7C15) % 2**64

    assert uniforms(uint64(shifted, shifted), uint64(0, 5)).tolist() == uniforms(uint64(42, 42), uint64(3, 8)).tolist()


def test_uniforms_are_uniform():
    draws = uniforms(np.full(20_000, 7, np.uint64), np.arange(20_000, dtype=np.uint64))

    assert np.histogram(draws, bins=10, range=(0, 1))[0] == pytest.approx(2000, abs=200)


@pytest.mark.parametrize(
    ("uniform", "expected"), [(0.0, 1), (0.25, 1), (0.4999, 1), (0.5, 3), (0.7499, 3), (0.75, 4), (0.99999994, 4)]
)
def test_inverse_cdf_takes_the_first_id_whose_sum_exceeds_the_draw(uniform, expected):
    scores = torch.tensor([[0.0, 0.5, 0.0, 0.25, 0.25, 0.0]]).log()

    assert inverse_cdf(scores, torch.tensor([uniform])).tolist() == [expected]


def test_inverse_cdf_falls_back_to_the_last_kept_id():
    scores = torch.tensor([[0.0, 0.0, -math.inf]])

    assert inverse_cdf(scores, torch.tensor([2.0])).tolist() == [1]


def test_a_draw_just_below_one_is_not_rounded_up_to_it():
    assert sampling.rounded_down(np.array([1 - 2.0**-53])).tolist() == [1 - 2.0**-24]


def test_model_server_M5_same_seed_same_ids_another_seed_others():
    logits = random_logits(8)
    ids = [[1] * (row + 1) for row in range(8)]

    def ids_for(seed):
        return choose([RowParameters(ChooserParameters(do_sample=True, seed=seed))] * 8, logits, ids).ids

    assert ids_for(42) == ids_for(42)
    assert ids_for(42) != ids_for(43)


def test_the_draw_depends_only_on_the_absolute_position():
    row = RowParameters(ChooserParameters(do_sample=True, seed=5))
    logits = random_logits(1)

    on_host = choose([row], logits, [[1, 2, 3, 4]])
    on_device = choose([row], logits, [[1, 2, 3]], torch.tensor([4]))

    assert on_host == on_device


def test_sampled_frequencies_follow_the_distribution():
    logits = torch.tensor([[0.1, 0.2, 0.3, 0.4]]).log().expand(4000, 4)
    rows = [RowParameters(ChooserParameters(do_sample=True, seed=seed)) for seed in range(4000)]

    counts = np.bincount(choose(rows, logits, [[0]] * 4000).ids, minlength=4)

    assert counts / 4000 == pytest.approx([0.1, 0.2, 0.3, 0.4], abs=0.03)


def test_greedy_rows_take_the_best_id_beside_sampled_rows():
    logits = random_logits(3)
    rows = [RowParameters(CHOOSER), RowParameters(ChooserParameters(do_sample=True)), RowParameters(CHOOSER)]

    chosen = choose(rows, logits, [[1]] * 3).ids

    assert [chosen[0], chosen[2]] == [int(logits[0].argmax()), int(logits[2].argmax())]


@pytest.mark.parametrize("sampled", [(), (1,), (0, 2), (0, 1, 2)])
def test_a_repeated_chooser_equals_one_built_for_its_rows(sampled):
    rows = [RowParameters(replace(CHOOSER, do_sample=row in sampled, seed=2**64 - row)) for row in range(3)]
    counts, logits = (1, 4, 2), random_logits(7)
    ids = [[5] * length for length in (3, 9, 10, 11, 12, 4, 5)]
    every = [parameters for parameters, count in zip(rows, counts, strict=True) for _ in range(count)]
    chooser = TokenChooser(rows, VOCAB_SIZE, EOS, CPU)

    repeated = chooser.repeated(counts)

    assert repeated is not None
    assert repeated.choose(logits, ids).to_host() == choose(every, logits, ids)
    assert chooser.choose(logits[:3], ids[:3]).to_host() == choose(rows, logits[:3], ids[:3])


@pytest.mark.parametrize(
    "row",
    [
        RowParameters(replace(CHOOSER, top_k=3)),
        RowParameters(CHOOSER, min_new_tokens=2),
        RowParameters(CHOOSER, top_n_tokens=2),
    ],
)
def test_a_chooser_that_depends_on_the_number_of_its_rows_is_not_repeated(row):
    assert TokenChooser([row, RowParameters(CHOOSER)], VOCAB_SIZE, EOS, CPU).repeated((2, 1)) is None


@pytest.mark.parametrize(
    ("other", "is_used"),
    [
        (RowParameters(CHOOSER), True),
        (RowParameters(replace(CHOOSER, do_sample=True, seed=3)), False),
        (RowParameters(replace(CHOOSER, repetition_penalty=1.5)), False),
        (RowParameters(CHOOSER, min_new_tokens=2), False),
        (RowParameters(CHOOSER, top_n_tokens=2), False),
    ],
)
def test_the_greedy_operator_chooses_only_for_a_batch_whose_rows_are_all_greedy(other, is_used):
    def operator(logits):
        calls.append(len(logits))
        return torch.tensor([7, 7]), torch.tensor([-1.0, -1.0])

    calls, logits, ids = [], random_logits(2), [[5, 6], [5, 6]]
    rows = [RowParameters(CHOOSER), other]

    found = TokenChooser(rows, VOCAB_SIZE, EOS, CPU, greedy_operator=operator).choose(logits, ids).to_host()

    assert calls == ([2] if is_used else [])
    assert found == (
        HostChoice([7, 7], [-1.0, -1.0], [False] * 2, [([], [])] * 2) if is_used else choose(rows, logits, ids)
    )


def test_logprobs_are_those_of_the_warped_distribution():
    logits = torch.tensor([[1.0, 2.0, 3.0, 4.0]])
    row = RowParameters(ChooserParameters(temperature=0.5, top_k=2, seed=1))

    host = choose([row], logits, [[0]])

    expected = torch.tensor([6.0, 8.0]).log_softmax(-1)[host.ids[0] - 2]
    assert host.logprobs == pytest.approx([float(expected)])


@pytest.mark.parametrize(
    ("n", "expected"),
    [(0, []), (2, [0, 3]), (3, [0, 3, 1, 4]), (4, [0, 3, 1, 4]), (5, [0, 3, 1, 4, 2]), (9, [0, 3, 1, 4, 2])],
)
def test_model_server_M11_top_tokens_include_ties_and_are_sorted(n, expected):
    logits = torch.tensor([[-1.0, -3.0, -4.0, -2.0, -3.0]])

    ids, logprobs = choose([RowParameters(CHOOSER, top_n_tokens=n)], logits, [[0]]).top_tokens[0]

    assert ids == expected
    assert logprobs == [logits.log_softmax(-1)[0, id_] for id_ in expected]


def test_top_tokens_belong_to_their_row_and_are_warped():
    logits = torch.tensor([[5.0, 1.0, 2.0], [0.0, 0.0, 0.0], [1.0, 2.0, 3.0]])
    rows = [
        RowParameters(CHOOSER, top_n_tokens=1),
        RowParameters(CHOOSER),
        RowParameters(ChooserParameters(top_k=2), top_n_tokens=3),
    ]

    top = choose(rows, logits, [[1]] * 3).top_tokens

    assert [ids for ids, _ in top] == [[0], [], [2, 1]]
    assert top[2][1] == pytest.approx(torch.tensor([3.0, 2.0]).log_softmax(-1).tolist())


def test_reliability_F6_a_row_that_is_not_finite_is_reported_and_changes_no_other_row():
    logits = random_logits(5)
    mixed = RowParameters(ChooserParameters(temperature=0.7, top_k=5, top_p=0.9, seed=3), top_n_tokens=2)
    rows = [mixed, RowParameters(CHOOSER), mixed, RowParameters(ChooserParameters(typical_p=0.5)), mixed]
    ids = [[1, 2]] * 5
    expected = choose(rows, logits, ids)
    logits[1], logits[2, 7], logits[3] = math.nan, math.inf, -math.inf

    host = choose(rows, logits, ids)

    assert host.failed == [False, True, True, True, False]
    for row in (0, 4):
        assert host.ids[row] == expected.ids[row]
        assert host.logprobs[row] == expected.logprobs[row]
        assert host.top_tokens[row] == expected.top_tokens[row]
    assert all(0 <= id_ < VOCAB_SIZE for id_ in host.ids)
    assert host.top_tokens[2] == ([], [])


shares = st.sampled_from([0.0, 1.0]) | st.floats(0.01, 0.99)
choosers = st.builds(
    ChooserParameters,
    temperature=st.sampled_from([0.0, 1.0]) | st.floats(0.05, 4.0),
    top_k=st.integers(0, VOCAB_SIZE + 3),
    top_p=shares,
    typical_p=shares,
    do_sample=st.booleans(),
    seed=st.integers(0, 2**64 - 1),
    repetition_penalty=st.sampled_from([0.0, 1.0]) | st.floats(0.2, 3.0),
    frequency_penalty=st.sampled_from([0.0]) | st.floats(-2, 2),
    presence_penalty=st.sampled_from([0.0]) | st.floats(-2, 2),
    watermark=st.booleans(),
)
token_ids = st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=1, max_size=12)
sequences = st.tuples(
    st.builds(
        RowParameters,
        choosers,
        prompt_len=st.integers(0, 6),
        min_new_tokens=st.integers(0, 8),
        top_n_tokens=st.integers(0, 5),
    ),
    token_ids,
)


of_batches = given(
    batch=st.lists(sequences, min_size=2, max_size=6),
    seed=st.integers(0, 1000),
    dtype=st.sampled_from(["float32", "bfloat16"]),
)


def check_rows_are_as_if_alone(batch, seed, dtype):
    logits = random_logits(len(batch), seed).to(getattr(torch, dtype))
    rows, ids = [row for row, _ in batch], [ids for _, ids in batch]

    together = choose(rows, logits, ids)

    for index in range(len(batch)):
        alone = choose(rows[index : index + 1], logits[index : index + 1], ids[index : index + 1])
        assert astuple(alone) == tuple(values[index : index + 1] for values in astuple(together))


@settings(max_examples=25)
@of_batches
def test_a_rows_token_logprob_and_top_tokens_never_depend_on_other_rows(batch, seed, dtype):
    check_rows_are_as_if_alone(batch, seed, dtype)


@pytest.mark.slow
@settings(max_examples=400)
@of_batches
def test_a_rows_token_logprob_and_top_tokens_never_depend_on_other_rows_of_many_batches(batch, seed, dtype):
    check_rows_are_as_if_alone(batch, seed, dtype)


any_float = st.floats(width=32)
of_any_parameters = given(
    chooser=st.builds(
        ChooserParameters,
        temperature=any_float,
        top_k=st.integers(-(2**31), 2**31 - 1),
        top_p=any_float,
        typical_p=any_float,
        do_sample=st.booleans(),
        seed=st.integers(0, 2**64 - 1),
        repetition_penalty=any_float,
        frequency_penalty=any_float,
        presence_penalty=any_float,
    ),
    scale=st.sampled_from([0.0, 1.0, 1e4, 1e30]),
    ids=token_ids,
)


def check_choice_is_finite(chooser, scale, ids):
    logits = random_logits(1) * scale

    host = choose([RowParameters(chooser, prompt_len=2, top_n_tokens=3)], logits, [ids])

    assert host.failed == [False]
    assert 0 <= host.ids[0] < VOCAB_SIZE
    assert all(map(math.isfinite, host.top_tokens[0][1]))


@settings(max_examples=60)
@of_any_parameters
def test_reliability_T6_every_value_of_every_parameter_gives_a_finite_choice(chooser, scale, ids):
    check_choice_is_finite(chooser, scale, ids)


@pytest.mark.slow
@settings(max_examples=1000)
@of_any_parameters
def test_reliability_T6_every_value_of_every_parameter_gives_a_finite_choice_at_length(chooser, scale, ids):
    check_choice_is_finite(chooser, scale, ids)

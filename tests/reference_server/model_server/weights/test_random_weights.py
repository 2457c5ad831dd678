"""Seeded weights are one full tensor, however it is cut and drawn."""

import pytest
import torch

from reference_server.model_server.weights import random_weights
from reference_server.model_server.weights.cut import Cut, even, vocabulary
from reference_server.model_server.weights.random_weights import random_weight

CPU = torch.device("cpu")


@pytest.mark.parametrize("shape", [(101, 48), (37, 7), (4, 10, 6), (17, 1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_draws_in_chunks_equal_draws_in_one_call(
    monkeypatch: pytest.MonkeyPatch, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    at_once = random_weight("layer.weight", shape, None, 0, dtype, CPU)
    monkeypatch.setattr(random_weights, "_CHUNK_ELEMENTS", 64)

    in_chunks = random_weight("layer.weight", shape, None, 0, dtype, CPU)

    assert torch.equal(in_chunks, at_once)
    assert at_once.float().std().item() == pytest.approx(0.02, rel=0.5)


@pytest.mark.parametrize(
    "cut",
    [vocabulary(101, 1, 2), even(48, 1, 1, 4), Cut(0, ((0, 20), (50, 70))), Cut(0, ((101, 101),), padding=3)],
)
def test_a_part_is_the_part_of_the_whole(monkeypatch: pytest.MonkeyPatch, cut: Cut) -> None:
    monkeypatch.setattr(random_weights, "_CHUNK_ELEMENTS", 64)
    whole = random_weight("layer.weight", (101, 48), None, 0, torch.float32, CPU)

    part = random_weight("layer.weight", (101, 48), cut, 0, torch.float32, CPU)

    assert torch.equal(part, cut.take(whole))


def test_names_and_seeds_make_other_weights() -> None:
    weight, other_name, other_seed = (
        random_weight(name, (4, 4), None, seed, torch.float32, CPU) for name, seed in (("a", 0), ("b", 0), ("a", 1))
    )

    assert not torch.equal(weight, other_name)
    assert not torch.equal(weight, other_seed)


def test_norms_are_one_and_biases_zero() -> None:
    norm = random_weight("norm.weight", (4,), Cut(0, ((0, 2),)), 0, torch.float32, CPU)
    bias = random_weight("linear.bias", (4,), None, 0, torch.float32, CPU)

    assert (norm.tolist(), bias.tolist()) == ([1.0, 1.0], [0.0] * 4)

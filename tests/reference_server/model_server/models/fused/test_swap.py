"""Modules that are replaced by one operator give the same results; other modules stay as they are."""

import copy

import pytest
import torch
from torch import nn

from reference_server.model_server.models.fused.swap import swap_modules
from tests.support.models.tiny_models import make_tiny_model


@pytest.mark.parametrize(
    ("name", "norms", "activations"),
    [
        ("mixtral", 5, 0),
        ("qwen3-moe", 9, 0),
        ("gemma3", 19, 0),
        ("olmo2", 9, 0),
        ("gpt2", 0, 2),
        ("bloom", 0, 2),
        ("gpt-neox", 0, 0),
        ("opt", 0, 0),
    ],
)
@torch.no_grad()
def test_a_swapped_model_gives_the_same_logits(name: str, norms: int, activations: int) -> None:
    plain = make_tiny_model(name)
    model = copy.deepcopy(plain)
    tokens = torch.arange(12)[None]

    swapped = swap_modules(model)

    assert swapped >= norms + activations
    assert sum(type(module).__name__ == "SingleNorm" for module in model.modules()) >= norms
    assert sum(type(module) is nn.GELU for module in model.modules()) >= activations
    torch.testing.assert_close(model(tokens).logits, plain(tokens).logits, atol=2e-5, rtol=2e-5)
    for before, after in zip(plain.state_dict(), model.state_dict(), strict=True):
        assert before == after

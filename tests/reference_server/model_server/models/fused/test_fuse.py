"""Each operator of the fused walk equals the module that it replaces; other modules stay as they are."""

import numpy as np
import pytest
import torch
from torch import nn

from reference_server.model_server.models.fused import fuse, fused_linear
from reference_server.model_server.step_state import Step, StepMetadata, StepTensors
from tests.support.models.attached import attach
from tests.support.models.tiny_models import make_tiny_model


@torch.no_grad()
@pytest.mark.parametrize("name", ["llama", "qwen2"])
def test_stacked_projections_equal_the_separate_ones(name: str) -> None:
    attention = make_tiny_model(name).model.layers[0].self_attn
    split = (attention.q_proj, attention.k_proj, attention.v_proj)
    hidden = torch.randn(3, 48, generator=torch.Generator().manual_seed(1))
    expected = torch.cat([linear(hidden) for linear in split], -1)

    stacked = fused_linear.stacked(*split)

    torch.testing.assert_close(stacked(hidden), expected, atol=1e-6, rtol=1e-6)
    assert all(linear.weight.numel() == 0 for linear in split)


@pytest.mark.parametrize(
    ("name", "dtype", "tolerance"),
    [
        ("llama", torch.float32, 1e-5),
        ("llama-tied-llama3-rope", torch.float32, 1e-5),
        ("qwen2", torch.float32, 1e-5),
        ("mistral-window", torch.float32, 1e-5),
        ("llama-linear-rope", torch.float32, 1e-5),
        ("llama-yarn-rope", torch.float32, 1e-5),
        ("qwen3", torch.float32, 1e-5),
        ("phi3", torch.float32, 1e-5),
        ("granite", torch.float32, 1e-5),
        ("gemma", torch.float32, 2e-5),
        ("gemma2", torch.float32, 2e-5),
        ("stablelm", torch.float32, 1e-5),
        ("gpt2", torch.float32, 1e-5),
        ("gpt-bigcode", torch.float32, 1e-5),
        ("gpt-bigcode-many-heads", torch.float32, 1e-5),
        ("gpt2-scaled-by-layer", torch.float32, 1e-5),
        ("bloom", torch.float32, 1e-5),
        ("bloom-6-heads", torch.float32, 1e-5),
        ("opt", torch.float32, 1e-5),
        ("gpt-neox", torch.float32, 1e-5),
        ("gpt-neox-serial", torch.float32, 1e-5),
        ("phi", torch.float32, 1e-5),
        ("starcoder2", torch.float32, 1e-5),
        ("llama", torch.bfloat16, 0.15),
        ("llama-tied-llama3-rope", torch.bfloat16, 0.15),
        ("gpt2", torch.bfloat16, 0.15),
        ("bloom", torch.bfloat16, 0.15),
    ],
)
@torch.no_grad()
def test_the_walk_equals_the_models_own_forward(name: str, dtype: torch.dtype, tolerance: float) -> None:
    tokens = torch.randint(0, 100, (20,), generator=torch.Generator().manual_seed(2))
    expected = make_tiny_model(name).to(dtype)(tokens[None]).logits[0]
    model = make_tiny_model(name).to(dtype)
    state = attach(model, dtype)

    decoder = fuse.fuse(model)

    assert decoder is not None
    parts = []
    for first, last in ((0, 5), (5, 18), (18, 19), (19, 20)):
        with state.use(one_row(first, last)):
            parts.append(decoder(tokens[first:last], torch.arange(first, last), None, last - 1))
    torch.testing.assert_close(torch.cat(parts), expected, atol=tolerance, rtol=tolerance)


@torch.no_grad()
@pytest.mark.parametrize("name", ["granite", "gpt2", "bloom"])
def test_given_embeddings_replace_the_token_ids(name: str) -> None:
    tokens, positions = torch.arange(5, 12), torch.arange(7)
    model = make_tiny_model(name)
    state = attach(model, torch.float32)
    decoder = fuse.fuse(model)
    assert decoder is not None

    with state.use(one_row(0, 7)):
        expected = decoder(tokens, positions, None, 6)
    with state.use(one_row(0, 7)):
        found = decoder.logits(decoder.embed(tokens), positions, None, 6)

    assert torch.equal(found, expected)


@pytest.mark.parametrize(
    "name",
    ["falcon", "mpt", "cohere", "olmo", "olmo2", "mixtral", "phi3-longrope", "opt-post-norm"],
)
def test_other_structures_are_not_fused(name: str) -> None:
    assert fuse.fuse(make_tiny_model(name)) is None


def test_a_layer_that_computes_something_else_is_not_fused() -> None:
    model = make_tiny_model("llama")
    attach(model, torch.float32)
    attention = model.model.layers[0].self_attn
    modules_own = attention.forward
    attention.forward = lambda hidden_states, **others: (2 * modules_own(hidden_states, **others)[0], None)

    assert fuse.fuse(model) is None
    assert model.model.layers[0].self_attn.q_proj.weight.numel() > 0


def test_a_norm_with_another_formula_is_not_recognised() -> None:
    class OtherNorm(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.weight, self.variance_epsilon, self.inner = inner.weight, inner.variance_epsilon, inner

        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            return self.inner(hidden) * (2 + self.weight) / self.weight

    model = make_tiny_model("llama")
    model.model.norm = OtherNorm(model.model.norm)

    assert fuse.fuse(model) is None


def one_row(first: int, last: int) -> Step:
    table, positions = np.array([[5, 3]]), np.arange(first, last)
    metadata = StepMetadata(
        slots=table[0, positions // 16] * 16 + positions % 16,
        block_table=table,
        seqlen_q=np.array([last - first]),
        seqlen_k=np.array([last]),
        num_single_rows=int(last - first == 1),
    )
    return Step(metadata, StepTensors.of_host(metadata))

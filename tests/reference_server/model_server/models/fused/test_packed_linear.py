"""Packed linears give the same bits as plain ones, at every place in a model."""

import copy

import pytest
import torch
import torch.nn.functional as F

from reference_server.model_server.models.fused.packed_linear import PackedLinear, can_pack, pack_linears
from tests.support.models.tiny_models import make_tiny_model

packs = pytest.mark.skipif(
    not can_pack(torch.empty(2, 2, dtype=torch.bfloat16)), reason="this processor has no packed product"
)


@packs
@pytest.mark.parametrize("rows", [0, 1, 8, 40])
@pytest.mark.parametrize("has_bias", [True, False])
def test_a_packed_linear_equals_the_plain_one(rows: int, has_bias: bool) -> None:
    torch.manual_seed(rows)
    weight = torch.randn(48, 32, dtype=torch.bfloat16)
    bias = torch.randn(48, dtype=torch.bfloat16) if has_bias else None
    hidden = torch.randn(1, rows, 32, dtype=torch.bfloat16)

    assert torch.equal(PackedLinear(weight, bias)(hidden), F.linear(hidden, weight, bias))


@packs
@pytest.mark.parametrize("name", ["gpt2", "gpt-neox", "bloom"])
@torch.no_grad()
def test_packing_a_model_changes_no_logit_beyond_rounding(name: str) -> None:
    plain = make_tiny_model(name).to(torch.bfloat16)
    packed = copy.deepcopy(plain)
    tokens = torch.arange(12)[None]

    added = pack_linears(packed, packed.get_input_embeddings().weight)

    torch.testing.assert_close(packed(tokens).logits, plain(tokens).logits, atol=0.05, rtol=0.05)
    assert not any(type(module) is torch.nn.Linear for module in packed.modules())
    # GPT-2's and BLOOM's heads are their embedding tables, which stay.
    tied = name != "gpt-neox"
    assert added == (packed.get_input_embeddings().weight.nbytes if tied else 0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@torch.no_grad()
def test_a_model_of_any_type_computes_on_any_processor(dtype: torch.dtype) -> None:
    plain = make_tiny_model("gpt-neox").to(dtype)
    packed = copy.deepcopy(plain)

    pack_linears(packed, None)

    tokens = torch.arange(12)[None]
    torch.testing.assert_close(packed(tokens).logits, plain(tokens).logits, atol=0.05, rtol=0.05)


def test_float32_stays_plain() -> None:
    model = make_tiny_model("gpt-neox")

    assert pack_linears(model, None) == 0
    assert any(type(module) is torch.nn.Linear for module in model.modules())

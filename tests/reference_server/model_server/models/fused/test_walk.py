import torch
from torch import Tensor

from reference_server.model_server.models.fused.operators import Norm, TorchOperators
from reference_server.model_server.models.fused.walk import MLP_TOKENS, FusedLayer, Heads, Walk


def test_tokens_beyond_one_pass_of_an_mlp_get_the_same_results() -> None:
    hidden = torch.randn(2 * MLP_TOKENS + 5, 8, generator=torch.Generator().manual_seed(1))

    whole = _walked(hidden)

    assert torch.equal(whole, torch.cat([_walked(part) for part in torch.split(hidden, MLP_TOKENS)]))
    assert len(whole) == len(hidden)


def _walked(hidden: Tensor) -> Tensor:
    """The result of a layer of elementwise operators, in which the number of rows changes no order of sums."""
    norm = Norm(torch.ones(8), 1e-5)
    layer = FusedLayer(
        input_norm=norm,
        qkv=lambda rows: rows.repeat(1, 3),
        attention=lambda query, _: query,
        output=torch.sin,
        post_norm=norm,
        up=lambda rows: rows.repeat(1, 2) * 3,
        down=torch.cos,
    )
    walk = Walk([layer], Heads(1, 1, 8), TorchOperators())
    return walk(hidden.clone(), None, torch.arange(len(hidden)), None, norm)

from typing import get_args

import pytest

from reference_server.configuration.model_config import Quantize
from tuner.errors import ModelSizeError
from tuner.servers.tgi.weight_methods import METHODS, methods_of

BITS = {method.name: method.bits for method in METHODS}


def test_every_value_of_quantize_has_a_row():
    assert {"none", *get_args(Quantize)} == set(BITS)


@pytest.mark.parametrize(
    ("settings", "bits"),
    [
        ({"quant_method": "gptq", "bits": 8, "group_size": 64}, 8.5),
        ({"quant_method": "gptq", "bits": 4, "group_size": -1}, 4),
        ({"quant_method": "awq", "bits": 4, "group_size": 128}, 4.25),
        ({"quant_method": "fp8"}, 8),
        ({"quant_method": "exl2", "bits": 3.5}, 3.625),
        (
            {"quant_method": "compressed-tensors", "config_groups": {"group_0": {"weights": {"num_bits": 8}}}},
            8,
        ),
    ],
)
def test_a_quantized_checkpoint_has_one_method_with_its_own_bits(settings, bits):
    (method,) = methods_of({"quantization_config": settings})

    assert method.name == settings["quant_method"]
    assert method.bits == bits
    assert not method.mlp_only


def test_an_unknown_checkpoint_is_refused():
    with pytest.raises(ModelSizeError, match="`quant_method` is 'hqq'"):
        methods_of({"quantization_config": {"quant_method": "hqq"}})


def test_bits_are_those_of_the_model_servers_weights():
    torch = pytest.importorskip("torch")
    from reference_server.model_server.quantization.fp8 import round_to_float8
    from reference_server.model_server.quantization.int4 import GroupedIntegers
    from reference_server.model_server.quantization.int8 import round_to_int8

    weight = torch.ones(64, 1024, dtype=torch.bfloat16)
    groups = torch.zeros(64, 8)
    grouped = GroupedIntegers(
        torch.zeros(64, 1024, dtype=torch.uint8), groups + 1, groups, torch.arange(1024) // 128, 4
    )
    stored = {
        "eetq": round_to_int8(weight),
        "fp8": round_to_float8(weight),
        "gptq": grouped.product(torch.bfloat16, torch.device("cpu")),
    }

    for name, product in stored.items():
        assert 8 * product.nbytes / weight.numel() == pytest.approx(BITS[name], rel=0.01), name

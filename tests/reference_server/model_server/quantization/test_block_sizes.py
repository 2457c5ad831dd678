"""Blocks of weights with one scale: their sizes in a config."""

from pathlib import Path
from typing import Any

import pytest

from reference_server.errors import UnsupportedError
from reference_server.model_server.quantization.formats import find_format


def settings(sizes: list[Any], method: str) -> dict[str, Any]:
    if method == "fp8":
        return {"quant_method": "fp8", "weight_block_size": sizes}
    scheme = {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": sizes}
    return {"quant_method": method, "format": "float-quantized", "config_groups": {"group_0": {"weights": scheme}}}


@pytest.mark.parametrize("method", ["fp8", "compressed-tensors"])
@pytest.mark.parametrize("sizes", [[96, 96], [128, 100], [0, 128], ["128", 128]])
def test_hardening_R24_blocks_of_another_size_than_a_power_of_two_are_refused(
    tmp_path: Path, sizes: list[Any], method: str
):
    with pytest.raises(UnsupportedError, match="must be powers of two"):
        find_format({"quantization_config": settings(sizes, method)}, tmp_path)


@pytest.mark.parametrize("method", ["fp8", "compressed-tensors"])
@pytest.mark.parametrize("sizes", [[128, 128], [1, 64]])
def test_blocks_of_a_power_of_two_are_served(tmp_path: Path, sizes: list[Any], method: str):
    assert find_format({"quantization_config": settings(sizes, method)}, tmp_path) is not None

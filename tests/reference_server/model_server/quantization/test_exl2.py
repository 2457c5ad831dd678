"""EXL2 weights: unpacking is exact for every number of bits, and products equal those of the dequantized weight."""

import numpy as np
import pytest
import torch

from reference_server.errors import UnsupportedError
from reference_server.model_server.quantization.exl2 import MixedBits, runs_of, unpack_stream
from tests.support.models.checkpoints.quantized_checkpoints import exl2


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
def test_integers_that_span_two_words_are_unpacked(bits: int) -> None:
    codes = torch.randint(0, 1 << bits, (64, 3), generator=torch.Generator().manual_seed(bits))
    streams = [sum(int(code) << bits * place for place, code in enumerate(column)) for column in codes.t().tolist()]
    words = [[stream >> 32 * word & 0xFFFFFFFF for stream in streams] for word in range(2 * bits)]

    found = unpack_stream(torch.from_numpy(np.array(words, dtype=np.uint32).view(np.int32)), bits)

    assert torch.equal(found, codes)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 0.01)])
def test_a_product_with_mixed_bits_equals_that_of_the_dequantized_weight(dtype: torch.dtype, tolerance: float) -> None:
    weight = torch.randn(16, 192, generator=torch.Generator().manual_seed(1))
    rows = torch.randn(5, 192, generator=torch.Generator().manual_seed(2)).to(dtype)
    stored, dequantized = exl2(weight)
    runs = runs_of(stored["q_groups"].tolist(), len(stored["q_weight"]), "up")
    order = stored["q_invperm"].long().argsort()

    product = MixedBits(stored["q_weight"], stored["q_scale"], stored["q_scale_max"], order, runs).product(
        dtype, torch.device("cpu")
    )

    expected = rows.float() @ dequantized.t()
    assert [run.bits for run in runs] == [8, 6, 5, 4, 3, 2]
    assert (product.dequantize().float() - dequantized).norm() < tolerance * dequantized.norm()
    assert (product(rows).float() - expected).norm() < tolerance * expected.norm()


def test_groups_that_end_inside_a_word_are_refused() -> None:
    with pytest.raises(UnsupportedError, match=r"layers\.0\.up: 16 adjacent inputs of 6 bits are not supported"):
        runs_of([6, 0, 4, 3], 7, "layers.0.up")

"""Weights of mixed bits: every number of bits is unpacked exactly, and what is multiplied is what the format means."""

import numpy as np
import pytest
import torch

from reference_server.errors import UnsupportedError
from reference_server.model_server.quantization.exl2 import MixedBits, runs_of, unpack_stream
from tests.support.quantized_checkpoints import exl2


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
def test_integers_are_unpacked_across_the_ends_of_words(bits: int) -> None:
    codes = torch.randint(0, 1 << bits, (64, 3), generator=torch.Generator().manual_seed(bits))
    streams = [sum(int(code) << bits * place for place, code in enumerate(column)) for column in codes.t().tolist()]
    words = [[stream >> 32 * word & 0xFFFFFFFF for stream in streams] for word in range(2 * bits)]

    found = unpack_stream(torch.from_numpy(np.array(words, dtype=np.uint32).view(np.int32)), bits)

    assert torch.equal(found, codes)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 0.01)])
def test_a_weight_of_every_number_of_bits_is_multiplied_as_it_is_meant(dtype: torch.dtype, tolerance: float) -> None:
    weight = torch.randn(16, 192, generator=torch.Generator().manual_seed(1))
    rows = torch.randn(5, 192, generator=torch.Generator().manual_seed(2)).to(dtype)
    stored, meant = exl2(weight)
    runs = runs_of(stored["q_groups"].tolist(), len(stored["q_weight"]), "up")
    order = stored["q_invperm"].long().argsort()

    product = MixedBits(stored["q_weight"], stored["q_scale"], stored["q_scale_max"], order, runs).product(
        dtype, torch.device("cpu")
    )

    expected = rows.float() @ meant.t()
    assert [run.bits for run in runs] == [8, 6, 5, 4, 3, 2]
    assert (product.dequantize().float() - meant).norm() < tolerance * meant.norm()
    assert (product(rows).float() - expected).norm() < tolerance * expected.norm()


def test_groups_that_end_inside_a_word_are_refused_by_name() -> None:
    with pytest.raises(UnsupportedError, match=r"layers\.0\.up: 16 inputs of 6 bits side by side are not served"):
        runs_of([6, 0, 4, 3], 7, "layers.0.up")

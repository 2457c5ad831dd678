"""Weights lie side by side in memory of their own, and their memory is freed with them."""

import mmap
import resource
from pathlib import Path

import pytest
import torch

from reference_server.model_server.memory.weight_memory import ALIGNMENT, PAGE_BYTES, REGION_BYTES, WeightMemory

STATM = Path("/proc/self/statm")
pytestmark = pytest.mark.skipif(not hasattr(mmap, "MADV_HUGEPAGE"), reason="needs Linux")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.uint8, torch.float32, torch.float16])
def test_a_placed_weight_has_the_same_elements(dtype: torch.dtype) -> None:
    weight = torch.arange(60).view(6, 10).t().to(dtype)

    placed = WeightMemory().place(weight)

    assert torch.equal(placed, weight)
    assert placed.dtype == dtype
    assert placed.is_contiguous()
    assert placed.data_ptr() != weight.data_ptr()


def test_weights_lie_side_by_side_from_the_beginning_of_a_large_page() -> None:
    memory = WeightMemory()
    first, second, third = (memory.place(torch.full((size,), size % 256, dtype=torch.uint8)) for size in (1000, 7, 300))

    assert first.data_ptr() % PAGE_BYTES == 0
    assert second.data_ptr() - first.data_ptr() == 8 * ALIGNMENT
    assert third.data_ptr() - second.data_ptr() == ALIGNMENT
    assert [int(each.sum()) for each in (first, second, third)] == [232_000, 49, 13_200]


def test_a_weight_larger_than_a_region_and_the_next_one_keep_their_elements() -> None:
    memory = WeightMemory()
    small = memory.place(torch.ones(10))
    large = memory.place(torch.ones(REGION_BYTES // 4 + 1))
    after = memory.place(torch.full((10,), 3.0))

    assert large.sum() == REGION_BYTES // 4 + 1
    assert small.sum() == 10
    assert after.sum() == 30


def test_an_empty_weight_stays_where_it_is() -> None:
    empty = torch.empty(0, 4)

    assert WeightMemory().place(empty) is empty


@pytest.mark.skipif(not STATM.is_file(), reason="needs /proc")
def test_a_region_is_freed_with_the_last_of_its_weights() -> None:
    memory = WeightMemory()
    weight = torch.ones(REGION_BYTES, dtype=torch.uint8)
    placed = [memory.place(weight) for _ in range(3)]
    part = placed[1][:10]
    full = resident_bytes()

    placed.clear()

    # The current region, and the one that `part` is in, stay.
    assert full - resident_bytes() == pytest.approx(REGION_BYTES, rel=0.1)
    assert part.sum() == 10


def resident_bytes() -> int:
    return int(STATM.read_text().split()[1]) * resource.getpagesize()

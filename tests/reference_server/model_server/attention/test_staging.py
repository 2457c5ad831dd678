"""The upload of a step's plan: one buffer, every array at its offset, no overlap."""

from typing import Any

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays_of
from numpy.typing import NDArray

from reference_server.model_server.attention.staging import (
    ALIGNMENT,
    host_arrays,
    layout,
    stage,
    upload,
)
from reference_server.model_server.attention.triton_backend import MAX_SPLITS, splits_for
from reference_server.model_server.step_state import StepMetadata, StepTensors

CPU = torch.device("cpu")
SHAPES = arrays_of.array_shapes(min_dims=1, max_dims=2, min_side=0, max_side=9)
DTYPES = st.sampled_from([np.int64, np.int32])
# A step has at least one token; other arrays may be empty, such as rows of logits.
ARRAYS = st.tuples(
    DTYPES.flatmap(lambda dtype: arrays_of.arrays(dtype, st.integers(1, 9))),
    st.lists(DTYPES.flatmap(lambda dtype: arrays_of.arrays(dtype, SHAPES)), max_size=5),
).map(lambda parts: [parts[0], *parts[1]])


@settings(max_examples=40)
@given(ARRAYS)
def test_staged_arrays_are_unchanged(arrays: list[NDArray[Any]]) -> None:
    staged = stage(arrays, CPU)

    for tensor, array in zip(staged, arrays, strict=True):
        np.testing.assert_array_equal(tensor.numpy(), array)
        assert tensor.numpy().dtype == array.dtype
        assert tensor.data_ptr() % array.itemsize == 0
    # One buffer means one copy.
    assert len({tensor.untyped_storage()._cdata for tensor in staged}) == 1


@settings(max_examples=40)
@given(ARRAYS)
def test_staged_arrays_are_aligned_and_do_not_overlap(arrays: list[NDArray[Any]]) -> None:
    offsets = layout(arrays)

    assert all(offset % ALIGNMENT == 0 for offset in offsets)
    for first, second, array in zip(offsets, offsets[1:], arrays, strict=False):
        assert 0 <= second - (first + array.nbytes) < ALIGNMENT


def test_upload_gives_the_tensors_of_a_step() -> None:
    metadata = StepMetadata(
        slots=np.arange(16, 24),
        block_table=np.array([[1, 0], [2, 3], [4, 0]]),
        seqlen_q=np.array([1, 4, 3]),
        seqlen_k=np.array([7, 20, 3]),
        num_single_rows=1,
    )

    placed = upload(metadata, CPU)

    assert placed.slots.tolist() == list(range(16, 24))
    assert placed.block_table.tolist() == [[1, 0], [2, 3], [4, 0]]
    assert placed.seqlen_k.tolist() == [7, 20, 3]
    # Counted from the first row of several tokens.
    assert placed.cu_seqlen_q.tolist() == [0, 4, 7]
    assert placed.cu_seqlen_k.tolist() == [0, 20, 23]
    kinds = [torch.int64, torch.int32, torch.int32, torch.int32, torch.int32]
    assert [getattr(placed, name).dtype for name in StepTensors.__slots__[:5]] == kinds
    assert len(host_arrays(metadata)) == len(kinds)


@given(rows=st.integers(1, 512), num_kv_heads=st.integers(1, 64), processors=st.sampled_from([20, 108, 132, 304]))
def test_splits_fill_the_processors_about_twice_and_no_more(rows: int, num_kv_heads: int, processors: int) -> None:
    splits = splits_for(rows, num_kv_heads, processors)

    programs = rows * num_kv_heads
    assert splits & (splits - 1) == 0
    assert 1 <= splits <= MAX_SPLITS
    assert splits == 1 or splits * programs <= 2 * processors
    assert splits == MAX_SPLITS or 2 * splits * programs > 2 * processors

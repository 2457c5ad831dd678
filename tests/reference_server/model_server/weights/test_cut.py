"""Parts of tensors: examples M24 and M25, and that the ranks' parts are the whole."""

import pytest
import torch

from reference_server.model_server.weights.cut import Cut, even, vocabulary


def test_model_server_M24_vocabulary_of_17_is_9_and_8_rows() -> None:
    first, second = (vocabulary(17, rank, 2) for rank in (0, 1))

    assert (first.spans, first.padding) == (((0, 9),), 0)
    assert (second.spans, second.padding) == (((9, 17),), 1)


def test_a_rank_beyond_the_vocabulary_holds_zeros() -> None:
    part = vocabulary(3, 3, 4).take(torch.ones(3, 2))

    assert part.tolist() == [[0.0, 0.0]]


def test_model_server_M25_packed_rows_are_cut_block_by_block() -> None:
    cut = even(1024, 0, rank=0, world_size=2, blocks=(2, 1, 1))

    assert cut.spans == ((0, 256), (512, 640), (768, 896))
    assert cut.take(torch.arange(1024)).tolist() == [*range(256), *range(512, 640), *range(768, 896)]


def test_parts_along_a_later_dimension_and_their_shape() -> None:
    tensor = torch.arange(24).view(2, 3, 4)

    cut = Cut(2, ((1, 2), (3, 4)))

    assert torch.equal(cut.take(tensor), tensor[..., [1, 3]])
    assert cut.shape((2, 3, 4)) == (2, 3, 2)


def test_padding_goes_behind_the_cut_dimension() -> None:
    padded = Cut(0, ((1, 2),), padding=1).take(torch.ones(2, 3))

    assert padded.tolist() == [[1.0, 1.0, 1.0], [0.0, 0.0, 0.0]]


@pytest.mark.parametrize("blocks", [(1,), (2, 1, 1)])
def test_a_length_that_cannot_be_divided_is_refused(blocks: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="cannot be divided over 3 shards"):
        even(1024, 0, 0, 3, blocks)

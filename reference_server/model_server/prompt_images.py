"""The images of one prompt: their places among its tokens, and the embeddings that take the tokens' places."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class GridPositions:
    """Rotary positions of a prompt on three axes: time, height and width. An image's tokens lie on a grid.

    prompt: [3, prompt tokens] int64. shift: of a later token's position on every axis, from its place in the sequence.
    """

    prompt: NDArray[np.int64]
    shift: int

    @classmethod
    def of(cls, ids: Sequence[int], token_id: int, grids: Iterable[tuple[int, int]]) -> "GridPositions":
        """grids: rows and columns of the tokens `token_id` of each image, in order.

        Text goes on after the largest position of the image before it.
        """
        positions = np.empty((3, len(ids)), dtype=np.int64)
        place = next_position = 0
        images = iter(grids)
        while place < len(ids):
            if ids[place] != token_id:
                positions[:, place] = next_position
                place, next_position = place + 1, next_position + 1
                continue
            rows, columns = next(images)
            end = place + rows * columns
            positions[0, place:end] = next_position
            positions[1, place:end] = next_position + np.repeat(np.arange(rows), columns)
            positions[2, place:end] = next_position + np.tile(np.arange(columns), rows)
            place, next_position = end, next_position + max(rows, columns)
        return cls(positions, next_position - len(ids))

    def last(self, count: int) -> "GridPositions":
        """Those of the last `count` tokens, which become the whole prompt."""
        dropped = self.prompt.shape[1] - count
        return GridPositions(self.prompt[:, dropped:], self.shift + dropped)

    def between(self, start: int, end: int) -> NDArray[np.int64]:
        """[3, end - start]: the positions of the sequence's tokens from `start` to `end`."""
        length = self.prompt.shape[1]
        later = np.arange(max(start, length), max(end, length)) + self.shift
        return np.concatenate((self.prompt[:, start:end], np.broadcast_to(later, (3, len(later)))), axis=1)


@dataclass(slots=True, eq=False)
class PromptImages:
    """Places of the image tokens in a prompt. The embeddings are computed when the first chunk needs one, and kept.

    positions: [image tokens] int64, ascending. compute: returns [image tokens, hidden]; released after its call.
    """

    positions: NDArray[np.int64]
    compute: Callable[[], Tensor] | None
    _embeddings: Tensor | None = None

    def between(self, start: int, end: int) -> slice:
        """The image tokens among the prompt's tokens from `start` to `end`."""
        first, last = np.searchsorted(self.positions, (start, end))
        return slice(int(first), int(last))

    @property
    def embeddings(self) -> Tensor:
        """[image tokens, hidden]."""
        if self._embeddings is None:
            assert self.compute is not None, "kept until the embeddings exist"
            self._embeddings, self.compute = self.compute(), None
        return self._embeddings


def spans_of_images(is_image: NDArray[np.bool_]) -> NDArray[np.int64]:
    """[2, prompt tokens]: first and end of the tokens that each token attends to mutually: its image, or itself.

    >>> spans_of_images(np.array([False, True, True, False, True])).tolist()
    [[0, 1, 1, 3, 4], [1, 3, 3, 4, 5]]
    """
    places, length = np.arange(len(is_image)), len(is_image)
    last_text = np.maximum.accumulate(np.where(is_image, -1, places))
    # From the end: the next token that belongs to no image.
    next_text = np.minimum.accumulate(np.where(is_image, length, places)[::-1])[::-1]
    first = np.where(is_image, last_text + 1, places)
    return np.stack((first, np.where(is_image, next_text, places + 1))).astype(np.int64)


def span_of_prompt(length: int) -> NDArray[np.int64]:
    """The same, [2, length], for a prompt whose tokens all attend to each other."""
    return np.repeat(np.array([[0], [length]], dtype=np.int64), length, axis=1)

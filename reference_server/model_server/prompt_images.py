"""The images of one prompt: their places among its tokens, and the embeddings that take the tokens' places."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor


@dataclass(slots=True, eq=False)
class PromptImages:
    """Places of the image tokens in a prompt. The embeddings are computed when the first chunk needs one, and kept.

    positions: [image tokens] int64, ascending. compute: returns [image tokens, hidden]; released after its only call.
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

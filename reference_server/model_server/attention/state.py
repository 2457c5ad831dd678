"""What the attention of one forward reads, and the object through which modules reach it."""

from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from reference_server.model_server.kv_cache import KVCache


@dataclass(frozen=True, slots=True)
class AttentionMetadata:
    """Geometry of one packed forward. Rows of a single token come first, longer ones after them.

    slots: [tokens] int64, where each token's K/V goes. block_table: [rows, blocks] int64, padded with block 0.
    seqlen_q, seqlen_k: [rows] int64 on the host: new tokens, and tokens whose K/V exist after the store.
    prompt_len: [rows] int64, None where every row decodes.
    `step_memo` keeps what kernels derive once a forward; `batch_memo` what holds while the same rows decode.
    """

    slots: NDArray[np.int64]
    block_table: NDArray[np.int64]
    seqlen_q: NDArray[np.int64]
    seqlen_k: NDArray[np.int64]
    num_decode_rows: int
    prompt_len: NDArray[np.int64] | None = None
    step_memo: dict[Hashable, Any] = field(default_factory=dict)
    batch_memo: dict[Hashable, Any] = field(default_factory=dict)

    @property
    def num_rows(self) -> int:
        return len(self.seqlen_q)

    @property
    def max_k(self) -> int:
        return int(self.seqlen_k.max())

    @property
    def request_len(self) -> NDArray[np.int64]:
        """[rows]: each request's length so far, of which a prompt counts as a whole from its first chunk on."""
        return self.seqlen_k if self.prompt_len is None else np.maximum(self.seqlen_k, self.prompt_len)


@dataclass(frozen=True, slots=True)
class AttentionOptions:
    """What one layer's attention needs beside its tensors; constant for the life of a model.

    window: keys a query sees, itself included. alibi_slopes: [num_heads] float32, on this rank.
    """

    scaling: float
    window: int | None = None
    softcap: float | None = None
    alibi_slopes: Tensor | None = None


class AttentionState:
    """Holds the cache and the metadata of the step in progress; the attention modules keep a reference to it.

    It is held rather than passed down, because several families drop unknown keywords between model and attention.
    """

    def __init__(self) -> None:
        self.cache: KVCache | None = None
        self.metadata: AttentionMetadata | None = None

    @contextmanager
    def use(self, metadata: AttentionMetadata) -> Iterator[None]:
        """Make `metadata` the one that attention reads inside the block."""
        self.metadata = metadata
        try:
            yield
        finally:
            self.metadata = None

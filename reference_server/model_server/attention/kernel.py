"""The protocols of attention over the paged cache: needs of a model, kernels, and the store of keys and values."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import torch
from torch import Tensor

from reference_server.model_server.memory.kv_cache import LayerCache
from reference_server.model_server.step_state import Step

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class AttentionNeeds:
    """The requirements of all layers of a model; `block_size` if the page is fixed.

    cache_dtype: an eight-bit type of the cache; None if the cache has the compute type.
    """

    device_type: str
    dtype: torch.dtype
    head_dims: frozenset[int]
    has_window: bool = False
    has_softcap: bool = False
    has_alibi: bool = False
    block_size: int | None = None
    cache_dtype: torch.dtype | None = None


@dataclass(frozen=True, slots=True)
class AttentionOptions:
    """The parameters of one layer's attention; constant for the life of a model.

    window: keys that a query sees, itself included. alibi_slopes: [num_heads] float32, on this rank.
    """

    scaling: float
    window: int | None = None
    softcap: float | None = None
    alibi_slopes: Tensor | None = None

    @property
    def is_masked(self) -> bool:
        """Whether the scores need more than scaled products and a causal mask."""
        return (self.window, self.softcap, self.alibi_slopes) != (None, None, None)


class AttentionKernel(Protocol):
    """Attention over the paged cache: for the rows of one token (decode) or for the longer rows (prefill) of a step.

    Every model has instances of its own, so a kernel may keep what it derives from the step in progress (`PerStep`).
    """

    name: str
    block_size: int
    # Whether all values that change between steps are read on the device, so that a CUDA graph can capture the kernel.
    is_capturable: bool

    @staticmethod
    def supports(needs: AttentionNeeds, /) -> bool: ...

    def __call__(self, query: Tensor, cache: LayerCache, step: Step, options: AttentionOptions) -> Tensor:
        """Attend. The new K/V are already in the cache, and are read without their scales.

        query: [tokens of the kernel's rows, num_heads, head_dim]. Returns query's shape.
        """
        ...


class CacheStore(Protocol):
    """Writes the new keys and values of all rows into the cache."""

    def __call__(self, key_value: Tensor, cache: LayerCache, step: Step) -> None:
        """Divide by the scales, round to the cache's type, store.

        key_value: [tokens, 2, num_kv_heads, head_dim], any stride; one running sequence owns each slot.
        """
        ...


class PerStep(Generic[T]):
    """A value that a kernel derives from a step for the first layer, and keeps for the other layers."""

    def __init__(self) -> None:
        self._latest: tuple[Step, T] | None = None

    def of(self, step: Step, make: Callable[[], T]) -> T:
        if self._latest is None or self._latest[0] is not step:
            self._latest = step, make()
        return self._latest[1]

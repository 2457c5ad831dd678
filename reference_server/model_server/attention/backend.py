"""Which attention kernels exist, what a model needs of them, and which is chosen for prefill and for decode."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from reference_server.errors import ArgumentError, UnsupportedError
from reference_server.model_server.attention import compiled_backend, torch_backend
from reference_server.model_server.attention.state import AttentionMetadata, AttentionOptions
from reference_server.model_server.options import EngineOptions


@dataclass(frozen=True, slots=True)
class AttentionNeeds:
    """What the probe found the model's layers to ask for, together."""

    device_type: str
    dtype: torch.dtype
    head_dims: frozenset[int]
    has_window: bool = False
    has_softcap: bool = False
    has_alibi: bool = False


class AttentionKernel(Protocol):
    """Attention over the paged cache, for the prefill rows of a forward or for its decode rows."""

    name: str
    block_size: int

    def supports(self, needs: AttentionNeeds, /) -> bool: ...

    def __call__(self, query: Tensor, cache: Tensor, metadata: AttentionMetadata, options: AttentionOptions) -> Tensor:
        """Attend, the new K/V being stored already.

        query: [tokens, num_heads, head_dim], the tokens of the kernel's own rows. cache: one layer of the KVCache.
        Returns query's shape.
        """
        ...


class DecodeKernel(AttentionKernel, Protocol):
    """A decode kernel also writes the cache, for the rows of both phases."""

    def store(self, key_value: Tensor, cache: Tensor, metadata: AttentionMetadata) -> None: ...


Kernel = TypeVar("Kernel", bound=AttentionKernel)


@dataclass(frozen=True, slots=True)
class AttentionBackend:
    """A kernel for each phase."""

    name: str
    prefill: AttentionKernel
    decode: DecodeKernel


TORCH = AttentionBackend("torch", torch_backend.TorchPrefill(), torch_backend.TorchDecode())
COMPILED = AttentionBackend("compiled", torch_backend.TorchPrefill(), compiled_backend.CompiledDecode())
BACKENDS = (COMPILED, TORCH)

# TGI's names fix the page size only (model-server.md section 5.2).
PAGE_SIZES = {"paged": 16, "flashdecoding": 256, "flashinfer": 1}
UNSET_IMPL = "flashdecoding"


@dataclass(frozen=True, slots=True)
class AttentionChoice:
    """The kernels in use, the page, the name that the wire reports, and why."""

    prefill: AttentionKernel
    decode: DecodeKernel
    block_size: int
    impl: str
    reason: str

    @property
    def supports_chunking(self) -> bool:
        """Earlier chunks are read from the cache; TGI's `paged` promises not to."""
        return self.impl != "paged"


def select(kernels: Iterable[Kernel], needs: AttentionNeeds) -> Kernel:
    """The first kernel that serves `needs`."""
    for kernel in kernels:
        if kernel.supports(needs):
            return kernel
    raise UnsupportedError(f"no attention kernel offers {needs}")


def choose(options: EngineOptions, needs: AttentionNeeds) -> AttentionChoice:
    """Kernels and page size for `--attention`; a name that cannot serve the model is refused, never replaced."""
    asked = options.attention
    names = [backend.name for backend in BACKENDS]
    if asked is not None and asked not in PAGE_SIZES and asked not in names:
        raise ArgumentError(
            f"`--attention {asked}` is not served on this device; the choices are {', '.join([*PAGE_SIZES, *names])}"
        )
    backends = [backend for backend in BACKENDS if asked in (None, backend.name) or asked in PAGE_SIZES]
    if asked != COMPILED.name and not options.fuse:
        backends = [backend for backend in backends if backend is not COMPILED]
    prefill = select((backend.prefill for backend in backends), needs)
    decode = select((backend.decode for backend in backends), needs)
    if options.prefix_caching and asked == "paged":
        raise ArgumentError("`--prefix-caching true` cannot be served with `--attention paged`")
    if asked in PAGE_SIZES:
        return AttentionChoice(prefill, decode, PAGE_SIZES[asked], asked, f"--attention {asked} fixes the page size")
    reason = "asked for by name" if asked else f"first that serves a {needs.device_type} device"
    return AttentionChoice(prefill, decode, decode.block_size, asked or UNSET_IMPL, reason)

"""Which attention kernels exist, what a model needs of them, and which is chosen for prefill and for decode."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from reference_server.errors import ArgumentError, UnsupportedError
from reference_server.model_server.attention import (
    compiled_backend,
    flash_backend,
    flashinfer_backend,
    torch_backend,
    triton_backend,
    varlen_backend,
)
from reference_server.model_server.attention.state import AttentionMetadata, AttentionOptions
from reference_server.model_server.options import EngineOptions


@dataclass(frozen=True, slots=True)
class AttentionNeeds:
    """What the probe found the model's layers to ask for, together; `block_size` where the page is fixed."""

    device_type: str
    dtype: torch.dtype
    head_dims: frozenset[int]
    has_window: bool = False
    has_softcap: bool = False
    has_alibi: bool = False
    block_size: int | None = None


class AttentionKernel(Protocol):
    """Attention over the paged cache, for the prefill rows of a forward or for its decode rows."""

    name: str
    block_size: int
    # Whether all that changes between two steps is read on the device, so that a captured graph may hold the call.
    is_capturable: bool

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
    """A kernel for each phase; None where it offers none, and another backend's is taken."""

    name: str
    prefill: AttentionKernel
    decode: DecodeKernel | None


FLASH = AttentionBackend("flash", flash_backend.FlashPrefill(), flash_backend.FlashDecode())
VARLEN = AttentionBackend(
    "varlen", varlen_backend.VarlenPrefill(), varlen_backend.VarlenDecode() if varlen_backend.READS_TABLES else None
)
TRITON = AttentionBackend("triton", triton_backend.TritonPrefill(), triton_backend.TritonDecode())
COMPILED = AttentionBackend("compiled", compiled_backend.CompiledPrefill(), compiled_backend.CompiledDecode())
TORCH = AttentionBackend("torch", torch_backend.TorchPrefill(), torch_backend.TorchDecode())
BACKENDS = (FLASH, VARLEN, TRITON, COMPILED, TORCH)
# Taken for TGI's name alone: planned on the host, so no graph holds it.
FLASHINFER = AttentionBackend(
    "flashinfer", flashinfer_backend.FlashInferPrefill(), flashinfer_backend.FlashInferDecode()
)

# TGI's names fix the page size (model-server.md section 5.2).
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
        raise ArgumentError(f"`--attention {asked}` is not served on this device; {_choices(names)}")
    if options.prefix_caching and asked == "paged":
        raise ArgumentError("`--prefix-caching true` cannot be served with `--attention paged`")
    if asked in PAGE_SIZES:
        page = PAGE_SIZES[asked]
        needs = replace(needs, block_size=page)
        first = (FLASHINFER,) if asked == FLASHINFER.name else ()
        prefill, decode = _pair((*first, *_usable(options)), needs)
        return AttentionChoice(prefill, decode, page, asked, f"--attention {asked} fixes the page size")
    if asked is None:
        prefill, decode = _pair(_usable(options), needs)
        reason = f"first that serves a {needs.device_type} device"
    else:
        try:
            prefill, decode = _pair([backend for backend in BACKENDS if backend.name == asked], needs)
        except UnsupportedError as error:
            raise ArgumentError(
                f"`--attention {asked}` is not served on this device for this model ({error}); {_choices(names)}"
            ) from error
        reason = "asked for by name"
    return AttentionChoice(prefill, decode, max(prefill.block_size, decode.block_size), asked or UNSET_IMPL, reason)


def _choices(names: Iterable[str]) -> str:
    return f"the choices are {', '.join([*PAGE_SIZES, *names])}"


def _usable(options: EngineOptions) -> list[AttentionBackend]:
    return [backend for backend in BACKENDS if options.fuse or backend is not COMPILED]


def _pair(backends: Iterable[AttentionBackend], needs: AttentionNeeds) -> tuple[AttentionKernel, DecodeKernel]:
    """A kernel for each phase. Those that lack the decode phase leave it to the first of all that serves it."""
    backends = list(backends)
    decodes = [backend.decode for backend in backends if backend.decode is not None]
    if not decodes:
        decodes = [backend.decode for backend in BACKENDS if backend.decode is not None]
    return select((backend.prefill for backend in backends), needs), select(decodes, needs)

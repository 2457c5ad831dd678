"""The attention backends, and the choice of kernels for prefill and for decode."""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from reference_server.errors import ArgumentError, UnsupportedError
from reference_server.model_server.attention.compiled_backend import CompiledDecode, CompiledPrefill
from reference_server.model_server.attention.flash_backend import FlashDecode, FlashPrefill
from reference_server.model_server.attention.flashinfer_backend import FlashInferDecode, FlashInferPrefill
from reference_server.model_server.attention.kernel import AttentionKernel, AttentionNeeds, CacheStore
from reference_server.model_server.attention.store import CompiledStore, TorchStore, TritonStore
from reference_server.model_server.attention.torch_backend import TorchDecode, TorchPrefill
from reference_server.model_server.attention.triton_backend import TritonDecode, TritonPrefill
from reference_server.model_server.attention.varlen_backend import READS_TABLES, VarlenDecode, VarlenPrefill
from reference_server.model_server.options import EngineOptions


@dataclass(frozen=True, slots=True)
class AttentionBackend:
    """A kernel for each phase and the store that goes with its decode kernel.

    Without a decode kernel, the decode kernel and the store of another backend are used.
    """

    name: str
    prefill: type[AttentionKernel]
    decode: type[AttentionKernel] | None
    store: type[CacheStore]


FLASH = AttentionBackend("flash", FlashPrefill, FlashDecode, TritonStore)
VARLEN = AttentionBackend("varlen", VarlenPrefill, VarlenDecode if READS_TABLES else None, TritonStore)
TRITON = AttentionBackend("triton", TritonPrefill, TritonDecode, TritonStore)
COMPILED = AttentionBackend("compiled", CompiledPrefill, CompiledDecode, CompiledStore)
TORCH = AttentionBackend("torch", TorchPrefill, TorchDecode, TorchStore)
BACKENDS = (FLASH, VARLEN, TRITON, COMPILED, TORCH)
# Used only for TGI's name: it plans on the host, so no CUDA graph can capture it.
FLASHINFER = AttentionBackend("flashinfer", FlashInferPrefill, FlashInferDecode, TritonStore)

# TGI's names fix the page size.
PAGE_SIZES = {"paged": 16, "flashdecoding": 256, "flashinfer": 1}
UNSET_IMPL = "flashdecoding"


@dataclass(frozen=True, slots=True)
class AttentionChoice:
    """The kernels of one model, its page size, the name that the wire reports, and the reason of the choice."""

    prefill: AttentionKernel
    decode: AttentionKernel
    store: CacheStore
    block_size: int
    impl: str
    reason: str

    @property
    def supports_chunking(self) -> bool:
        """Whether a prompt may be computed in chunks; TGI's `paged` does not offer it."""
        return self.impl != "paged"


def choose(options: EngineOptions, needs: AttentionNeeds) -> AttentionChoice:
    """Kernels and page size for `--attention`; a name that cannot serve the model is refused, never replaced."""
    name = options.attention
    names = [backend.name for backend in BACKENDS]
    all_names = [*PAGE_SIZES, *names]
    if name is not None and name not in PAGE_SIZES and name not in names:
        raise ArgumentError(f"`--attention {name}` is not served on this device; {_choices(all_names)}")
    if options.prefix_caching and name == "paged":
        raise ArgumentError("`--prefix-caching true` cannot be served with `--attention paged`")
    if name is not None and needs.cache_dtype is not None and not _reads_float8(name):
        raise ArgumentError(
            f"`--attention {name}` cannot be served with `--kv-cache-dtype {options.kv_cache_dtype}`: "
            f"it reads no eight-bit keys; {_choices(filter(_reads_float8, all_names))}"
        )
    usable = [backend for backend in BACKENDS if options.fuse or backend is not COMPILED]
    if name in PAGE_SIZES:
        page = PAGE_SIZES[name]
        first = [FLASHINFER] if name == FLASHINFER.name else []
        kernels = _kernels([*first, *usable], replace(needs, block_size=page))
        return AttentionChoice(*kernels, page, name, f"--attention {name} fixes the page size")
    if name is None:
        kernels = _kernels(usable, needs)
        reason = f"first that serves a {needs.device_type} device"
    else:
        try:
            kernels = _kernels([backend for backend in BACKENDS if backend.name == name], needs)
        except UnsupportedError as error:
            raise ArgumentError(
                f"`--attention {name}` is not served on this device for this model ({error}); {_choices(all_names)}"
            ) from error
        reason = "selected by name"
    prefill, decode, _ = kernels
    return AttentionChoice(*kernels, max(prefill.block_size, decode.block_size), name or UNSET_IMPL, reason)


def _choices(names: Iterable[str]) -> str:
    return f"the choices are {', '.join(names)}"


def _reads_float8(name: str) -> bool:
    """Whether an attention of this name has kernels for an eight-bit cache, on some device."""
    return name not in (FLASH.name, VARLEN.name)


def _kernels(
    backends: list[AttentionBackend], needs: AttentionNeeds
) -> tuple[AttentionKernel, AttentionKernel, CacheStore]:
    """The first prefill and the first decode kernel that serve `needs`, and the store of the decode kernel's backend.

    If none of the backends has a decode kernel, the first of all backends that serves `needs` is used.
    """
    prefill = next((backend.prefill for backend in backends if backend.prefill.supports(needs)), None)
    candidates = backends if any(backend.decode for backend in backends) else BACKENDS
    decoding = next((backend for backend in candidates if backend.decode and backend.decode.supports(needs)), None)
    if prefill is None or decoding is None or decoding.decode is None:
        raise UnsupportedError(f"no attention kernel offers {needs}")
    return prefill(), decoding.decode(), decoding.store()

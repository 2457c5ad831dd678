"""Memory for the K/V cache: the peak of the largest prefill, and the blocks that fit in the remaining memory."""

import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from reference_server.errors import ShardError
from reference_server.model_server.device import DeviceMemory
from reference_server.model_server.options import EngineOptions

GIB = 1 << 30
DEFAULT_CPU_GIB = 4.0


def blocks_that_fit(budget_bytes: float, weight_bytes: int, peak_bytes: int, block_bytes: int) -> int:
    """Blocks that fit in a shard's memory with its weights and the largest prefill.

    Raises ShardError, with the flags to change, if none fits.
    """
    num_blocks = int(max(0.0, budget_bytes - weight_bytes - peak_bytes) // block_bytes)
    if num_blocks == 0:
        raise ShardError(
            f"no K/V block fits: {_gib(budget_bytes)} of device memory a shard, less {_gib(weight_bytes)} of weights "
            f"and {_gib(peak_bytes)} for the largest prefill. Raise `--cpu-memory-gib` or `--cuda-memory-fraction`, "
            "or lower `--max-batch-prefill-tokens`"
        )
    return num_blocks


def blocks_in_free_memory(memory: DeviceMemory, share: float, block_bytes: int, reserved_bytes: int = 0) -> int:
    """Blocks that fit in an accelerator's free memory if the part beyond `share` and `reserved_bytes` stay free.

    Call it after the largest prefill, whose memory the allocator keeps. Raises ShardError, with the flags to change, if
    none fits.
    """
    kept_free_bytes = (1 - share) * memory.total_bytes + reserved_bytes
    free_bytes = memory.free_bytes - kept_free_bytes
    num_blocks = int(max(0.0, free_bytes) // block_bytes)
    if num_blocks == 0:
        raise ShardError(
            f"no K/V block fits: of {_gib(memory.total_bytes)} of device memory {_gib(memory.free_bytes)} are free "
            f"in addition to the weights and the largest prefill, and {_gib(kept_free_bytes)} have to stay "
            "free. Raise `--cuda-memory-fraction`, or lower `--max-batch-prefill-tokens`"
        )
    return num_blocks


def device_bytes(options: EngineOptions) -> int:
    """Memory that counts as the device's on a CPU, for all ranks together."""
    if options.cpu_memory_gib is not None:
        return int(options.cpu_memory_gib * GIB)
    return min(int(DEFAULT_CPU_GIB * GIB), available_bytes() // 2)


def available_bytes(proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Memory that this process may still allocate: the machine's, or its container's if that is less."""
    available = int(DEFAULT_CPU_GIB * GIB) * 2
    meminfo = proc / "meminfo"
    if meminfo.is_file():
        fields = dict(line.split(":", 1) for line in meminfo.read_text().splitlines() if ":" in line)
        available = int(fields["MemAvailable"].split()[0]) * 1024
    for limit_name, used_name in (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ):
        limit, used = cgroup / limit_name, cgroup / used_name
        if limit.is_file() and used.is_file() and limit.read_text().strip() != "max":
            available = min(available, max(0, int(limit.read_text()) - int(used.read_text())))
    return available


def _gib(size: float) -> str:
    return f"{size / GIB:.2f} GiB"


class PeakTensorBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The peak bytes of live tensors that were allocated inside the block; counted, so equal in every run."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.peak = 0
        self._current = 0
        self._alive: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Sets no mark for torch's compiler: the mark would import the compiler, 150 MB."""
        return False

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        inputs = {id(leaf.untyped_storage()) for leaf in _tensors((args, kwargs))}
        result = func(*args, **(kwargs or {}))
        for tensor in _tensors(result):
            storage = tensor.untyped_storage()
            if id(storage) not in inputs and id(storage) not in self._alive:
                self._add(storage)
        return result

    def _add(self, storage: torch.UntypedStorage) -> None:
        key, size = id(storage), storage.nbytes()

        def free(_: object) -> None:
            self._current -= size
            del self._alive[key]

        self._alive[key] = weakref.ref(storage, free)
        self._current += size
        self.peak = max(self.peak, self._current)


class PeakAllocatedBytes:
    """The same on an accelerator, from its allocator's counters."""

    def __init__(self, device: torch.device) -> None:
        self.peak = 0
        self._device = device
        self._before = 0

    def __enter__(self) -> "PeakAllocatedBytes":
        torch.cuda.reset_peak_memory_stats(self._device)
        self._before = torch.cuda.memory_allocated(self._device)
        return self

    def __exit__(self, *_: object) -> None:
        self.peak = torch.cuda.max_memory_allocated(self._device) - self._before


def peak_bytes_of(device: torch.device) -> PeakTensorBytes | PeakAllocatedBytes:
    """A context that measures `peak` bytes."""
    return PeakTensorBytes() if device.type == "cpu" else PeakAllocatedBytes(device)


def _tensors(values: Any) -> list[torch.Tensor]:
    leaves, _ = torch.utils._pytree.tree_flatten(values)
    # Weights in oneDNN's layout have no storage, and exist before the block.
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided]

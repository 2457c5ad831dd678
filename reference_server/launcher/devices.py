"""GPUs (by nvidia-smi), processors and memory of this machine. Unsupported accelerators are refused by name."""

import os
import re
import shutil
import struct
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from reference_server.configuration.settings import visible_devices
from reference_server.errors import UnsupportedError

LEAST_CAPABILITY = 7.5

# fp16 tensor TFLOPS by the name in COMPUTE_TYPE. The misspelling of the H100 is the public launcher's: dashboards match
# this text of a response header.
_TERAFLOPS = {
    "nvidia-4090": 82, "nvidia-t4": 65, "nvidia-l4": 121, "nvidia-l40": 181, "nvidia-l40s": 363, "nvidia-a10g": 125,
    "nvidia-a40": 149, "nvidia-a100-sxm4-80gb": 312, "nvidia-h100-80fb-hbm3": 900, "nvidia-h200": 989,
}  # fmt: skip
_ALIASES = {
    "nvidia-geforce-rtx-4090": "nvidia-4090",
    "tesla-t4": "nvidia-t4",
    "nvidia-a100": "nvidia-a100-sxm4-80gb",
    "nvidia-a100-80gb-pcie": "nvidia-a100-sxm4-80gb",
    "nvidia-a100-pcie-40gb": "nvidia-a100-sxm4-80gb",
    "nvidia-a100-sxm4-40gb": "nvidia-a100-sxm4-80gb",
    "a100-sxm4-40gb": "nvidia-a100-sxm4-80gb",
    "a100-sxm4-80gb": "nvidia-a100-sxm4-80gb",
    "nvidia-h100": "nvidia-h100-80fb-hbm3",
    "nvidia-h100-nvl": "nvidia-h100-80fb-hbm3",
    "nvidia-h100-pcie": "nvidia-h100-80fb-hbm3",
    "nvidia-h100-80gb-hbm3": "nvidia-h100-80fb-hbm3",
}
_FOREIGN = {
    "ZE_AFFINITY_MASK": "Intel XPU",
    "HABANA_VISIBLE_DEVICES": "Intel Gaudi",
}


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU by nvidia-smi. `capability`: the compute capability, such as 8.9 for an L4."""

    name: str
    memory_mib: int
    capability: float | None = None

    @property
    def compute_name(self) -> str:
        """The name in COMPUTE_TYPE: TGI's for a known GPU, otherwise nvidia-smi's with dashes."""
        name = self.name.strip().replace(" ", "-").lower()
        return _ALIASES.get(name, name)

    @property
    def teraflops(self) -> int | None:
        return _TERAFLOPS.get(self.compute_name)


@dataclass(frozen=True, slots=True)
class Devices:
    """Devices for a launch. `visible`: the number of accelerators set by the environment; None if it sets none."""

    gpus: tuple[Gpu, ...] = ()
    visible: int | None = None
    num_cores: int = 1
    available_memory_bytes: int = 0


def probe_devices(environ: Mapping[str, str]) -> Devices:
    """The devices of this machine. Raises `UnsupportedError` for an accelerator that is not supported."""
    gpus = _read_gpus()
    for variable, name in _FOREIGN.items():
        if environ.get(variable) and not gpus:
            raise UnsupportedError(
                f"{variable} requests an {name} device, which is not supported: unset it to run on the CPU"
            )
    for gpu in gpus:
        if gpu.capability is not None and gpu.capability < LEAST_CAPABILITY:
            raise UnsupportedError(
                f"{gpu.name} has compute capability {gpu.capability}, but at least {LEAST_CAPABILITY} is "
                "needed: set CUDA_VISIBLE_DEVICES to other devices, or to nothing to run on the CPU"
            )
    return Devices(gpus, _count_visible(environ, len(gpus)), _num_cores(), available_memory_bytes())


def run_tool(*command: str) -> str | None:
    """Standard output of a command; None if it is missing or fails."""
    if shutil.which(command[0]) is None:
        return None
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def available_memory_bytes(root: Path = Path("/")) -> int:
    """Memory that a new process can use: the kernel's estimate, or less if a container limits it."""
    free = [_meminfo(root / "proc/meminfo", "MemAvailable")]
    for directory in _cgroups(root):
        for limit, used in (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes")):
            limit_bytes = _read_number(directory / limit)
            if limit_bytes is not None:
                free.append(max(0, limit_bytes - (_read_number(directory / used) or 0)))
    return min(free)


def _cgroups(root: Path) -> Iterator[Path]:
    """The memory control groups (version 1 and 2) of this process, with their parents."""
    mount = root / "sys/fs/cgroup"
    yield from (mount, mount / "memory")
    try:
        lines = (root / "proc/self/cgroup").read_text(encoding="ascii").splitlines()
    except OSError:
        return
    for line in lines:
        number, controllers, path = line.split(":", 2)
        if number == "0" or "memory" in controllers.split(","):
            base = mount if number == "0" else mount / "memory"
            directory = base / path.strip("/")
            while directory != base and base in directory.parents:
                yield directory
                directory = directory.parent


def multiply_single(*factors: float) -> float:
    """The product in single precision, rounded after every factor, as in the public launcher."""
    product = 1.0
    for factor in factors:
        product = _single(product * _single(factor))
    return product


def _single(value: float) -> float:
    return float(struct.unpack("f", struct.pack("f", value))[0])


def _read_gpus() -> tuple[Gpu, ...]:
    text = run_tool("nvidia-smi", "--query-gpu=gpu_name,memory.total,compute_cap", "--format=csv,noheader,nounits")
    gpus = []
    for line in (text or "").splitlines():
        fields = [field.strip() for field in line.split(",")]
        if len(fields) == 3 and fields[1].isdecimal():
            capability = float(fields[2]) if re.fullmatch(r"\d+\.\d+", fields[2]) else None
            gpus.append(Gpu(fields[0], int(fields[1]), capability))
    return tuple(gpus)


def _count_visible(environ: Mapping[str, str], num_gpus: int) -> int | None:
    listed = visible_devices(environ)
    if listed is None:
        return None
    if listed in ("all", "void") and "CUDA_VISIBLE_DEVICES" not in environ:
        return num_gpus
    return len(listed.split(","))


def _num_cores() -> int:
    """Processors that this process may use, within a container's quota."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text(encoding="ascii").split()
        return max(1, min(cores, int(quota) // int(period)))
    except (OSError, ValueError):
        return cores


def _meminfo(path: Path, key: str) -> int:
    try:
        for line in path.read_text(encoding="ascii").splitlines():
            if line.startswith(f"{key}:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _read_number(path: Path) -> int | None:
    """The number in a cgroup file; None for `max`, or without such a file."""
    try:
        return int(path.read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None

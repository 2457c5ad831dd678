"""GPUs by a short name, with their memory.

The memory is `memory.total` of nvidia-smi as of November 2026, with ECC if it is on by default. It is smaller than the
vendor's number of gigabytes.
"""

from collections.abc import Mapping

from reference_server.launcher.devices import Gpu
from tuner.errors import ModelSizeError

GPUS: Mapping[str, Gpu] = {
    "t4": Gpu("Tesla T4", 15_360, 7.5),
    "l4": Gpu("NVIDIA L4", 23_034, 8.9),
    "a10": Gpu("NVIDIA A10", 23_028, 8.6),
    "a10g": Gpu("NVIDIA A10G", 23_028, 8.6),
    "rtx4090": Gpu("NVIDIA GeForce RTX 4090", 24_564, 8.9),
    "a40": Gpu("NVIDIA A40", 46_068, 8.6),
    "l40s": Gpu("NVIDIA L40S", 46_068, 8.9),
    "rtxa6000": Gpu("NVIDIA RTX A6000", 49_140, 8.6),
    "a100-40gb": Gpu("NVIDIA A100-SXM4-40GB", 40_960, 8.0),
    "a100-80gb": Gpu("NVIDIA A100-SXM4-80GB", 81_920, 8.0),
    "h100": Gpu("NVIDIA H100 80GB HBM3", 81_559, 9.0),
    "h200": Gpu("NVIDIA H200", 143_771, 9.0),
    "b200": Gpu("NVIDIA B200", 183_359, 10.0),
}


def find_gpu(text: str) -> Gpu:
    """The GPU with a name, or with a memory in GiB such as `24GiB`. Raises ModelSizeError.

    >>> find_gpu("A10G").memory_mib
    23028
    >>> find_gpu("24GiB").memory_mib
    24576
    """
    name = text.lower()
    if name in GPUS:
        return GPUS[name]
    try:
        mib = int(float(name.removesuffix("gib")) * 1024) if name.endswith("gib") else 0
    except (ValueError, OverflowError):
        mib = 0
    if mib <= 0:
        raise ModelSizeError(f"unknown GPU {text}: use one of {', '.join(GPUS)}, or the memory, such as 24GiB")
    return Gpu(f"GPU of {text}", mib)

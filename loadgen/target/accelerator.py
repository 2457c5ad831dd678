"""GPU samples from NVML, if there is a GPU and `nvidia-ml-py` is installed: utilization, memory, power, clocks.

Samples only devices that run a compute process, or all devices if the driver does not list processes.
"""

import importlib
import ipaddress
import logging
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

Sample = tuple[str, str, float]
logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Accelerators:
    """The GPUs of this machine. `nvml` is the module of nvidia-ml-py, initialized."""

    nvml: Any
    devices: tuple[Any, ...]

    @property
    def description(self) -> str:
        """As in `2 × NVIDIA H200`. A device without a name is a GPU. Raises nothing."""
        names = [
            _text(self._query(lambda device=device: self.nvml.nvmlDeviceGetName(device))) for device in self.devices
        ]
        kinds = dict.fromkeys(name or "GPU" for name in names)
        return ", ".join(f"{names.count(kind) or len(names)} × {kind}" for kind in kinds)

    @property
    def driver(self) -> str:
        """The driver's version; empty if unknown."""
        return _text(self._query(lambda: self.nvml.nvmlSystemGetDriverVersion()))

    def sample(self) -> list[Sample]:
        """Name, labels and value of every current sample of the devices in use."""
        processes = {index: self._num_processes(device) for index, device in enumerate(self.devices)}
        in_use = [index for index, count in processes.items() if count] or list(processes)
        return [
            sample for index in in_use for sample in self._device_samples(index, self.devices[index], processes[index])
        ]

    def close(self) -> None:
        self._query(self.nvml.nvmlShutdown)

    def _num_processes(self, device: Any) -> int | None:
        running = self._query(lambda: self.nvml.nvmlDeviceGetComputeRunningProcesses(device))
        return None if running is None else len(running)

    def _device_samples(self, index: int, device: Any, processes: int | None) -> list[Sample]:
        nvml, labels = self.nvml, f'gpu="{index}"'
        utilization = self._query(lambda: nvml.nvmlDeviceGetUtilizationRates(device))
        memory = self._query(lambda: nvml.nvmlDeviceGetMemoryInfo(device))
        milliwatts = self._query(lambda: nvml.nvmlDeviceGetPowerUsage(device))
        megahertz = self._query(lambda: nvml.nvmlDeviceGetClockInfo(device, nvml.NVML_CLOCK_SM))
        reasons = self._query(lambda: nvml.nvmlDeviceGetCurrentClocksThrottleReasons(device))
        values = {
            "accelerator_utilization_ratio": None if utilization is None else utilization.gpu / 100,
            "accelerator_memory_used_bytes": None if memory is None else memory.used,
            "accelerator_power_watts": None if milliwatts is None else milliwatts / 1e3,
            "accelerator_clock_hertz": None if megahertz is None else megahertz * 1e6,
            "accelerator_throttle_reasons": reasons,
            "accelerator_processes": processes,
        }
        return [(name, labels, float(value)) for name, value in values.items() if value is not None]

    def _query(self, call: Any) -> Any:
        """The result of a call; None if the device does not support it."""
        try:
            return call()
        except self.nvml.NVMLError:
            return None


def open_accelerators(url: str) -> Accelerators | None:
    """The GPUs of this machine; None if the server is on another machine or there are none."""
    if not _is_local(url):
        return None
    try:
        nvml = importlib.import_module("pynvml")
    except ImportError:
        return None
    try:
        nvml.nvmlInit()
        devices = tuple(nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount()))
    except nvml.NVMLError as error:
        logger.info("no GPU telemetry: %s", error)
        return None
    return Accelerators(nvml, devices) if devices else None


def _is_local(url: str) -> bool:
    """Whether a URL is on the loopback interface.

    >>> [_is_local(url) for url in ("http://localhost:1", "http://127.0.0.1:1", "http://[::1]:1", "http://10.0.0.7")]
    [True, True, True, False]
    """
    host = urlsplit(url).hostname or ""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _text(name: Any) -> str:
    return name.decode(errors="replace") if isinstance(name, bytes) else str(name or "")

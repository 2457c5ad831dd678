"""GPU samples from a made-up NVML with two devices, one of them in use."""

import json
import sys
import time
from types import SimpleNamespace

import pytest

from loadgen.target.accelerator import open_accelerators
from loadgen.target.control import ControlClient
from loadgen.target.metrics_source import MetricsSource
from loadgen.target.telemetry import Telemetry
from reports.run_store import JsonlWriter
from tests.support.servers.stream_server import ServerState, stream_server

LOCAL = "http://127.0.0.1:3000"


class FakeNvml(SimpleNamespace):
    NVML_CLOCK_SM = 1

    class NVMLError(Exception):
        pass

    def __init__(self, processes=((101,), ()), watts=350_000, unsupported=()):
        super().__init__(processes=processes, watts=watts, unsupported=unsupported, is_open=False)

    def __getattribute__(self, name):
        if name in super().__getattribute__("__dict__").get("unsupported", ()):
            raise_ = super().__getattribute__("NVMLError")

            def refuse(*_):
                raise raise_("Not Supported")

            return refuse
        return super().__getattribute__(name)

    def nvmlInit(self):
        self.is_open = True

    def nvmlShutdown(self):
        self.is_open = False

    def nvmlSystemGetDriverVersion(self):
        return b"570.86"

    def nvmlDeviceGetCount(self):
        return len(self.processes)

    def nvmlDeviceGetHandleByIndex(self, index):
        return index

    def nvmlDeviceGetName(self, device):
        return b"NVIDIA H200"

    def nvmlDeviceGetComputeRunningProcesses(self, device):
        return [SimpleNamespace(pid=pid) for pid in self.processes[device]]

    def nvmlDeviceGetUtilizationRates(self, device):
        return SimpleNamespace(gpu=87, memory=40)

    def nvmlDeviceGetMemoryInfo(self, device):
        return SimpleNamespace(used=2 * 2**30, total=141 * 2**30)

    def nvmlDeviceGetPowerUsage(self, device):
        return self.watts

    def nvmlDeviceGetClockInfo(self, device, kind):
        return 1_980

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, device):
        return 4


@pytest.fixture
def nvml(monkeypatch):
    fake = FakeNvml()
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    return fake


def test_metrics_13_devices_in_use_report_utilization_memory_power_clocks_and_throttling(nvml):
    accelerators = open_accelerators(LOCAL)

    assert accelerators.description == "2 × NVIDIA H200"
    assert accelerators.driver == "570.86"
    assert accelerators.sample() == [
        ("accelerator_utilization_ratio", 'gpu="0"', 0.87),
        ("accelerator_memory_used_bytes", 'gpu="0"', 2.0 * 2**30),
        ("accelerator_power_watts", 'gpu="0"', 350.0),
        ("accelerator_clock_hertz", 'gpu="0"', 1.98e9),
        ("accelerator_throttle_reasons", 'gpu="0"', 4.0),
        ("accelerator_processes", 'gpu="0"', 1.0),
    ]
    accelerators.close()
    assert not nvml.is_open


def test_an_unsupported_value_of_a_device_is_left_out(nvml):
    nvml.unsupported = ("nvmlDeviceGetPowerUsage", "nvmlDeviceGetComputeRunningProcesses")

    names = [(name, labels) for name, labels, _ in open_accelerators(LOCAL).sample()]

    assert ("accelerator_utilization_ratio", 'gpu="1"') in names
    assert not any(name in ("accelerator_power_watts", "accelerator_processes") for name, _ in names)


def test_a_remote_server_and_a_machine_without_gpus_have_no_accelerators(nvml, monkeypatch):
    assert open_accelerators("http://10.0.0.7:3000") is None

    nvml.unsupported = ("nvmlInit",)
    assert open_accelerators(LOCAL) is None

    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert open_accelerators(LOCAL) is None


def test_gpus_are_sampled_even_if_the_server_has_no_metrics(nvml, tmp_path):
    with stream_server(ServerState(has_metrics=False)) as (url, _):
        telemetry = Telemetry(
            [MetricsSource(url, ControlClient(url))], JsonlWriter(tmp_path / "m.jsonl"), open_accelerators(url)
        )
        telemetry.start()
        telemetry.begin_run(time.perf_counter_ns())
        telemetry.finish()

    rows = [json.loads(line) for line in (tmp_path / "m.jsonl").read_text().splitlines()]
    watts = [row for row in rows if row["name"] == "accelerator_power_watts"]
    assert [row["value"] for row in watts] == [350.0, 350.0]
    assert watts[0]["t_s"] < 0 < watts[1]["t_s"]
    assert telemetry.server_requests is None

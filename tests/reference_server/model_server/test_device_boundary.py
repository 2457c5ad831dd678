"""A step is launched without waiting for the device and without mixing its tensors with the host's."""

import os
import subprocess
import sys

import pytest


@pytest.mark.slow
def test_launching_waits_for_nothing_and_mixes_no_devices() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.models.devices.stand_in_device"],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        timeout=170,
        text=True,
    )

    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        f"{kind}, {how}" for kind in ("greedy", "sampled", "penalised", "mixed") for how in ("launched", "graphed")
    ]


WITHOUT_TRITON = """
import importlib, pkgutil, sys

sys.modules.update(dict.fromkeys(("triton", "flash_attn", "flashinfer")))
import torch

import reference_server.model_server
from reference_server.errors import ArgumentError
from reference_server.model_server.attention import select
from reference_server.model_server.attention.select import AttentionNeeds
from reference_server.model_server.options import EngineOptions

packages = pkgutil.walk_packages(reference_server.model_server.__path__, "reference_server.model_server.")
for module in packages:
    if not module.name.endswith((".triton_attention", ".shrink_expand", ".operator_kernels", ".measure.__main__")):
        importlib.import_module(module.name)
assert not torch.cuda.is_initialized(), "an import asked for a device"
for name in ("triton", "flash", "varlen"):
    for device in ("cpu", "cuda"):
        try:
            select.choose(
                EngineOptions("model", attention=name), AttentionNeeds(device, torch.float32, frozenset({64}))
            )
        except ArgumentError as error:
            print(error)
"""


@pytest.mark.slow
def test_everything_imports_without_the_kernels_packages_and_asking_for_them_names_them() -> None:
    done = subprocess.run([sys.executable, "-c", WITHOUT_TRITON], capture_output=True, timeout=120, text=True)

    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 6
    assert all("is not served on this device for this model" in line for line in lines)
    assert [line.partition("`--attention ")[2].partition("`")[0] for line in lines[::2]] == [
        "triton",
        "flash",
        "varlen",
    ]

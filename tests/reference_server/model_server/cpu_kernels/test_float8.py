"""The compiled conversions of eight-bit floats, for the instructions of three processors, against torch."""

import ctypes
import subprocess
from pathlib import Path

import pytest
import torch
from torch import Tensor

from reference_server.model_server.cpu_kernels import build
from reference_server.model_server.memory import float8

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
NAMES = {E4M3: "E4M3", E5M2: "E5M2"}
# The processor of each set of instructions, and the flag that this one needs to run its code.
TARGETS = {"plain": ("x86-64", "sse2"), "avx2": ("haswell", "avx2"), "avx512": ("icelake-server", "avx512_vnni")}
CPU_FLAGS = Path("/proc/cpuinfo")
SOURCE = """
#include "float8.h"
extern "C" {
#define FUNCTIONS(F)                                                                                        \\
  void widen_bfloat16_##F(const F* from, int64_t count, BFloat16* to) { widen(from, count, to); }           \\
  void widen_float_##F(const F* from, int64_t count, float* to) { widen(from, count, to); }                 \\
  void round_float_##F(const float* from, int64_t count, F* to) { round_to(from, count, 1.0f, to); }        \\
  void round_bfloat16_##F(const BFloat16* from, int64_t count, F* to) { round_to(from, count, 1.0f, to); }
FUNCTIONS(E4M3)
FUNCTIONS(E5M2)
}
"""
pytestmark = pytest.mark.skipif(
    build.find_compiler() is None or not CPU_FLAGS.is_file(), reason="there is no C++ compiler, or no /proc/cpuinfo"
)


@pytest.fixture(scope="module", params=TARGETS)
def library(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    processor, flag = TARGETS[request.param]
    if flag not in CPU_FLAGS.read_text().split():
        pytest.skip(f"this processor has no {flag}")
    directory = tmp_path_factory.mktemp("float8")
    source, path = directory / "float8.cpp", directory / "float8.so"
    source.write_text(SOURCE)
    flags = [each for each in build.FLAGS if not each.startswith(("-march", "-D"))]
    include = f"-I{Path(build.__file__).parent}"
    compiler = build.find_compiler()
    assert compiler is not None
    subprocess.run([compiler, *flags, include, "-shared", f"-march={processor}", source, "-o", path], check=True)
    return ctypes.CDLL(str(path))


def convert(library: ctypes.CDLL, name: str, source: Tensor, dtype: torch.dtype) -> Tensor:
    result = torch.empty(source.shape, dtype=dtype)
    pointers = [ctypes.c_void_p(each.data_ptr()) for each in (source, result)]
    getattr(library, name)(pointers[0], ctypes.c_int64(source.numel()), pointers[1])
    return result


@pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=str)
def test_every_value_is_widened_exactly(library: ctypes.CDLL, dtype: torch.dtype) -> None:
    # 256 and a few, which end within a vector.
    values = torch.arange(256 + 37).to(torch.uint8).view(dtype)

    for name, wide in (("bfloat16", torch.bfloat16), ("float", torch.float32)):
        found = convert(library, f"widen_{name}_{NAMES[dtype]}", values, wide)
        torch.testing.assert_close(found, values.to(wide), rtol=0, atol=0, equal_nan=True)
        numbers = ~found.isnan()
        assert torch.equal(found.signbit()[numbers], values.to(wide).signbit()[numbers])


@pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=str)
def test_every_bfloat16_is_rounded_as_by_torch(library: ctypes.CDLL, dtype: torch.dtype) -> None:
    values = torch.arange(1 << 16).to(torch.int32).to(torch.int16).view(torch.bfloat16)

    found = convert(library, f"round_bfloat16_{NAMES[dtype]}", values, dtype)

    torch.testing.assert_close(found.float(), float8.rounded(values, dtype).float(), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=str)
def test_ties_and_their_neighbours_are_rounded_as_by_torch(library: ctypes.CDLL, dtype: torch.dtype) -> None:
    codes = torch.arange(127 if dtype == E4M3 else 124).to(torch.uint8).view(dtype).float()
    ties = (codes[1:] + codes[:-1]) / 2
    near = [ties, torch.nextafter(ties, torch.tensor(torch.inf)), torch.nextafter(ties, torch.tensor(0.0))]
    values = torch.cat([*near, *(-each for each in near)])

    found = convert(library, f"round_float_{NAMES[dtype]}", values, dtype)

    assert torch.equal(found.view(torch.uint8), float8.rounded(values, dtype).view(torch.uint8))

"""The product of bfloat16 panels for both instruction sets, called as from C, against the product in float64."""

import ctypes
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from reference_server.model_server.cpu_kernels import build
from reference_server.model_server.models.fused.packed_linear import PANEL, in_panels

Product = Callable[[Tensor, Tensor, Tensor | None, range], Tensor]
"""Rows, weight, bias and panels -> results, NaN outside of the panels."""
SOURCES = [Path(build.__file__).parent / name for name in ("panels_avx512.cpp", "panels_avx2.cpp")]
# By set of instructions: a processor that has it, and the flag of /proc/cpuinfo.
TARGETS = {"avx512-bf16": ("cooperlake", "avx512_bf16"), "avx2": ("haswell", "avx2")}
CPU_FLAGS = Path("/proc/cpuinfo")
BF16 = torch.bfloat16
pytestmark = pytest.mark.skipif(build.find_compiler() is None, reason="there is no C++ compiler")


@pytest.fixture(scope="module", params=TARGETS)
def product(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Product:
    processor, wanted = TARGETS[request.param]
    if not CPU_FLAGS.is_file() or wanted not in CPU_FLAGS.read_text().split():
        pytest.skip(f"this processor has no {wanted}")
    library = compiled(tmp_path_factory.mktemp("panels") / f"{processor}.so", processor)
    return lambda rows, weight, bias, panels: multiply(library, rows, weight, bias, panels)


def compiled(path: Path, processor: str) -> ctypes.CDLL:
    flags = [flag for flag in build.FLAGS if not flag.startswith(("-march", "-D"))]
    compiler = build.find_compiler()
    assert compiler is not None
    sources = map(str, SOURCES)
    subprocess.run([compiler, *flags, "-shared", f"-march={processor}", *sources, "-o", str(path)], check=True)
    return ctypes.CDLL(str(path))


def multiply(library: ctypes.CDLL, rows: Tensor, weight: Tensor, bias: Tensor | None, panels: range) -> Tensor:
    packed, (outputs, inputs) = in_panels(weight), weight.shape
    result = rows.new_full((len(rows), outputs), torch.nan)
    library.multiply_panels(
        ctypes.c_void_p(packed.data_ptr()), ctypes.c_void_p(None if bias is None else bias.data_ptr()),
        ctypes.c_int64(inputs), ctypes.c_int64(outputs),
        ctypes.c_void_p(rows.data_ptr()), ctypes.c_int64(rows.stride(0)), ctypes.c_int64(len(rows)),
        ctypes.c_void_p(result.data_ptr()), ctypes.c_int64(panels.start), ctypes.c_int64(panels.stop),
    )  # fmt: skip
    return result


def all_panels(weight: Tensor) -> range:
    return range(-(-len(weight) // PANEL))


# 256 inputs are a block of the AVX2 product, 2,050 rows of 192 inputs more than it keeps in the cache.
@pytest.mark.parametrize(
    ("inputs", "outputs", "rows"),
    [
        *((inputs, outputs, rows) for inputs, outputs in ((2, 1), (258, 33)) for rows in (*range(15), 24, 25)),
        (2048, 96, 13),
        (192, 40, 2050),
    ],
)
@pytest.mark.parametrize("has_bias", [True, False])
def test_a_product_equals_the_one_in_float64(
    product: Product, inputs: int, outputs: int, rows: int, has_bias: bool
) -> None:
    torch.manual_seed(rows)
    weight, hidden = (torch.randn(size, inputs).to(BF16) for size in (outputs, rows))
    bias = torch.randn(outputs).to(BF16) if has_bias else None
    expected = F.linear(hidden.double(), weight.double(), None if bias is None else bias.double())

    found = product(hidden, weight, bias, all_panels(weight))

    torch.testing.assert_close(found.double(), expected, rtol=2**-8, atol=1e-5 * inputs)


def test_a_rows_product_does_not_depend_on_the_rows_beside_it(product: Product) -> None:
    torch.manual_seed(5)
    weight, hidden = torch.randn(160, 600).to(BF16), torch.randn(300, 600).to(BF16)
    together = product(hidden, weight, None, all_panels(weight))

    for rows in (1, 2, 3, 4, 5, 6, 7, 12, 13):
        assert torch.equal(product(hidden[-rows:], weight, None, all_panels(weight)), together[-rows:])


def test_only_the_outputs_of_the_panels_are_written_from_rows_with_a_stride(product: Product) -> None:
    torch.manual_seed(5)
    weight, hidden = torch.randn(100, 64).to(BF16), torch.randn(7, 80).to(BF16)[:, :64]
    whole = product(hidden, weight, None, all_panels(weight))

    found = product(hidden, weight, None, range(1, 3))

    assert torch.equal(found[:, 32:96], whole[:, 32:96])
    assert found[:, :32].isnan().all()
    assert found[:, 96:].isnan().all()

"""The compiled integer products: both instruction sets against the dequantized weight in float64."""

import ctypes
import functools
import itertools
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from reference_server.model_server.cpu_kernels import build
from reference_server.model_server.quantization.packed_integers import (
    PANEL,
    ROW_GROUP,
    PackedIntegers,
    pack_groups,
    pack_outputs,
)

Product = Callable[[PackedIntegers, Tensor, Tensor | None], tuple[Tensor, Tensor]]
"""Weight, rows and bias -> results, and the rounded rows."""
SOURCE = Path(build.__file__).parent / "integers.cpp"
# The processor of each set of instructions, and its lanes.
TARGETS = {"vnni": ("icelake-server", 16), "avx2": ("haswell", 8)}
ROWS = (*range(1, 14), 24, 25, 64)
CPU_FLAGS = Path("/proc/cpuinfo")
pytestmark = pytest.mark.skipif(build.find_compiler() is None, reason="there is no C++ compiler")


class Weight(ctypes.Structure):
    """`IntegerWeight` of integers.h."""

    _fields_ = [(name, ctypes.c_void_p) for name in ("codes", "multipliers", "scales", "zeros")] + [
        (name, ctypes.c_int64) for name in ("outputs", "inputs", "groups", "group", "bits")
    ]


class Rounded(ctypes.Structure):
    """`RoundedRows` of integers.h."""

    _fields_ = [(name, ctypes.c_void_p) for name in ("codes", "scales", "sums")]


Libraries = Callable[[str], ctypes.CDLL]
"""The library of a set of instructions, compiled at the first call."""


@pytest.fixture(scope="module")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> Libraries:
    directory = tmp_path_factory.mktemp("integers")

    @functools.cache
    def library(instructions: str) -> ctypes.CDLL:
        processor, lanes = TARGETS[instructions]
        wanted = "avx512_vnni" if instructions == "vnni" else "avx2"
        if not CPU_FLAGS.is_file() or wanted not in CPU_FLAGS.read_text().split():
            pytest.skip(f"this processor has no {wanted}")
        found = compiled(directory, processor)
        assert found.integer_lanes() == lanes
        return found

    return library


@pytest.fixture(scope="module", params=["vnni", pytest.param("avx2", marks=pytest.mark.slow)])
def product(request: pytest.FixtureRequest, libraries: Libraries) -> Product:
    """The product of one set of instructions, called as from C."""
    library = libraries(request.param)
    return lambda weight, rows, bias: multiply(library, weight, rows, bias)


def compiled(directory: Path, processor: str) -> ctypes.CDLL:
    path = directory / f"{processor}.so"
    flags = [flag for flag in build.FLAGS if not flag.startswith(("-march", "-D"))]
    compiler = build.find_compiler()
    assert compiler is not None
    subprocess.run([compiler, *flags, "-shared", f"-march={processor}", str(SOURCE), "-o", str(path)], check=True)
    return ctypes.CDLL(str(path))


def multiply(library: ctypes.CDLL, packed: PackedIntegers, rows: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    def pointer(tensor: Tensor | None) -> int | None:
        return None if tensor is None else tensor.data_ptr()

    panels, groups, quads = packed.codes.shape[:3]
    count, is_float = len(rows), int(rows.dtype == torch.float32)
    weight = Weight(
        *map(pointer, (packed.codes, packed.multipliers, packed.scales, packed.zeros)),
        *(*packed.shape, groups, 4 * quads, packed.bits),
    )
    buffers = (
        torch.empty(count, groups * 4 * quads, dtype=torch.int8),
        torch.empty(count, groups),
        torch.empty(count, groups, dtype=torch.int32),
    )
    rounded = Rounded(*map(pointer, buffers))
    output = rows.new_full((count, packed.shape[0]), torch.nan)
    sizes = (ctypes.c_int64(count), ctypes.byref(weight))
    library.round_rows(
        ctypes.c_void_p(rows.data_ptr()), ctypes.c_int64(is_float), ctypes.c_int64(count),
        ctypes.c_int64(rows.stride(0)), ctypes.byref(weight), ctypes.byref(rounded),
    )  # fmt: skip
    library.multiply_integers(
        ctypes.byref(rounded), *sizes, ctypes.c_int64(0), ctypes.c_int64(panels), ctypes.c_void_p(pointer(bias)),
        ctypes.c_void_p(output.data_ptr()), ctypes.c_int64(is_float), ctypes.c_int64(packed.shape[0]),
    )  # fmt: skip
    near = buffers[0].double().unflatten(1, (groups, -1)) * buffers[1].double()[..., None]
    return output, near.flatten(1)[:, : rows.shape[1]]


def by_group(outputs: int, inputs: int, group: int, bits: int, has_zeros: bool) -> PackedIntegers:
    groups = 1 if group == -1 else inputs // group
    middle = float(1 << bits - 1)
    zeros = torch.randint(0, 1 << bits, (outputs, groups)).float()
    packed = pack_groups(
        torch.randint(0, 1 << bits, (outputs, inputs), dtype=torch.uint8),
        (torch.rand(outputs, groups) + 0.01).half(),
        zeros if has_zeros else torch.full_like(zeros, middle),
        bits,
    )
    assert packed is not None
    return packed


def by_output(outputs: int, inputs: int) -> PackedIntegers:
    return pack_outputs(torch.randint(-128, 128, (outputs, inputs), dtype=torch.int8), torch.rand(outputs))


def check(product: Product, packed: PackedIntegers, rows: Tensor, bias: Tensor | None = None) -> None:
    """Each input is rounded to its nearest step; the result is that of the rounded rows, up to float32 sums."""
    weight = packed.dequantize().double()
    group = 4 * packed.codes.shape[2]
    padded = F.pad(rows.float(), (0, -rows.shape[1] % group)).unflatten(1, (-1, group))
    steps = (padded.abs().amax(2, keepdim=True) / 127).expand_as(padded).flatten(1)[:, : rows.shape[1]].double()

    found, near = product(packed, rows, bias)

    assert ((near - rows).abs() <= 0.5001 * steps).all()
    exact = near @ weight.t() + (0 if bias is None else bias.double())
    least = 1e-6 * (near.abs() @ weight.abs().t()) + (0 if rows.dtype == torch.float32 else exact.abs() / 256) + 1e-6
    assert ((found.double() - exact).abs() <= least).all()


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(5)


@pytest.mark.parametrize("has_zeros", [False, True])
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("group", [32, 64, 128, -1])
@pytest.mark.parametrize("shape", [(32, 128), (100, 384), (31, 256)])
def test_a_product_in_groups_equals_that_of_the_dequantized_weight(
    product: Product, shape: tuple[int, int], group: int, bits: int, has_zeros: bool
) -> None:
    packed = by_group(*shape, group, bits, has_zeros)

    for count in ROWS:
        check(product, packed, torch.randn(count, shape[1]))


@pytest.mark.parametrize("shape", [(32, 64), (200, 192), (33, 60), (1, 4), (96, 770)])
def test_a_product_with_a_scale_per_output_equals_that_of_the_dequantized_weight(
    product: Product, shape: tuple[int, int]
) -> None:
    packed = by_output(*shape)

    for count in ROWS:
        check(product, packed, torch.randn(count, shape[1]))


@pytest.mark.parametrize("bits", [4, 8])
def test_bias_and_rows_that_lie_apart_and_bfloat16(product: Product, bits: int) -> None:
    packed = by_group(72, 96, 32, bits, True)
    wide = torch.randn(7, 200)

    check(product, packed, wide[:, 10:106], torch.randn(72))
    check(product, packed, wide[:, 10:106].bfloat16(), torch.randn(72).bfloat16())


def test_the_largest_codes_do_not_overflow(product: Product) -> None:
    lowest, highest = torch.full((32, 256), -128, dtype=torch.int8), torch.full((32, 256), 127, dtype=torch.int8)

    for codes, sign in itertools.product((lowest, highest), (-1.0, 1.0)):
        found, _ = product(pack_outputs(codes, torch.ones(32)), torch.full((3, 256), sign), None)

        assert torch.equal(found, torch.full((3, 32), sign * 256.0 * codes[0, 0].item()))


def test_a_row_does_not_depend_on_those_beside_it(product: Product) -> None:
    rows = torch.randn(64, 384)
    for packed in (by_group(100, 384, 32, 4, True), by_group(100, 384, 128, 4, False), by_output(100, 384)):
        together, _ = product(packed, rows, None)

        for count in (1, 2, 3, 4, 5, 13):
            assert torch.equal(product(packed, rows[:count], None)[0], together[:count])


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_a_value_that_is_not_finite_spoils_its_own_row_only(product: Product, value: float) -> None:
    rows = torch.randn(3, 128)
    packed = by_group(32, 128, 64, 4, False)
    clean, _ = product(packed, rows, None)
    rows[1, 70] = value

    found, _ = product(packed, rows, None)

    assert not found[1].isfinite().any()
    assert torch.equal(found[::2], clean[::2])


def test_rows_of_zeros_and_of_the_smallest_numbers_give_zeros(product: Product) -> None:
    rows = torch.zeros(2, 64)
    rows[1] = 1e-40

    assert torch.equal(product(by_output(32, 64), rows, None)[0], torch.zeros(2, 32))


def test_the_layout_has_panels_of_outputs() -> None:
    packed = by_output(PANEL + 1, ROW_GROUP + 4)

    assert packed.codes.shape == (2, 2, ROW_GROUP // 4, PANEL, 4)
    assert packed.shape == (PANEL + 1, ROW_GROUP + 4)


@pytest.mark.slow
def test_both_instruction_sets_give_the_same_bits(libraries: Libraries) -> None:
    both = [libraries(instructions) for instructions in TARGETS]
    rows = torch.randn(9, 256)

    for packed in (by_group(96, 256, 32, 4, True), by_group(96, 256, -1, 4, False), by_output(96, 256)):
        first, second = [multiply(library, packed, rows, None)[0] for library in both]
        assert torch.equal(first, second)

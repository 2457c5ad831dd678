"""The Triton kernels compiled for a Hopper GPU from the CPU, for each preset's shape: types, tiles, tensor cores."""

import sys
from typing import Any

import pytest
import torch

from reference_server.model_server.attention.triton_backend import (
    DECODE_TILE,
    LEAST_TILE,
    PREFILL_QUERIES,
    PREFILL_TILE,
    kernels,
    power_of_two,
    tile_for,
)
from reference_server.model_server.models.adapters import triton_product
from reference_server.model_server.models.fused.operators import warps_of

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="Triton is made for Linux alone")

# Limits of one block on compute capability 9.0.
SHARED_BYTES = 227 << 10
# Query heads of a K/V head, head size, ALiBi.
SHAPES = {
    "bloom-560m": (1, 64, True),
    "llama-3.2-1b": (4, 64, False),
    "llama-3.1-8b": (4, 128, False),
    "qwen2.5-7b": (7, 128, False),
}
# Every shape with a cache of bfloat16, one with each eight-bit type, by its mantissa bits.
CACHES = [*((preset, 0) for preset in SHAPES), ("llama-3.1-8b", 3), ("llama-3.1-8b", 2)]
INTEGERS = {
    "residual_stride", "delta_stride",
    "row_stride", "token_stride", "plane_stride", "head_stride", "query_head_stride", "table_stride",
    "num_kv_heads", "num_heads", "head_dim", "block_size", "size", "half",
    "result_stride", "inputs", "tokens", "ranks_room", "row_tiles", "share",
}  # fmt: skip
# Any number, unlike sizes of the model.
COUNTS = {"num_kv_heads", "num_heads", "tokens", "ranks_room", "row_tiles"}
POINTERS = {
    "slots": "*i64",
    "positions": "*i64",
    "block_table": "*i32",
    "seqlen_k": "*i32",
    "cu_seqlen_q": "*i32",
    "slopes": "*fp32",
    "records": "*i64",
    "order": "*i64",
    "starts": "*i64",
    "groups": "*i64",
}
FLOAT_POINTERS = {"partial", "maxima", "sums", "shrunk"}


def compiled(name: str, num_warps: int, **constants: Any) -> Any:
    """One kernel's binary for sm_90 with bfloat16 tensors."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from reference_server.model_server.models.fused import operator_kernels

    modules = (kernels(), operator_kernels, triton_product.kernels())
    kernel = next(getattr(module, name) for module in modules if hasattr(module, name))
    signature = {argument: _type_of(argument, constants) for argument in kernel.arg_names}
    # Tensors and strides of real launches are multiples of 16, which the launcher finds out by itself.
    divisible = {
        (position,): [["tt.divisibility", 16]]
        for position, argument in enumerate(kernel.arg_names)
        if signature[argument].startswith("*") or argument in INTEGERS - COUNTS
    }
    source = ASTSource(kernel, signature, constants, divisible)
    return triton.compile(
        source, target=GPUTarget("cuda", 90, 32), options={"num_warps": num_warps, "enable_fp_fusion": True}
    )


def _type_of(argument: str, constants: dict[str, Any]) -> str:
    if argument in constants:
        return "constexpr"
    if argument in POINTERS:
        return POINTERS[argument]
    if argument in FLOAT_POINTERS:
        return "*fp32"
    if argument in INTEGERS:
        return "i32"
    if argument == "cache" and constants["FLOAT8"]:
        return "*u8"
    floats = ("scaling", "softcap", "epsilon", "key_factor", "value_factor")
    return "fp32" if argument in floats else "*bf16"


def check(binary: Any, uses_tensor_cores: bool) -> None:
    assert binary.asm["cubin"]
    assert binary.metadata.shared <= SHARED_BYTES
    has_products = "wgmma" in binary.asm["ptx"] or "mma.sync" in binary.asm["ptx"]
    assert has_products == uses_tensor_cores


@pytest.mark.parametrize(("preset", "float8"), CACHES)
def test_decode_attention_compiles_to_tensor_core_code(preset: str, float8: int) -> None:
    group, head_dim, alibi = SHAPES[preset]

    binary = compiled(
        "decode",
        4,
        GROUP=group,
        GROUP_TILE=power_of_two(group, LEAST_TILE),
        DIM=head_dim,
        TILE=tile_for(head_dim, torch.bfloat16, DECODE_TILE),
        SPLITS=8,
        WINDOW=0,
        HAS_SOFTCAP=False,
        HAS_ALIBI=alibi,
        FLOAT8=float8,
    )

    check(binary, uses_tensor_cores=True)


@pytest.mark.parametrize(("preset", "float8"), CACHES)
def test_prefill_attention_compiles_to_tensor_core_code(preset: str, float8: int) -> None:
    group, head_dim, alibi = SHAPES[preset]
    queries = tile_for(head_dim, torch.bfloat16, PREFILL_QUERIES)

    binary = compiled(
        "prefill",
        8 if queries > 64 else 4,
        GROUP=group,
        DIM=head_dim,
        QUERIES=queries,
        TILE=tile_for(head_dim, torch.bfloat16, PREFILL_TILE),
        WINDOW=0,
        HAS_SOFTCAP=False,
        HAS_ALIBI=alibi,
        FLOAT8=float8,
    )

    check(binary, uses_tensor_cores=True)


def test_masks_and_the_small_kernels_compile() -> None:
    masked = {"WINDOW": 4096, "HAS_SOFTCAP": True, "HAS_ALIBI": False, "FLOAT8": 0}
    shape = {"GROUP": 2, "DIM": 256, "TILE": tile_for(256, torch.bfloat16, DECODE_TILE)}

    check(compiled("decode", 4, **shape, GROUP_TILE=16, SPLITS=1, **masked), uses_tensor_cores=True)
    check(compiled("merge", 4, SPLITS=32, DIM=128), uses_tensor_cores=False)
    for float8 in (0, 2, 3):
        check(compiled("store", 2, HEADS=8, DIM=128, FLOAT8=float8), uses_tensor_cores=False)


def test_the_operators_between_products_compile() -> None:
    norm = {"HAS_DELTA": True, "HAS_BIAS": True, "CENTERED": True}

    check(compiled("add_norm", warps_of(4096), BLOCK=4096, **norm), uses_tensor_cores=False)
    check(compiled("norm_heads", 1, BLOCK=128), uses_tensor_cores=False)
    check(compiled("rotate", 4, HEADS=64, HALF=64), uses_tensor_cores=False)
    check(compiled("silu_mul", 4, BLOCK=1024), uses_tensor_cores=False)


@pytest.mark.parametrize("rows", [LEAST_TILE, triton_product.MAX_ROWS])
def test_the_products_of_adapters_compile_to_tensor_core_code(rows: int) -> None:
    sizes = {"FIELDS": triton_product.FIELDS, "ROWS": rows, "RANKS": triton_product.RANK_TILE}

    check(compiled("shrink", 4, **sizes, TILE=triton_product.INPUT_TILE), uses_tensor_cores=True)
    check(
        compiled("expand", 4, **sizes, TILE=triton_product.OUTPUT_TILE, SPLITS=triton_product.MAX_SPLITS),
        uses_tensor_cores=True,
    )
